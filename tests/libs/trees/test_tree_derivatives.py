"""Second derivatives, transforms of torch.func and torch.utils.checkpoint over trees: right whatever the shapes are.

The oracle is the recursion by the equations (tests/libs/trees/tree_recursion.py), which torch differentiates.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from tree_recursion import (
    SUBJECTS,
    D,
    H,
    Subject,
    SumCell,
    assert_close,
    chain,
    children_of,
    differentiate,
    float64_on_one_thread,
    level_by_level,
    recurse,
)

from shoal.libs.trees import Cell, Children, ChildSumLSTMCell, TreeBatch, TreeError, TreeRNN

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward mode

every_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
SHAPES = {
    "trees": [[-1, 0, 0, 1, 1], [2, 2, -1], [-1]],
    "chains": [chain(5), chain(3)],
    "leaves": [[-1]] * 3,
    "both": [chain(4), [-1, 0, 0, 1]],
}
TREES = SHAPES["trees"]


@pytest.fixture(autouse=True)
def _use_float64() -> Iterator[None]:
    with float64_on_one_thread():
        yield


def features(trees: TreeBatch, width: int = D) -> Tensor:
    return torch.randn(trees.num_nodes, width, requires_grad=True)


def penalize(outputs: Tensor, x: Tensor, power: int) -> Tensor:
    (slope,) = torch.autograd.grad(outputs.pow(power).sum(), x, create_graph=True)
    return slope.square().sum()


# -- second derivatives


@every_subject
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("power", [1, 2])
def test_a_gradient_penalty_is_that_of_the_recursion(subject: Subject, parents: list[list[int]], power: int) -> None:
    """A loss that is linear in the outputs (power 1) too, of which torch notices no second derivative by itself."""
    trees, cell = TreeBatch.from_parents(parents), subject.make(2)
    x = features(trees, subject.size)
    wanted = [x, *cell.parameters()]
    expected = penalize(recurse(cell, x, [*map(children_of, parents)]), x, power)
    found = penalize(TreeRNN(cell)(trees.arrange_inputs(x), trees), x, power)
    assert_close(found, expected, "penalty")
    if expected.requires_grad:  # leaves of some cells are linear in their features
        for mine, theirs in zip(
            *(differentiate(each, torch.ones(()), wanted) for each in (found, expected)), strict=True
        ):
            assert_close(mine, theirs, "gradient of the penalty")


@pytest.mark.parametrize("name", ["child-sum", "n-ary", "gated", "odd"])
def test_a_gradient_penalty_over_a_dag(name: str) -> None:
    edges = [(0, 2), (1, 2), (1, 3), (2, 4), (2, 4), (3, 5), (4, 5), (0, 5)]
    graph: list[list[int]] = [[kid for kid, node in edges if node == each] for each in range(6)]
    trees, cell = TreeBatch.from_edges([6], [edges]), SUBJECTS[name].make(3)
    x = features(trees)
    found = penalize(TreeRNN(cell)(trees.arrange_inputs(x), trees), x, 1)
    expected = penalize(recurse(cell, x, [graph]), x, 1)
    wanted = [x, *cell.parameters()]
    for mine, theirs in zip(*(differentiate(each, torch.ones(()), wanted) for each in (found, expected)), strict=True):
        assert_close(mine, theirs, "gradient of the penalty")


@pytest.mark.parametrize("make", [lambda: ChildSumLSTMCell(D, 2), lambda: SumCell(D)], ids=["own", "levels"])
def test_gradients_of_gradients_are_those_of_finite_differences(make: Callable[[], Cell]) -> None:
    trees, cell = TreeBatch.from_parents([[-1, 0, 0]]), make()

    def compute(x: Tensor, *parameters: Tensor) -> Tensor:
        named = {f"cell.{name}": each for (name, _), each in zip(cell.named_parameters(), parameters, strict=True)}
        outputs: Tensor = torch.func.functional_call(TreeRNN(cell), named, (x, trees))
        return outputs

    inputs = (features(trees), *(each.detach().clone().requires_grad_() for each in cell.parameters()))
    assert torch.autograd.gradgradcheck(compute, inputs, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradcheck(compute, inputs, check_batched_grad=True, check_forward_ad=True, fast_mode=True)


def test_features_that_are_computed_from_the_weights() -> None:
    """Each input's own part of the gradient, not the whole."""
    trees, cell = TreeBatch.from_parents(TREES), ChildSumLSTMCell(D, H)
    x = cell.input.weight[: trees.num_nodes].tanh()
    found, expected = (
        torch.autograd.grad(outputs.sum(), cell.input.weight, create_graph=True)[0]
        for outputs in (TreeRNN(cell)(trees.arrange_inputs(x), trees), recurse(cell, x, [*map(children_of, TREES)]))
    )
    assert_close(found, expected, "gradient")


class Doubled(ChildSumLSTMCell):
    def forward(self, x: Tensor, children: Children) -> tuple[Tensor, Tensor]:
        h, c = super().forward(x, children)
        return 2 * h, c


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_a_forward_of_ones_own_is_called_whatever_the_shapes(parents: list[list[int]]) -> None:
    trees, cell = TreeBatch.from_parents(parents), Doubled(D, H)
    x = features(trees)
    with level_by_level(cell):
        expected = TreeRNN(cell)(x, trees)
    assert_close(TreeRNN(cell)(x, trees), expected, "values")


class Dropping(SumCell):
    def forward(self, x: Tensor, children: Children) -> Tensor:
        return nn.functional.dropout(super().forward(x, children), 0.5, self.training)


