"""Python code as trees, in requests and in one forward: as node by node, and rows that are no tree are refused."""

from __future__ import annotations

import ast
import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from gated_forward import answer, requests_of, run, until
from registered import arrays_of
from shoal.batching.batcher import Batch, Batcher
from shoal.errors import InferenceError, TreeError
from shoal.libs.trees import planner
from shoal.libs.trees.plan import TreePlan
from shoal.libs.trees.syntax_tree import (
    KIND_OF_TOKEN,
    KINDS,
    MASKED,
    TOKENS,
    TreeLSTM,
    check_trees,
    number_nodes,
    read_padded,
)
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

SIZES = {"num_tokens": 7, "num_classes": 3, "width": 5, "hidden": 4}
Tree = list[tuple[int, int]]  # token and parent of each node


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any shape, with the nodes in any order."""
    size = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    places = draw(st.permutations(range(size)))
    shuffled: Tree = [(0, 0)] * size
    for node, parent in enumerate(parents):
        shuffled[places[node]] = (draw(st.integers(0, 8)), -1 if parent < 0 else places[parent])
    return shuffled


def as_request(*several: Tree) -> dict[str, np.ndarray]:
    """`tokens` and `parents` of a request, each int64 [B, T]."""
    columns = zip(*(torch.tensor(tree).T for tree in several), strict=True)
    padded = (pad_sequence(list(each), batch_first=True, padding_value=-1).numpy() for each in columns)
    return dict(zip(("tokens", "parents"), padded, strict=True))


def node_by_node(module: TreeLSTM, tree: Tree) -> torch.Tensor:
    """Logits of each node by the equations of the paper, one node at a time: [nodes, classes]."""
    cell, states = module.rnn.cell, dict[int, tuple[torch.Tensor, torch.Tensor]]()
    # gates f i o u
    W = cell.input.weight
    b = cell.input.bias
    U = cell.below.weight

    def state(node: int) -> tuple[torch.Tensor, torch.Tensor]:
        children = [state(child) for child, (_, parent) in enumerate(tree) if parent == node]
        x = module.token(torch.tensor(min(tree[node][0], 7)))
        sum_h = sum((h for h, _ in children), torch.zeros(4))
        f_x, i, o, u = (W @ x + b + torch.cat([torch.zeros(4), U[4:] @ sum_h])).chunk(4)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h_k, c_k in children:
            c = c + torch.sigmoid(f_x + U[:4] @ h_k) * c_k
        states[node] = torch.sigmoid(o) * torch.tanh(c), c
        return states[node]

    state(next(node for node, (_, parent) in enumerate(tree) if parent == -1))
    return module.head(torch.stack([states[node][0] for node in range(len(tree))]))


def root_of(tree: Tree) -> int:
    return [parent for _, parent in tree].index(-1)


def fresh(per_node: bool) -> TreeLSTM:
    torch.manual_seed(0)
    return TreeLSTM(**SIZES, per_node=per_node).eval()


@pytest.mark.parametrize("per_node", [False, True])
@given(several=st.lists(trees(), min_size=1, max_size=5))
@settings(max_examples=15)
def test_all_trees_at_once_answer_as_node_by_node(per_node: bool, several: list[Tree]) -> None:
    module, request = fresh(per_node), as_request(*several)
    together = module(*map(torch.from_numpy, request.values()))
    for row, (found, tree) in enumerate(zip(together, several, strict=True)):
        expected = node_by_node(module, tree)
        if per_node:
            assert not found[len(tree) :].any(), row  # padding
            found = found[: len(tree)]
        torch.testing.assert_close(found, expected if per_node else expected[root_of(tree)], rtol=1e-4, atol=1e-6)


def test_a_batch_of_trees_and_the_same_trees_padded_have_the_same_logits() -> None:
    module, request = fresh(per_node=True), as_request(CHAIN, FLAT)
    batch = read_padded(*request.values())
    found = batch.in_node_order(module(batch)).split([len(CHAIN), len(FLAT)])
    padded = pad_sequence(found, batch_first=True)
    torch.testing.assert_close(padded, module(*map(torch.from_numpy, request.values())), rtol=0, atol=0)


def test_nodes_need_not_be_the_first_of_their_row() -> None:
    module = fresh(per_node=True)
    tokens, parents = torch.tensor([[-1, 3, -1, 2]]), torch.tensor([[-1, 3, -1, -1]])
    found = module(tokens, parents)
    torch.testing.assert_close(found[0, [3, 1]], node_by_node(module, [(2, -1), (3, 0)]), rtol=1e-4, atol=1e-6)
    assert not found[0, [0, 2]].any()


def test_the_check_makes_the_plan_that_the_network_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    request = as_request([(node, node - 1) for node in range(23)], FLAT)  # a shape of no other test
    made: list[TreePlan] = []
    computed = planner._plan_forest
    monkeypatch.setattr(planner, "_plan_forest", lambda *args: made.append(computed(*args)) or made[-1])
    check_trees(request)
    assert read_padded(*request.values()).plan is made[0]
    assert len(made) == 1


def signature_of(shape: list[int]) -> Signature:
    inputs = [TensorSignature(name=name, datatype="INT64", shape=[-1, -1]) for name in ("tokens", "parents")]
    return Signature(inputs=inputs, outputs=[TensorSignature(name="logits", datatype="FP32", shape=shape)])


def served(per_node: bool = True, **options: Any) -> LoadedModel:
    signature = signature_of([-1, -1, 3] if per_node else [-1, 3])
    hook = "shoal.libs.trees.syntax_tree:check_trees"
    chosen = ModelOptions.parse({"ragged": "pad", "pad_value": -1, "preprocess": hook, **options})
    factory = ModelFactory(factory="shoal.libs.trees.syntax_tree:TreeLSTM", kwargs={**SIZES, "per_node": per_node})
    weights = arrays_of(fresh(per_node))
    return Predictor(factory, signature, chosen).load(WeightSnapshot.of(1, weights))


CHAIN: Tree = [(1, -1), (2, 0), (3, 1), (4, 2)]
FLAT: Tree = [(1, 2), (9, 2), (5, -1)]
SINGLE: Tree = [(6, -1)]


@pytest.mark.parametrize("ragged", ["pad", "bucket"])
def test_requests_with_trees_of_any_size_share_a_forward(ragged: str) -> None:
    model, module = served(ragged=ragged), fresh(per_node=True)
    forwards: list[int] = []
    computed = model._forward
    model._forward = lambda inputs: forwards.append(len(inputs["tokens"])) or computed(inputs)
    several = [(FLAT,), (CHAIN, FLAT), (SINGLE, SINGLE)]
    requests = [as_request(*each) for each in several]
    answers = (
        model.predict_batch(requests)
        if ragged == "pad"
        else [model.predict_batch([request])[0] for request in requests]  # the batcher groups equal shapes
    )
    assert forwards == ([5] if ragged == "pad" else [1, 2, 2])
    for request, chosen, found in zip(requests, several, answers, strict=True):
        assert found["logits"].shape == (*request["tokens"].shape, 3)  # without the padding of other requests
        for row, tree in enumerate(chosen):
            expected = node_by_node(module, tree).detach().numpy()
            np.testing.assert_allclose(found["logits"][row, : len(tree)], expected, rtol=1e-4, atol=1e-6)


def test_padding_of_the_callers_own_stays_in_the_answer() -> None:
    """No tree fills the rows of either request: the answer is as wide as its request all the same."""
    model = served()
    wide, narrow = as_request(CHAIN), as_request(SINGLE)
    wide = {name: np.pad(array, ((0, 0), (0, 3)), constant_values=-1) for name, array in wide.items()}
    narrow = {name: np.pad(array, ((0, 0), (0, 1)), constant_values=-1) for name, array in narrow.items()}
    first, second = model.predict_batch([wide, narrow])
    assert (first["logits"].shape, second["logits"].shape) == ((1, 7, 3), (1, 2, 3))
    assert not first["logits"][0, 4:].any()
    assert not second["logits"][0, 1:].any()


def test_a_model_of_roots_answers_a_row_for_each_tree() -> None:
    answers = served(per_node=False).predict_batch([as_request(CHAIN, FLAT), as_request(SINGLE)])
    module = fresh(per_node=False)
    expected = [node_by_node(module, tree)[root_of(tree)].detach().numpy() for tree in (CHAIN, FLAT, SINGLE)]
    np.testing.assert_allclose(np.concatenate([each["logits"] for each in answers]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.02), ("bf16", 0.02)])
def test_other_precisions_leave_the_weights_that_a_cell_reads_itself(precision: str, tolerance: float) -> None:
    """The gates have as many weights as int8 asks for, and the head more."""
    sizes = {"num_tokens": 7, "num_classes": 300, "width": 64, "hidden": 256, "per_node": True}
    answers = []
    for each in ("fp32", precision):
        torch.manual_seed(0)
        weights = arrays_of(TreeLSTM(**sizes))
        factory = ModelFactory(factory="shoal.libs.trees.syntax_tree:TreeLSTM", kwargs=sizes)
        predictor = Predictor(factory, signature_of([-1, -1, 300]), ModelOptions(precision=each, warm_up=False))
        [answer_] = predictor.load(WeightSnapshot.of(1, weights)).predict_batch([as_request(CHAIN, FLAT)])
        answers.append(answer_["logits"])
    np.testing.assert_allclose(*answers, atol=tolerance)
    assert not np.array_equal(*answers)


NO_TREE: Tree = [(1, -1), (2, -1)]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (NO_TREE, "tree 1, node 1.* is a second root"),
        ([(1, 1), (2, 0)], "tree 1, node 0.* is on a cycle"),
        ([(1, -1), (-1, 0)], "tree 1, node 1.* has a parent and no token"),
        ([(-1, -1)], "tree 1.* has no nodes"),
        ([(1, node - 1) for node in range(5000)], "4999 levels below it"),
    ],
)
def test_a_row_that_is_no_tree_is_rejected_by_tree_and_node(tree: Tree, problem: str) -> None:
    with pytest.raises(InferenceError, match=problem) as caught:
        served().predict_batch([as_request(CHAIN, tree)])
    assert caught.value.status == 422
    assert isinstance(caught.value.__cause__, TreeError)


def test_tokens_and_parents_of_two_shapes_are_rejected() -> None:
    request = {**as_request(CHAIN), "parents": np.zeros((1, 2), np.int64)}
    with pytest.raises(InferenceError, match=r"parents of the shape \[1, 2\] and nodes of the shape \[1, 4\]"):
        served().predict_batch([request])


def test_a_request_that_is_no_tree_leaves_the_others_of_its_batch_alone() -> None:
    model = served()
    batches: list[int] = []

    def forward(batch: Batch[Any]) -> Any:
        requests = requests_of(batch)
        batches.append(len(requests))
        return model.predict_batch(requests)

    several: list[tuple[Tree, ...]] = [(CHAIN,), (FLAT, SINGLE), (FLAT, NO_TREE), (SINGLE,)]

    async def body() -> None:
        batcher: Batcher[Any, Any, Any] = Batcher()
        queue = batcher.add_queue("trees", forward, max_batch_rows=8, max_queue_rows=64)
        requests = [as_request(*each) for each in several]
        submitted = [answer(queue, request, len(request["tokens"])) for request in requests]
        good, both, bad, single = await asyncio.gather(*submitted, return_exceptions=True)
        assert isinstance(bad, InferenceError)
        assert bad.status == 422
        assert "tree 1, node 1" in str(bad)  # counted within its own request
        for found, request in zip((good, both, single), (requests[0], requests[1], requests[3]), strict=True):
            assert found["logits"].shape == (*request["tokens"].shape, 3)
        await until(lambda: queue.counts().failed == 1)
        batcher.close()

    run(body)
    assert max(batches) > 1  # it did share a batch


WORDS = dict(enumerate(TOKENS))


def words_of(code: str) -> tuple[list[str], list[int]]:
    numbered = number_nodes(ast.parse(code).body[0])
    return [WORDS[token] for token in numbered[0]], numbered[1]


def test_nodes_are_numbered_from_the_root_and_children_are_in_their_order() -> None:
    words, parents = words_of("total += f(x, 1.5)[not y]")
    assert words == [
        *("AugAssign Add", "Name Store", "Subscript", "Call", "Name", "Name", "Constant float", "UnaryOp Not", "Name")
    ]
    assert parents == [-1, 0, 0, 2, 3, 3, 3, 2, 7]


def test_operators_constants_and_contexts_are_part_of_a_token() -> None:
    assert words_of("a is not None and b < 'x' < c")[0] == [
        *("Expr", "BoolOp And", "Compare IsNot", "Name", "Constant NoneType", "Compare Lt", "Name", "Constant str"),
        "Name",
    ]
    assert words_of("del a.b, c[...]")[0] == [
        *("Delete", "Attribute Del", "Name", "Subscript Del", "Name", "Constant ellipsis")
    ]


def test_every_kind_of_node_of_this_python_has_a_token() -> None:
    skipped = ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.mod, ast.type_ignore, ast.slice
    deprecated = {"Num", "Str", "Bytes", "NameConstant", "Ellipsis", "Index", "ExtSlice"}
    abstract = {"AST", "stmt", "expr", "excepthandler", "pattern", "slice", "type_param"}
    found = {
        name
        for name, value in vars(ast).items()
        if isinstance(value, type) and issubclass(value, ast.AST) and not issubclass(value, skipped)
    }
    assert {"FunctionDef", "Call", "arg"} <= found
    newer = {"TypeVar", "ParamSpec", "TypeVarTuple", "TemplateStr", "Interpolation"}  # of 3.12 and 3.14: "other"
    assert found - deprecated - abstract - newer - set(KINDS) == set()


def test_a_kind_of_a_newer_python_is_another() -> None:
    class Newer(ast.stmt):
        _fields = ("body",)

    node = Newer()
    node.body = [ast.Pass()]
    numbered = number_nodes(node)
    assert [WORDS[token] for token in numbered[0]] == ["other", "Pass"]


def test_a_tree_above_the_limit_is_left_out() -> None:
    tree = ast.parse("a = b").body[0]
    assert number_nodes(tree, max_nodes=2) is None
    assert number_nodes(tree, max_nodes=3) is not None


def test_the_kind_of_a_token() -> None:
    assert [KINDS[KIND_OF_TOKEN[TOKENS.index(word)]] for word in ("Name", "Name Store", "BinOp Add")] == [
        *("Name", "Name", "BinOp")
    ]
    assert KINDS[KIND_OF_TOKEN[MASKED]] == "other"
    assert len(set(TOKENS)) == len(TOKENS) < 256  # a byte each
