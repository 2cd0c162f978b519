"""A process that learns from a broker, for tests that kill it: python stream_program.py BROKER CLIENT_ID FOLDER COUNT

For each line of its standard input it forks a child that runs until COUNT messages are learnt, and prints the child's
process id; then, when the child has ended, how: its exit status, or the negative signal. Forked, a child is there in
milliseconds: this process has imported everything, and has one thread.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from stream_case import SMALL

from shoal.libs.stream.loop import StreamLoop
from shoal.libs.stream.mqtt import SensorSource
from shoal.libs.stream.spec import CommitSpec, SensorTopicSpec
from shoal.libs.stream.trainer import OnlineTrainer


def learn(broker: str, client_id: str, folder: Path, count: int) -> None:
    """Learn until `count` messages are learnt."""
    source = SensorSource(SensorTopicSpec(broker=broker, client_id=client_id, receive_maximum=200), 1)
    spec = CommitSpec(messages=40, interval_s=0.2, max_batch=8, keep_log=True)
    loop = StreamLoop(OnlineTrainer(SMALL), source, folder, spec, source.publish_forecasts)
    loop.run(lambda: loop.trainer.totals.num_messages >= count)
    assert {"ray", "torch._dynamo"}.isdisjoint(sys.modules), "each takes a second in which nothing is answered"


def main() -> None:
    """Fork for each line."""
    torch.set_num_threads(1)
    broker, client_id, folder, count = sys.argv[1:]
    for _ in sys.stdin:
        if (child := os.fork()) == 0:
            status = 1  # unless it ends well
            try:
                learn(broker, client_id, Path(folder), int(count))
                status = 0
            except Exception:
                traceback.print_exc()
                raise
            finally:
                os._exit(status)
        os.write(1, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
