"""How long a stream is away after a kill: from SIGKILL to the first forecast of the process that takes over.

    python -m benchmarks.stream_restart [--runs N] [--quick]

Mosquitto, 100 simulated sensors at 1 Hz, and `python -m shoal.libs.stream resume=auto`, which is killed and started
again at once by the same command: interpreter, imports, checkpoint and log, broker, first forecast. Quiet: beside what
the machine does anyway. Busy: with a loop on each core. At the end, readings lost or learnt twice are counted.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

import shoal.runs
from benchmarks.children import OUR_PYTHON, scratch
from benchmarks.result import compare, options, write
from shoal.libs.stream.batch_log import read_batches
from shoal.libs.stream.mqtt import PrivateBroker
from shoal.libs.stream.mqtt_source import parse_address
from shoal.libs.stream.spec import SensorTopicSpec

SENSORS, BAR_S, WAIT_S, UP_S = 100, 5.0, 120.0, 4.0


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that compute, each in a session of its own, as other users have them."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(num_kills: int, num_loops: int, folder: Path) -> tuple[list[float], int]:
    """Seconds of each restart, and how many readings were lost or learnt twice."""
    os.environ["SHOAL_HOME"] = str(folder / "home")
    forecasts: queue.Queue[float] = queue.Queue()
    with PrivateBroker(folder / "broker") as broker, busy_loops(num_loops):
        spec = SensorTopicSpec(broker=broker.address)
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.on_message = lambda *_: forecasts.put(time.monotonic())
        client.connect(*parse_address(spec))
        client.subscribe(f"{spec.answers}/#", qos=0)
        client.loop_start()
        words = [OUR_PYTHON, "-m", "shoal.libs.stream", f"mqtt.broker={broker.address}", "resume=auto",
                 "commit.keep_log=true", "mqtt.client_id=bench"]  # fmt: skip
        fleet_words = ["-m", "shoal.libs.stream.fleet", "--broker", broker.address, "--sensors", str(SENSORS)]
        fleet = subprocess.Popen([OUR_PYTHON, *fleet_words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        found = []
        with ExitStack() as stack, (folder / "log.txt").open("ab") as output:
            killed_s = time.monotonic()
            for at in range(num_kills + 1):
                learner = subprocess.Popen(words, stdout=output, stderr=output)
                stack.callback(learner.kill)
                while (answered_s := forecasts.get(timeout=WAIT_S)) < killed_s + 0.02 * (at > 0):
                    pass  # forecasts that were on their way
                found.append(answered_s - killed_s)
                time.sleep(UP_S)
                if at == num_kills:
                    fleet.communicate(timeout=WAIT_S)  # ends it
                    time.sleep(UP_S)
                    learner.terminate()
                    learner.wait(WAIT_S)
                else:
                    learner.kill()
                    killed_s = time.monotonic()
                    learner.wait()
        client.loop_stop()
    log = shoal.runs.load("latest").folder / "log"
    counts = Counter(message.sequence for batch in read_batches(log) for message in batch.messages)
    num_learnt = max(counts) - min(counts) + 1
    return found[1:], num_learnt - len(counts) + sum(counts.values()) - len(counts)


def main() -> None:
    chosen = options(__doc__, runs=7)
    rows = []
    for name, num_loops in {"quiet": 0, "a busy loop on each core": os.cpu_count() or 1}.items():
        with scratch() as folder:
            seconds, num_wrong = measure(chosen.runs, num_loops, folder)
        print(name, [f"{each:.2f}" for each in seconds], num_wrong, flush=True)
        note = f"{SENSORS} sensors at 1 Hz; killed {chosen.runs} times, {num_wrong} readings lost or learnt twice"
        bar = None if num_loops else BAR_S
        rows.append(
            compare(f"a stream's restart, {name}: from the kill to the first forecast", "s", "lower", seconds, bar=bar,
                    bar_kind=None if bar is None else "value", note=note)
        )  # fmt: skip
    write("stream_restart", rows, chosen.results)


if __name__ == "__main__":
    main()
