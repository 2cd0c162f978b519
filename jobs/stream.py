"""A thousand sensors publish to an MQTT broker; an LSTM with state per sensor answers each message and learns from it.

    shoal run stream                                         # a private broker, 1,000 simulated sensors, until Ctrl-C
    shoal run stream sensors=200 rate_hz=5 max_wall_s=60     # other sensors, for a minute
    shoal run stream mqtt.broker=broker.example:1883 mqtt.topic=plant/+/temperature
    shoal run stream files='[history.parquet]'               # a replay, through the same code
    shoal run stream resume=RUN                              # goes on where it was, after a kill too
    shoal serve deploy stream@champion                       # an endpoint that follows the weights as they are learnt
    python jobs/stream.py sensors=200                        # in this process, without Ray

What the wildcards of the topic match names the sensor. The forecast of its next value is published to
`shoal/forecasts/SENSOR` before the message is learnt. A message is acknowledged when a checkpoint that contains its
update is on the disk. See docs/libs/stream.md.
"""

from shoal.libs.stream.spec import StreamSpec


def spec() -> StreamSpec:
    """The recipe: 1,000 sensors at 1 Hz, forecast one message ahead."""
    return StreamSpec()


if __name__ == "__main__":
    from shoal.libs.stream.flow import stream_main

    stream_main(spec())
