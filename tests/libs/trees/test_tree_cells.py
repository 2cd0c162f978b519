"""Cells over trees and DAGs give the values and gradients of a recursion by the equations (`tree_recursion`).

Great depth and width too: chains of 1,100 nodes, which Python does not recurse over, nodes with 500 children, levels
of 2,100 nodes. Padded chains are computed as torch's LSTM computes each alone, and with little padding.
"""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from torch import Tensor, nn
from tree_recursion import (
    SUBJECTS,
    D,
    H,
    OddCell,
    Subject,
    SumCell,
    assert_close,
    assert_equals_recursion,
    chain,
    children_of,
    differentiate,
    float64_on_one_thread,
    grow,
    star,
)

from shoal.libs.trees import (
    Cell,
    Children,
    ChildSumLSTMCell,
    NaryLSTMCell,
    RecursiveCell,
    RecursiveTensorCell,
    TreeBatch,
    TreeRNN,
)
from shoal.libs.trees.blas import use_torch_threads

every_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


@pytest.fixture(autouse=True)
def _use_float64() -> Iterator[None]:
    with float64_on_one_thread():
        yield


@every_subject
@given(
    forest=st.lists(st.lists(st.integers(0, 30), max_size=14), min_size=1, max_size=6), arity=st.sampled_from([1, 2, 3])
)
@settings(max_examples=7)
def test_random_trees(subject: Subject, forest: list[list[int]], arity: int) -> None:
    arity = min(arity, subject.max_arity or 9)
    parents = [grow(choices, arity) for choices in forest]
    trees = TreeBatch.from_parents(parents)
    assert_equals_recursion(
        subject.make(max(arity, 2)), trees, list(map(children_of, parents)), subject.size, subject.ways
    )


EXTREMES = {
    "singles": [[-1]] * 5,
    "depth one": [star(2), star(1), star(2)],
    "equal chains": [chain(20)] * 3,
    "chains": [chain(7), chain(1), chain(30), chain(3)],
    "mixture": [chain(30), [-1], star(2), *[grow(range(3, 15), 2) for _ in range(2)]],
    "40 trees": [grow(range(index % 4), 2) for index in range(40)],
}


@pytest.mark.parametrize("parents", EXTREMES.values(), ids=EXTREMES)
@every_subject
def test_extremes(subject: Subject, parents: list[list[int]]) -> None:
    assert_equals_recursion(
        subject.make(2), TreeBatch.from_parents(parents), list(map(children_of, parents)), subject.size, subject.ways
    )


# -- DAGs


@pytest.mark.parametrize("name", ["child-sum", "n-ary", "recursive", "sum", "gated", "odd"])
@given(st.lists(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), max_size=9), min_size=1, max_size=4))
@settings(max_examples=7)
def test_dags_with_shared_children(name: str, drawn: list[list[list[int]]]) -> None:
    """Each node after the first takes children among the earlier ones, also twice; a last one is above the others."""
    graphs = []
    for choices in drawn:
        kids: list[list[int]] = [[]]
        for chosen in choices:
            kids.append([choice % len(kids) for choice in chosen])
        while len(tops := sorted(set(range(len(kids))) - {kid for each in kids for kid in each})) > 1:
            kids.append(tops[:3])
        graphs.append(kids)
    edges = [[(kid, node) for node, each in enumerate(kids) for kid in each] for kids in graphs]
    trees = TreeBatch.from_edges([len(kids) for kids in graphs], edges)
    subject = SUBJECTS[name]
    assert_equals_recursion(subject.make(3), trees, graphs, subject.size, ["own"])


def test_a_dag_with_2_to_the_100_ways_is_computed_once_a_node() -> None:
    graph: list[list[int]] = [[], *[[node, node] for node in range(100)]]
    trees = TreeBatch.from_edges([101], [[(kid, node) for node, kids in enumerate(graph) for kid in kids]])
    assert_equals_recursion(NaryLSTMCell(D, H), trees, [graph], D, ["own"])
    assert_equals_recursion(RecursiveCell(D), trees, [graph], D, ["own"])


# -- autograd

SMALL = [[-1, 0, 0, 1, 1], [2, 2, -1], [-1]]
CHAINS = [chain(5), chain(3)]


