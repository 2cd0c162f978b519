"""A compiled cell computes what the cell computes, with the same graphs for every batch.

Compiled for torch's `aot_eager`, which traces graphs as the default does, and spares the minutes of the C++ compiler.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shoal.libs.trees import Cell, Children, NaryLSTMCell, TreeBatch, TreeRNN
from shoal.libs.trees import cell as cells

WIDE = [[-1, 0, 0, 1, 1], [-1, 0, 1, 1], [-1], [-1, 0, 0, 2, 2, 4]]
OTHER = [[-1, 0, 0, 1, 1, 2, 2], [-1, 0, 1, 2, 2], [-1, 0], [-1, 0, 0, 2, 2, 4, 4]]


class Gated(Cell):
    """Any number of children."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(3, 3)

    def forward(self, x: Tensor, children: Children) -> Tensor:
        if not children:
            return torch.tanh(x)
        total = children.sum(children.states[0])
        return torch.sigmoid(x) * torch.tanh(self.below(total)) + children.sum(torch.sigmoid(children.expand(x)))


class Levels(NaryLSTMCell):
    """Without its own function."""

    def run_batch(self, x: Tensor, plan: object) -> None:
        return None


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    cells._compile_level.cache_clear()
    torch.compiler.reset()
    yield
    cells._compile_level.cache_clear()
    torch.compiler.reset()


def outputs_and_gradients(rnn: TreeRNN, parents: list[list[int]]) -> list[Tensor]:
    torch.manual_seed(1)
    trees = TreeBatch.from_parents(parents)
    x = torch.randn(trees.num_nodes, 3, dtype=torch.float64, requires_grad=True)
    outputs = rnn(x, trees)
    return [outputs, *torch.autograd.grad((outputs * torch.randn_like(outputs)).sum(), [x, *rnn.parameters()])]


@pytest.mark.parametrize("make", [Gated, pytest.param(partial(Levels, 3, 4), marks=pytest.mark.soak)])
def test_values_and_gradients_are_those_of_the_cell(make: type[Cell]) -> None:
    cell = make().double()
    for parents in (WIDE, OTHER):
        for found, expected in zip(
            outputs_and_gradients(TreeRNN(cell, compile=True), parents),
            outputs_and_gradients(TreeRNN(cell), parents),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_new_shapes_need_no_new_graphs() -> None:
    cell = Gated().double()
    outputs_and_gradients(TreeRNN(cell, compile=True), WIDE)
    before = counters["stats"]["unique_graphs"]
    assert before
    for parents in (OTHER, [*WIDE, *OTHER], [[-1, *range(20)], *WIDE]):
        outputs_and_gradients(TreeRNN(cell, compile=True), parents)
    assert counters["stats"]["unique_graphs"] == before
