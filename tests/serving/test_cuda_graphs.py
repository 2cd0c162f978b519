"""The slots of CUDA graphs without a device: an eager call into fixed memory stands in for a graph's replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.serve.model.formats import cuda_graphs
from shoal.serve.model.formats.cuda_graphs import GraphedModule


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def predict(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self(x)}


def state(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((2,), value)}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were captured."""
    sizes: list[int] = []

    def eager(compute: Callable[[], Tensor | dict[str, Tensor]]) -> tuple[Callable[[], None], object]:
        outputs = compute()
        tensor = outputs if isinstance(outputs, Tensor) else outputs["y"]

        def replay() -> None:
            again = compute()
            tensor.copy_(again if isinstance(again, Tensor) else again["y"])

        sizes.append(len(tensor))
        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "capture_graph", eager)
    return sizes


def test_a_batch_takes_the_graph_of_the_next_power_of_two_and_gets_its_own_rows(captures: list[int]) -> None:
    version = GraphedModule(Times(), lambda module: module).bind(state(3))
    answers = [version(torch.full((rows, 2), float(rows))) for rows in (1, 3, 4, 2, 3)]
    assert [answer.tolist() for answer in answers] == [[[3.0 * rows] * 2] * rows for rows in (1, 3, 4, 2, 3)]
    assert captures == [1, 4, 2]


def test_a_slot_is_written_again_only_when_nothing_refers_to_its_version(captures: list[int]) -> None:
    graphed = GraphedModule(Times(), lambda module: module.predict)
    ones = torch.ones(1, 2)
    first = graphed.bind(state(1))
    assert first(x=ones)["y"].tolist() == [[1.0, 1.0]]
    second = graphed.bind(state(2))
    assert [each(x=ones)["y"].tolist() for each in (second, first)] == [[[2.0, 2.0]], [[1.0, 1.0]]]
    del first
    third = graphed.bind(state(3))
    assert [each(x=ones)["y"].tolist() for each in (second, third)] == [[[2.0, 2.0]], [[3.0, 3.0]]]
    assert captures == [1, 1]  # the third version replays the first one's graph
