"""The spec of a stream run. Used by the flow and its job; imports neither torch nor Ray."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from shoal.config import Spec
from shoal.extend.registry import AliasNames
from shoal.extend.runs import LogFormat, TrackerNames

FieldNames = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
]
"""Fields of a payload; `value_field=x` is `value_field=[x]`."""


class OnlineSpec(Spec):
    """How a stream is learnt.

    width:         values of a message; the first one is forecast
    horizon:       messages of the same sensor ahead
    hidden:        units of the LSTM
    num_steps:     over which an update is propagated back in time (truncated BPTT)
    learn_every:   messages of a sensor between its updates: 1 learns from each at once; more are fewer, cheaper updates
    update_sensors: whose windows one update takes together, at least; fewer when the stream pauses
    memory:        messages after which a sensor's scaler has forgotten two thirds
    learning_rate: of Adam
    seed:          of the first weights
    """

    width: int = Field(default=1, ge=1)
    horizon: int = Field(default=1, ge=1)
    hidden: int = Field(default=32, ge=1)
    num_steps: int = Field(default=16, ge=1)
    learn_every: int = Field(default=1, ge=1)
    update_sensors: int = Field(default=16, ge=1)
    memory: int = Field(default=1000, ge=2)
    learning_rate: float = Field(default=5e-3, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _every_message_is_in_a_window(self) -> OnlineSpec:
        if self.learn_every > self.num_steps:
            raise ValueError(f"learn_every={self.learn_every} is more than num_steps={self.num_steps}: some are missed")
        return self


class MqttSpec(Spec):
    """A topic of an MQTT 5 broker.

    broker:            HOST or HOST:PORT
    topic:             a filter, of one topic or with wildcards
    client_id:         names the session in which the broker holds what is not acknowledged
    receive_maximum:   messages that the broker may send beyond the last acknowledged one
    session_expiry_s:  how long the broker holds messages for a run that is away
    username, password, has_tls: of the broker
    connect_timeout_s: for the first connection
    """

    broker: str = ""
    topic: str = ""
    client_id: str = ""
    receive_maximum: int = Field(default=4000, ge=1, le=65535)
    session_expiry_s: int = Field(default=86400, ge=1, lt=2**32)
    username: str = ""
    password: SecretStr = SecretStr("")
    has_tls: bool = False
    connect_timeout_s: float = Field(default=10.0, gt=0)


class SensorTopicSpec(MqttSpec):
    """A topic whose messages are of sensors. The other fields are those of every topic.

    broker:       HOST or HOST:PORT; "" starts a private mosquitto on this machine, with simulated sensors
    topic:        filter of the sensors' topics; what its wildcards match names the sensor, joined by `/`; without
                  wildcards, the topic's last level
    sensor_field: a payload's field that names the sensor instead
    value_field:  the payload's field that is learnt, nested ones by dots: ENERGY.Power. Of several, [temperature,
                  humidity], or a pattern, `*` or ENERGY.*, each is a sensor of its own: NAME/FIELD
    time_field:   the field with the time: Unix seconds or milliseconds, or ISO 8601 (UTC where it has no zone)
    answers:      forecasts are published to ANSWERS/SENSOR; "" publishes none
    client_id:    "": by the run
    """

    topic: str = "shoal/sensors/+"
    sensor_field: str = ""
    value_field: FieldNames = ("value",)
    time_field: str = "time"
    answers: str = "shoal/forecasts"


class CommitSpec(Spec):
    """When a group of messages is checkpointed and acknowledged.

    messages:         a group has at least so many, or is
    interval_s:       so old
    max_batch:        messages that are learnt together, at most
    keep_checkpoints: the newest ones
    keep_log:         retain the log of all batches, not only of those after the oldest checkpoint
    """

    messages: int = Field(default=1000, ge=1)
    interval_s: float = Field(default=1.0, gt=0)
    max_batch: int = Field(default=256, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    keep_log: bool = False


class StreamSpec(Spec):
    """One stream run: it learns from messages and answers them, until it is stopped.

    files:            replay these (.parquet, .csv, .jsonl; also patterns) in place of a broker's topic
    sensors, rate_hz: of the simulated sensors, which publish where mqtt.broker is ""; messages a second of each
    max_messages:     ends the run after so many; None: never
    max_wall_s:       ends the run after so long; None: never
    logs:             json: each line of the driver's output, and of the workers' logs, is an object
    track:            where its record is mirrored to: mlflow, wandb, trackio
    name:             in the registry; versions get the aliases, which endpoints follow
    register_every_s: between two versions
    resume:           the run to continue; `auto`, in a process alone: the newest of its name and sensors, or a new
    """

    main_fields = (
        "mqtt.broker",
        "mqtt.topic",
        "files",
        "sensors",
        "rate_hz",
        "max_messages",
        "name",
        "resume",
    )
    page = "libs/stream.md"

    mqtt: SensorTopicSpec = SensorTopicSpec()
    files: tuple[str, ...] = ()
    online: OnlineSpec = OnlineSpec()
    commit: CommitSpec = CommitSpec()
    sensors: int = Field(default=1000, ge=0)
    rate_hz: float = Field(default=1.0, gt=0)
    max_messages: int | None = Field(default=None, ge=1)
    max_wall_s: float | None = Field(default=None, gt=0)
    track: TrackerNames = ()
    logs: LogFormat = "text"
    name: str = "stream"
    aliases: AliasNames = ("champion",)
    register_every_s: float = Field(default=30.0, gt=0)
    resume: str = ""

    @model_validator(mode="after")
    def _group_fits_the_window(self) -> StreamSpec:
        """A group that needs more messages than the broker sends before an acknowledgement would never fill."""
        if not self.files and self.commit.messages > self.mqtt.receive_maximum:
            raise ValueError(
                f"commit.messages={self.commit.messages} is more than mqtt.receive_maximum="
                f"{self.mqtt.receive_maximum}: the broker would wait for an acknowledgement, and the group for messages"
            )
        return self
