"""A registered model's code is edited, its replicas die and others come: a version answers as it was registered.

    python -m benchmarks.serving.edited_code [--quick]

Each edit changes what the class in the project's folder computes. Then a replica is killed (SIGKILL), another starts,
and the endpoint is asked on many connections, so that both replicas answer. Every few edits the edited class is
registered as the next version, to which the endpoint moves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shoal
from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from shoal.client import Client
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

EDITS_A_VERSION, NUM_REQUESTS = 6, 40
DEADLINE_S = 120.0
TEXT = """import torch
from edited_helper import ADDED
class Shift(torch.nn.Module):
    def forward(self, x): return x + ADDED
"""


def edit(folder: Path, added: int) -> None:
    (folder / "edited_net.py").write_text(TEXT)
    (folder / "edited_helper.py").write_text(f"ADDED = {added}\n")


def register() -> int:
    x, output = (TensorSignature(name=name, datatype="FP32", shape=[-1, 1]) for name in ("x", "output"))
    signature, model = Signature(inputs=[x], outputs=[output]), ModelFactory(factory="edited_net:Shift")
    return Registry().register("shift", WeightSnapshot.of(1, {}), model=model, signature=signature).version


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the endpoint has not come to the expected state")
        time.sleep(0.2)


def kill_replica(client: Client) -> None:
    """Kill one, and wait until another has taken its place."""
    pids = {each.pid for each in client.status().replicas}
    killed = min(pids)
    os.kill(killed, signal.SIGKILL)

    def is_replaced() -> bool:
        now = client.status().replicas
        return len(now) == len(pids) and killed not in {each.pid for each in now} and all(each.ready for each in now)

    wait_until(is_replaced)


def count_wrong(url: str, token: str, version: int, added: int) -> int:
    """The answers that are not those of that version as it was registered."""
    wrong = 0
    for _ in range(NUM_REQUESTS):
        with Client(url, token=token) as client:  # a connection each: any replica may answer
            answer = client.infer("shift", np.zeros((1, 1), np.float32))
            wrong += (answer.version, float(answer["output"][0, 0])) != (version, float(added))
    return wrong


def measure(folder: Path, num_edits: int) -> list[int]:
    """The wrong answers after each edit."""
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "SHOAL_HOME": str(folder / "home")}
    edit(folder, 0)
    version, added, found = register(), 0, list[int]()
    with shoal.serve("shift@champion", num_replicas=2) as endpoint, endpoint.client() as client:
        for number in range(1, num_edits + 1):
            edit(folder, number)
            kill_replica(client)
            found.append(count_wrong(endpoint.url, endpoint.token, version, added))
            print(f"{number} edits, version {version}: {found[-1]} of {NUM_REQUESTS} answers are wrong", flush=True)
            if number % EDITS_A_VERSION == 0:
                version, added = register(), number
                wait_until(lambda: client.infer("shift", np.zeros((1, 1), np.float32)).version == version)  # noqa: B023
    return found


def main() -> None:
    chosen = options(__doc__, runs=1)
    with scratch() as folder:
        found = measure(folder, EDITS_A_VERSION + 2 if chosen.quick else 5 * EDITS_A_VERSION)
    title = f"{len(found)} edits of a model's code, each with a replica that dies: answers of other code"
    note = f"{len(found) * NUM_REQUESTS} answers of {len(found) // EDITS_A_VERSION} versions by 2 replicas"
    row = compare(title, "answers", "lower", [sum(found)], bar=0.0, bar_kind="value", note=note)
    write("serving_edited_code", [row], chosen.results)


if __name__ == "__main__":
    main()
