"""Elastic synchronous training goes on when workers are killed, and their replacements have its weights."""

import hashlib
import multiprocessing
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from test_asynchronous_faults import KillingLog, Processes, spec_of

from shoal.libs.asynchronous.replicas import fit_replicas
from shoal.train import Callback
from shoal.train.callback import TrainingState
from train_task import Toy


class DigestCallback(Callback):
    """Notes step and weights in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"digests of {multiprocessing.current_process().name}, {os.getpid()}"

    def on_step(self, state: TrainingState) -> None:
        digest = hashlib.sha256()
        for each in state.model[0].state_dict().values():
            digest.update(each.numpy().tobytes())
        with self._file.open("a") as file:
            file.write(f"{state.step} {digest.hexdigest()}\n")


class Digested(Toy):
    def __init__(self, *, folder: str, **changes: Any) -> None:
        super().__init__(dropout=0.0, **changes)
        self._folder = folder

    def callbacks(self) -> list[Callback]:
        return [DigestCallback(Path(self._folder))]


def test_survivors_and_replacements_have_equal_weights_when_a_worker_and_the_chief_are_killed(tmp_path: Path) -> None:
    """The run waits for its second worker, so each step is taken by two."""
    task = {"task": f"{__file__}:Digested", "args": {"folder": str(tmp_path), "step_s": 0.02}}
    processes = Processes()
    log = KillingLog(processes, {15: "worker 1", 35: "worker 0"})
    spec = spec_of(**task, sync="all_reduce", workers=[2, 2], stop={"steps": 60})
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    assert [details["index"] for details in log.find("worker_lost")] == [1, 0]
    assert log.find("elastic") == [{"healed": 3, "restarts": 0}]
    digests: dict[int, list[str]] = defaultdict(list)
    for file in tmp_path.glob("digests of *"):
        for step, digest in map(str.split, file.read_text().splitlines()):
            digests[int(step)].append(digest)
    assert sorted(digests) == list(range(1, 61))  # no step was repeated or left out
    assert all(len(set(each)) == 1 for each in digests.values())
    assert sum(len(each) == 2 for each in digests.values()) > 30
