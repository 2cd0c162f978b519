"""Hogwild: lanes train one copy of the weights."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import testing
from shoal.errors import ConfigError, RankLost, TrainError
from shoal.libs.asynchronous import hogwild
from shoal.parallel import World
from shoal.train.loop.components import TrainReplica
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from train_task import Toy


class RaisingLane(Toy):
    """A lane besides lane 0 raises an error of the Task's own."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and threading.current_thread() is not threading.main_thread():
            raise LookupError("no such class")
        return super().loss(outputs, batch)


TOY = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"


def train(folder: Path, steps: int, **changes: Any) -> TrainResult:
    fixed = {"task": TOY, "args": {"dropout": 0.0}, "batch_size": 32, "sync": {"hogwild": 2}, "threads": 1}
    spec = TrainSpec.parse({**fixed, "stop": {"steps": steps}, "log_every_steps": 1, **changes})
    return testing.train(make_task(spec.task, spec.args), home=folder, spec=spec).result


def test_lanes_learn_and_their_steps_count(tmp_path: Path) -> None:
    outcome = train(tmp_path, 150)
    assert outcome.steps >= 150
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    resumed = train(tmp_path, 170)  # from the checkpoint of the first
    assert resumed.steps >= 170


def test_no_lane_writes_weights_while_a_checkpoint_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has taken steps of its own by then, and takes further ones."""
    counts: list[list[int]] = []

    class Counting(hogwild.HogwildSync):
        def collect_state(self) -> None:
            super().collect_state()
            before = [each.clone() for each in self._parts.state()["model"].values()]
            num_steps = [lane.num_steps for lane in self._lanes]
            threading.Event().wait(0.05)
            assert num_steps == [lane.num_steps for lane in self._lanes]
            assert all(map(torch.equal, before, self._parts.state()["model"].values()))
            counts.append(num_steps)

    monkeypatch.setattr(hogwild, "HogwildSync", Counting)
    train(tmp_path, 60, checkpoint={"every_steps": 20})
    assert len(counts) >= 3
    assert 0 < counts[0][0] < counts[-1][0]


def test_lanes_on_a_gpu_are_refused_by_name() -> None:
    spec = TrainSpec.parse({"sync": {"hogwild": 2}, "stop": {"steps": 1}})
    replica = TrainReplica.__new__(TrainReplica)
    for name, value in {"config": spec.applied_sync, "world": World(0, 1, torch.device("cuda", 0))}.items():
        object.__setattr__(replica, name, value)
    with pytest.raises(ConfigError, match=r"sync.hogwild = 2: .*this run is on cuda. use device=cpu"):
        hogwild.HogwildSync(replica)


def test_an_error_in_a_lane_ends_the_run_with_its_cause_and_its_place(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"^lane 1 of Hogwild: LookupError: no such class\n") as raised:
        train(tmp_path, 100_000, task=f"{__file__}:RaisingLane")
    assert f'File "{__file__}"' in str(raised.value)


def test_a_lane_that_does_not_end_its_step_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hogwild, "PAUSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(hogwild, "END_TIMEOUT_S", 0.05)
    release = threading.Event()
    monkeypatch.setattr(hogwild.Lane, "_step", lambda lane, batch: release.wait(60))
    try:
        with pytest.raises(RankLost, match=r"lane 1 of Hogwild has not answered for 0\.05 s"):
            train(tmp_path, 20, stop={"steps": 20})
    finally:
        release.set()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workers": 2}, "hogwild"),
        ({"batch_size": 33}, "hogwild"),
        ({"sync": {"kind": "parameter_server", "hogwild": 2}}, "hogwild"),
        ({"parallel": {"tensor": 2}}, "parallel"),
        ({"average": 0.9}, "average"),
    ],
)
def test_what_lanes_cannot_do_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TrainSpec.parse({"task": TOY, "batch_size": 32, "sync": {"hogwild": 2}, "stop": {"steps": 1}, **changes})