def test_a_cell_drops_the_same_again() -> None:
    trees, rnn = TreeBatch.from_parents(TREES), TreeRNN(Dropping(D))

    def compute(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        outputs: Tensor = rnn(x, trees)
        return outputs

    assert torch.autograd.gradgradcheck(compute, features(trees), fast_mode=True)


class Counting(SumCell):
    """Gives other outputs each time, and knows how often it was called."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(D)
        self.register_buffer("count", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x: Tensor, children: Children) -> Tensor:
        self.count += 1
        return super().forward(x, children) * self.scale


def test_what_cannot_be_computed_again_is_refused() -> None:
    trees, cell = TreeBatch.from_parents(TREES), Counting()
    x = features(trees)
    outputs = TreeRNN(cell)(x, trees)
    before = cell.count.clone()
    torch.autograd.grad(outputs.sum(), x, create_graph=True)
    assert cell.count == before, "buffers are changed once"
    cell.scale = 2.0
    with pytest.raises(
        TreeError, match=r"Counting is computed again .* its outputs are others\. change neither inputs"
    ):
        torch.autograd.grad(outputs.sum(), x, create_graph=True)


# -- torch.func


@every_subject
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_transforms_see_each_operation(subject: Subject, parents: list[list[int]]) -> None:
    trees, cell = TreeBatch.from_parents(parents), subject.make(2)
    rnn, graphs = TreeRNN(cell), [*map(children_of, parents)]
    xs = torch.randn(2, trees.num_nodes, subject.size)
    direction = torch.randn(trees.num_nodes, subject.size)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(rnn, parameters, (trees.arrange_inputs(x), trees))
        return outputs.sum()

    parameters = {name: each.detach() for name, each in rnn.named_parameters()}
    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(parameters, xs)
    _, slopes = torch.func.jvp(lambda x: loss(parameters, x), (xs[0],), (direction,))
    for index, x in enumerate(xs):
        x = x.requires_grad_()
        expected = differentiate(recurse(cell, x, graphs).sum(), torch.ones(()), [x, *cell.parameters()])
        mine = [found[1], *found[0].values()]
        for each, right in zip(mine, expected, strict=True):
            assert_close(each[index], right, "gradient")
        if index == 0:
            assert_close(slopes, (expected[0] * direction).sum(), "derivative in a direction")


@every_subject
def test_cells_are_stacked_by_vmap(subject: Subject) -> None:
    trees, rnns = TreeBatch.from_parents(TREES), [TreeRNN(subject.make(2)) for _ in range(2)]
    x = torch.randn(trees.num_nodes, subject.size)
    stacked = torch.func.stack_module_state([*rnns])[0]
    found = torch.vmap(lambda each: torch.func.functional_call(rnns[0], each, (x, trees)))(stacked)
    for mine, rnn in zip(found, rnns, strict=True):
        assert_close(mine, rnn(x, trees), "values")


@every_subject
def test_forward_mode_without_gradients(subject: Subject) -> None:
    trees, rnn = TreeBatch.from_parents(TREES), TreeRNN(subject.make(2))
    x, direction = (torch.randn(trees.num_nodes, subject.size) for _ in range(2))
    _, expected = torch.func.jvp(lambda x: rnn(x, trees), (x,), (direction,))
    with torch.no_grad(), forward_ad.dual_level():
        _, found = forward_ad.unpack_dual(rnn(forward_ad.make_dual(x, direction), trees))
    assert found is not None
    assert_close(found, expected, "derivative")


# -- torch.utils.checkpoint


class Called(SumCell):
    num_calls = 0

    def forward(self, x: Tensor, children: Children) -> Tensor:
        self.num_calls += 1
        return super().forward(x, children)


@every_subject
@pytest.mark.parametrize("parents", [TREES, SHAPES["chains"]], ids=["trees", "chains"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(subject: Subject, parents: list[list[int]], use_reentrant: bool) -> None:
    trees, rnn = TreeBatch.from_parents(parents), TreeRNN(subject.make(2))
    x = features(trees, subject.size)
    wanted = [x, *rnn.parameters()]
    expected = rnn(x, trees)
    expected.square().sum().backward()
    right = [each.grad for each in wanted]
    for each in wanted:
        each.grad = None
    checkpoint(rnn, x, trees, use_reentrant=use_reentrant).square().sum().backward()
    for each, theirs in zip(wanted, right, strict=True):
        assert (each.grad is None) == (theirs is None)
        if each.grad is not None and theirs is not None:
            assert_close(each.grad, theirs, "gradient")


def test_checkpoint_computes_each_level_once_again() -> None:
    trees, cell = TreeBatch.from_parents([chain(20), [-1, 0, 0]]), Called(D)
    x = features(trees)
    TreeRNN(cell)(x, trees)
    once, cell.num_calls = cell.num_calls, 0
    checkpoint(TreeRNN(cell), x, trees, use_reentrant=False).sum().backward()
    assert cell.num_calls == 2 * once


@pytest.mark.parametrize("make", [lambda: ChildSumLSTMCell(D, H), lambda: SumCell(D)], ids=["own", "levels"])
def test_what_backward_needs_passes_the_hooks_of_saved_tensors(make: Callable[[], Cell]) -> None:
    """Otherwise checkpoint retains it, and save_on_cpu leaves it on the device."""
    trees, rnn = TreeBatch.from_parents(TREES), TreeRNN(make())
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    x = features(trees)
    right = torch.autograd.grad(rnn(x, trees).sum(), x)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        outputs = rnn(x, trees)
    assert not {"tape", "saved"} & {*getattr(outputs.grad_fn, "__dict__", {})}
    assert packed
    assert_close(torch.autograd.grad(outputs.sum(), x)[0], right, "gradient")
