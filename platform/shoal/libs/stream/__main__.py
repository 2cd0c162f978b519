"""`python -m shoal.libs.stream mqtt.broker=HOST resume=auto a.b=c ...`: a stream of this process alone, without Ray.

For a service manager that starts the same command again after a crash: with `resume=auto` it continues the newest run
of its `name` and sensors, or begins one. `shoal run stream` runs the same as a job of a cluster.
"""

from shoal.gc_freeze import freeze_loaded_objects

with freeze_loaded_objects():
    from shoal.libs.stream.flow import stream_main
    from shoal.libs.stream.spec import StreamSpec

if __name__ == "__main__":
    stream_main(StreamSpec())