def features(trees: TreeBatch, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(trees.num_nodes, D, dtype=dtype, requires_grad=True)


@every_subject
@pytest.mark.parametrize("parents", [SMALL, CHAINS], ids=["trees", "chains"])
def test_gradients_twice_and_without(subject: Subject, parents: list[list[int]]) -> None:
    trees, cell = TreeBatch.from_parents(parents), subject.make(2)
    x, rnn = features(trees), TreeRNN(cell)
    wanted = [x, *cell.parameters()]
    outputs = rnn(x, trees)
    weights = torch.randn_like(outputs)
    first, second = differentiate(outputs, weights, wanted), differentiate(outputs, weights, wanted)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(rnn(x, trees), outputs, mode.__name__)
    without = differentiate(rnn(x.detach(), trees), weights, list(cell.parameters()))
    for name, mine, theirs in zip(dict(cell.named_parameters()), without, first[1:], strict=True):
        assert_close(mine, theirs, name)
    outputs.backward(weights)
    assert x.grad is not None
    assert_close(x.grad, first[0], "backward()")
    with pytest.raises(RuntimeError, match="second time"):
        outputs.backward(weights)


@every_subject
def test_frozen_parameters(subject: Subject) -> None:
    trees, cell = TreeBatch.from_parents(SMALL), subject.make(2)
    x, rnn = features(trees), TreeRNN(cell)
    weights = torch.randn_like(rnn(x, trees))
    expected = differentiate(rnn(x, trees), weights, [x, *cell.parameters()])
    frozen = next(cell.parameters())
    frozen.requires_grad_(False)
    rnn(x, trees).backward(weights)
    assert frozen.grad is None
    for found, right in zip([x, *cell.parameters()][2:], expected[2:], strict=True):
        assert_close(torch.zeros_like(right) if found.grad is None else found.grad, right, "gradient")
    assert x.grad is not None
    assert_close(x.grad, expected[0], "gradient of x")
    cell.requires_grad_(False)
    assert not rnn(x.detach(), trees).requires_grad
    assert_close(differentiate(rnn(x, trees), weights, [x])[0], expected[0], "gradient of x alone")


@every_subject
@pytest.mark.parametrize("changed", ["outputs", "roots", "x", "weights"])
def test_what_backward_needs_cannot_be_changed_unnoticed(subject: Subject, changed: str) -> None:
    trees, cell = TreeBatch.from_parents(SMALL), subject.make(2)
    x = features(trees).detach().requires_grad_(changed != "x")
    outputs = TreeRNN(cell)(x, trees)
    with torch.set_grad_enabled(changed in ("outputs", "roots")):
        if changed == "outputs":
            outputs.mul_(2)
        elif changed == "roots":
            trees.roots(outputs).mul_(2)
        else:
            for each in [x] if changed == "x" else cell.parameters():
                each.mul_(2)
    if changed == "x" and type(cell) in (SumCell, RecursiveCell, RecursiveTensorCell):
        outputs.sum().backward()  # they do not need x for their gradients
        return
    with pytest.raises(RuntimeError, match="inplace operation"):
        outputs.sum().backward()


def test_the_output_of_chains_may_be_changed() -> None:
    trees, cell = TreeBatch.from_parents(CHAINS), ChildSumLSTMCell(D, H)
    x = features(trees)
    expected = torch.autograd.grad(2 * TreeRNN(cell)(x, trees).sum(), x)
    assert_close(torch.autograd.grad(TreeRNN(cell)(x, trees).mul_(2).sum(), x)[0], expected[0], "gradient")


def test_weights_may_be_freed_between_forward_and_backward() -> None:
    """As FSDP does: it frees the memory of gathered weights, and allocates it again, elsewhere."""
    trees, cell = TreeBatch.from_parents(SMALL), ChildSumLSTMCell(D, H)
    x = features(trees)
    expected = differentiate(TreeRNN(cell)(x, trees), torch.ones(trees.num_nodes, H), [x])
    outputs = TreeRNN(cell)(x, trees)
    for weight in cell.parameters():
        values, storage = weight.detach().clone(), weight.untyped_storage()
        size, elsewhere = storage.size(), torch.empty_like(weight)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            storage.resize_(0)
            elsewhere.fill_(torch.nan)
            storage.resize_(size)
            weight.copy_(values)
    assert_close(differentiate(outputs, torch.ones_like(outputs), [x])[0], expected[0], "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_kept_holds_nothing_after_backward(dtype: torch.dtype) -> None:
    rnn = TreeRNN(ChildSumLSTMCell(3, 4)).to(dtype)
    h = rnn(torch.randn(3, 3, dtype=dtype), TreeBatch.from_parents([[-1, 0, 0]]))
    loss = h.sum()
    loss.backward(retain_graph=True)
    assert dtype == torch.float32 or h.grad_fn.tape
    loss.backward()
    assert dtype == torch.float32 or not (h.grad_fn.tape or h.grad_fn.inputs)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = h.grad_fn.saved_tensors
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# -- data types and devices


@every_subject
@pytest.mark.parametrize("parents", [SMALL, CHAINS, [chain(4)] * 3], ids=["trees", "chains", "equal chains"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_single_and_half_precision(subject: Subject, parents: list[list[int]], dtype: torch.dtype) -> None:
    """float32 as it is; the others by autocast, level by level.

    Tolerances: some units of the last place of the type, of the largest entry.
    """
    trees, cell = TreeBatch.from_parents(parents), subject.make(2).float()
    x = features(trees, torch.float32)
    exact = copy.deepcopy(cell).double()
    expected = TreeRNN(exact)(x.double(), trees)
    tolerance = 20 * torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        outputs = TreeRNN(cell)(x, trees)
        if dtype != torch.float32:
            assert cell.run_batch(x, trees.plan) is None
    assert dtype != torch.float32 or outputs.dtype == torch.float32
    assert_close(outputs.double(), expected, "values", tolerance)
    expected.sum().backward()
    outputs.sum().backward()
    for found, right in zip(cell.parameters(), exact.parameters(), strict=True):
        assert (found.grad is None) == (right.grad is None)
        if found.grad is not None and right.grad is not None:
            assert found.grad.dtype == torch.float32
            assert_close(found.grad.double(), right.grad, "gradient", tolerance)


@pytest.mark.parametrize("parents", [SMALL, CHAINS], ids=["trees", "chains"])
def test_features_of_another_type_or_width_are_refused(parents: list[list[int]]) -> None:
    trees, cell = TreeBatch.from_parents(parents), ChildSumLSTMCell(D, H)
    for x in (torch.randn(trees.num_nodes, D, dtype=torch.float32), torch.randn(trees.num_nodes, D + 1)):
        with pytest.raises((RuntimeError, ValueError)):
            TreeRNN(cell)(x, trees)


@every_subject
def test_shapes_can_be_inferred(subject: Subject) -> None:
    trees = TreeBatch.from_parents(SMALL)
    cell = subject.make(2)
    shape = TreeRNN(cell)(torch.randn(trees.num_nodes, D), trees).shape
    if not isinstance(cell, OddCell):  # it makes a tensor on the default device
        with torch.device("meta"):
            outputs = TreeRNN(subject.make(2))(torch.randn(trees.num_nodes, D), trees)
        assert (outputs.shape, outputs.device.type) == (shape, "meta")


def test_features_in_any_layout() -> None:
    for parents in (SMALL, CHAINS, [chain(4)] * 2, EXTREMES["mixture"]):
        trees, cell = TreeBatch.from_parents(parents), ChildSumLSTMCell(D, H)
        x = torch.randn(D, trees.num_nodes).T
        assert_close(TreeRNN(cell)(x, trees), TreeRNN(cell)(x.contiguous(), trees), "transposed")
        x = torch.randn(1, D).expand(trees.num_nodes, D)
        outputs = TreeRNN(cell)(x, trees)
        assert_close(outputs, TreeRNN(cell)(x.contiguous(), trees), "expanded")
        outputs.sum().backward()  # its gradient is expanded too


def test_tokens_may_be_the_features() -> None:
    """A cell that looks up its features itself."""

    class Lookup(SumCell):
        def __init__(self) -> None:
            super().__init__(H)
            self.embedding = nn.Embedding(9, H)

        def forward(self, x: Tensor, children: Children) -> Tensor:
            return super().forward(self.embedding(x), children)

    trees, cell = TreeBatch.from_parents(SMALL), Lookup()
    tokens = torch.arange(trees.num_nodes) % 9
    plain = SumCell(H)
    plain.load_state_dict(cell.state_dict(), strict=False)
    outputs, expected = TreeRNN(cell)(tokens, trees), TreeRNN(plain)(cell.embedding(tokens), trees)
    weights = torch.randn_like(outputs)
    assert_close(outputs, expected, "values")
    (mine,), (theirs,) = (differentiate(each, weights, [cell.embedding.weight]) for each in (outputs, expected))
    assert_close(mine, theirs, "gradient of the embedding")


def test_a_state_needs_a_row_for_each_node() -> None:
    class Forgetful(Cell):
        def forward(self, x: Tensor, children: Children) -> Tensor:
            return x[:1]

    for trees in (TreeBatch.from_parents(SMALL), TreeBatch.from_edges([3], [[(0, 2), (1, 2)]])):
        with pytest.raises(ValueError, match=r"state 0 of Forgetful.forward has the shape \[1, 3\]"):
            TreeRNN(Forgetful())(torch.randn(trees.num_nodes, D), trees)


# -- as a module


@every_subject
def test_distributed_data_parallel(subject: Subject, group_of_one: object) -> None:
    """Also with a parameter that no tree used: its gradient is 0 there, and the reduction does not wait for it."""
    trees = TreeBatch.from_parents(SMALL)
    rnn = TreeRNN(subject.make(2))
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(rnn))
    x = features(trees)
    for _ in range(2):  # a second step fails where the first one did not reduce every gradient
        rnn.zero_grad()
        parallel.zero_grad()
        rnn(x, trees).sum().backward()
        parallel(x, trees).sum().backward()
        for mine, theirs in zip(parallel.parameters(), rnn.parameters(), strict=True):
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert mine.grad is not None
            assert_close(mine.grad, expected, "gradient")


# -- threads of NumPy's library


def numpy_threads() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if "numpy" in each["filepath"]]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_numpy_takes_as_many_threads_as_torch(num_threads: int) -> None:
    before = numpy_threads()
    assert before, "NumPy brings its library"
    torch.set_num_threads(num_threads)
    with use_torch_threads() as product:
        assert set(numpy_threads()) == {num_threads}
        a, b = np.random.default_rng(0).random((2, 5, 5))
        assert np.allclose(product(a, b.T), a @ b.T, rtol=1e-14)
    assert numpy_threads() == before
    with pytest.raises(KeyError), use_torch_threads():
        raise KeyError
    assert numpy_threads() == before


def test_threads_that_overlap_restore_the_setting_from_before_both() -> None:
    before = numpy_threads()
    torch.set_num_threads(1 if before[0] > 1 else 2)
    first, second = use_torch_threads(), use_torch_threads()
    for each in (first, second):
        each.__enter__()
    first.__exit__(None, None, None)
    assert set(numpy_threads()) == {torch.get_num_threads()}, "the second is still within"
    second.__exit__(None, None, None)
    assert numpy_threads() == before


@pytest.mark.parametrize("subject", [SUBJECTS[name] for name in ("child-sum", "n-ary")])
def test_a_chain_of_1100_nodes(subject: Subject) -> None:
    parents = [chain(1100)]
    assert_equals_recursion(
        subject.make(2), TreeBatch.from_parents(parents), list(map(children_of, parents)), subject.size, subject.ways
    )


@pytest.mark.parametrize("name", ["child-sum", "n-ary", "recursive", "sum", "gated"])
def test_a_node_with_500_children(name: str) -> None:
    subject = SUBJECTS[name]
    parents = [star(500), [2, 2, -1]]
    assert_equals_recursion(
        subject.make(500), TreeBatch.from_parents(parents), list(map(children_of, parents)), subject.size, subject.ways
    )


def test_a_level_of_more_nodes_than_one_call_takes() -> None:
    """Chains of two on one root: 2,100 leaves and 2,100 nodes above them, whose gradients are added up in pieces."""
    parents = [[-1] + [0] * 2100 + list(range(1, 2101))]
    cell = SumCell(1)
    with torch.no_grad():
        cell.below.weight.mul_(0.01)
    assert_equals_recursion(cell, TreeBatch.from_parents(parents), list(map(children_of, parents)), 1, ["levels"])


def test_chains_of_similar_length_are_one_group() -> None:
    plan = TreeBatch.from_parents([list(range(-1, size - 1)) for size in range(1000, 2000, 31)]).plan
    assert len(plan.chain_buckets.groups) == 1
