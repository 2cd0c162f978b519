"""A Task that learns in a second, notes which samples it sees, and fails by name at a named step.

    make_task("tests/train_task.py:Toy", {"fault": "kill", "fault_step": 5, "fault_rank": 1, "notes": folder})

A fault happens once: it leaves a mark in `notes`, so that a resumed run goes past it.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal.data import Data
from shoal.train import Task

FEATURES, CLASSES = 8, 3


class Points(Dataset[Any]):
    """`count` points in three classes, made from their index alone: (features, index, class)."""

    deterministic = True

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 2
        self._classes = torch.randint(CLASSES, (count,), generator=generator)
        self._features = centres[self._classes] + torch.randn(count, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor]:
        return self._features[index], index, self._classes[index]


class Toy(Task):
    """A small perceptron with dropout on `Points`.

    notes:      a folder; each rank writes the samples of each step there, a line of JSON a step
    fault:      kill (this process), nan (the loss), gradient (is NaN, of a loss that is not), skip (all layers), raise,
                wait (until a file `go` is in `notes`), or none
    fault_step: or the first one after it; counted in calls of `loss` in training, over all lives and, where the workers
                are replicas, over all of them
    step_s:     that each step takes at least
    """

    parts: ClassVar = {"hidden": {"hidden": 0}, "dropout": {"dropout": 0.0}}

    def __init__(
        self,
        count: int = 256,
        hidden: int = 16,
        dropout: float = 0.1,
        notes: str = "",
        fault: str = "",
        fault_step: int = 0,
        fault_rank: int = 0,
        step_s: float = 0.0,
    ) -> None:
        self.count = count
        self.hidden = hidden
        self.dropout = dropout
        self.step_s = step_s
        self.notes = Path(notes) if notes else None
        self.fault = fault
        self.fault_step = fault_step
        self.fault_rank = fault_rank

    def model(self) -> nn.Module:
        if not self.hidden:
            return nn.Sequential(nn.Linear(FEATURES, CLASSES))
        width = self.hidden
        return nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.Tanh(),
            nn.Dropout(self.dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, CLASSES),
        )

    def data(self) -> Data:
        return Data(train=Points(self.count, 1), validation=Points(50, 2))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, batch[2])
        # The check of split losses differentiates by copies of the outputs, beside the network.
        is_training = outputs.grad_fn is not None and outputs.grad_fn.name() != "CloneBackward0"
        return self._noted(loss, outputs, batch) if is_training else loss

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch[2]).float().mean()}

    def _noted(self, loss: Tensor, outputs: Tensor, batch: Any) -> Tensor:
        indices = batch[1]
        if self.step_s:
            time.sleep(self.step_s)
        if self.notes is None or is_example(indices):
            return loss
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = self.notes / f"samples-{rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(indices.tolist()) + "\n")
        step = len(path.read_text().splitlines()) - 1
        return self._failed(loss, outputs, batch[2]) if rank == self.fault_rank and step >= self.fault_step else loss

    def _failed(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        assert self.notes is not None
        mark = self.notes / "failed"
        if mark.exists() or not self.fault:
            return loss
        mark.touch()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise":
            raise ValueError("a fault of the user's own")
        if self.fault == "wait":
            while not (self.notes / "go").exists():
                time.sleep(0.02)
        if self.fault == "skip":
            return nn.functional.cross_entropy(torch.zeros_like(outputs, requires_grad=True), labels)
        if self.fault == "gradient":
            return nn.functional.cross_entropy(outputs + (0.0 * outputs).sqrt(), labels)
        return loss * float("nan") if self.fault == "nan" else loss


class Held(Toy):
    """One whose second process at step `HELD_AT`, and every later one, waits there for a file `go` in `folder`."""

    HELD_AT: ClassVar = 30
    NUM_FREE: ClassVar = 1

    def __init__(self, folder: str, hidden: int = 16) -> None:
        super().__init__(hidden=hidden)
        self.folder = Path(folder)
        self._num_steps = 0

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and not is_example(batch[1]):
            self._num_steps += 1
            if self._num_steps == self.HELD_AT and not self._is_free():
                while not (self.folder / "go").exists():
                    time.sleep(0.02)
        return super().loss(outputs, batch)

    def _is_free(self) -> bool:
        for number in range(self.NUM_FREE):
            with suppress(FileExistsError):
                (self.folder / f"arrived-{number}").touch(exist_ok=False)
                return True
        return False


def is_example(indices: Tensor) -> bool:
    """Whether it is the batch that a plan, or the prediction of a cost, tries a model with."""
    return indices.tolist() == list(range(len(indices)))


def seen(notes: Path) -> list[int]:
    """Every sample that any rank was given, in the order of steps within each rank."""
    lines = [line for path in sorted(notes.glob("samples-*.jsonl")) for line in path.read_text().splitlines()]
    return [index for line in lines for index in json.loads(line)]
