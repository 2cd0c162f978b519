"""Trees of any size in one batch: the same answers as node by node, and what is no tree is refused by its row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InferenceError
from shoal.models.syntax_tree import TreeLSTM, flatten
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
    longest = max(map(len, several))
    padded = np.array([[*tree, *[(-1, -1)] * (longest - len(tree))] for tree in several], np.int64)
    return {"tokens": padded[..., 0], "parents": padded[..., 1]}


def node_by_node(module: TreeLSTM, tree: Tree) -> torch.Tensor:
    """The equations of the paper, one node at a time."""

    def state(node: int) -> tuple[torch.Tensor, torch.Tensor]:
        children = [state(child) for child, (_, parent) in enumerate(tree) if parent == node]
        known = module.input(module.token(torch.tensor(min(tree[node][0], 7))))
        gates, forget = known.split([12, 4])
        gates = gates + module.below(sum((h for h, _ in children), torch.zeros(4)))
        write, read, update = gates.chunk(3)
        cell = torch.sigmoid(write) * torch.tanh(update)
        for h, c in children:
            cell = cell + torch.sigmoid(forget + module.forget(h)) * c
        return torch.sigmoid(read) * torch.tanh(cell), cell

    root = next(node for node, (_, parent) in enumerate(tree) if parent == -1)
    return module.head(state(root)[0])


def fresh() -> TreeLSTM:
    torch.manual_seed(0)
    return TreeLSTM(**SIZES).eval()


@given(st.lists(trees(), min_size=1, max_size=5))
def test_all_trees_at_once_answer_as_node_by_node(several: list[Tree]) -> None:
    module = fresh()
    flat = {name: torch.from_numpy(array) for name, array in flatten(as_request(*several)).items()}
    together = module(**flat)
    for answer, tree in zip(together, several, strict=True):
        torch.testing.assert_close(answer, node_by_node(module, tree), rtol=1e-4, atol=1e-6)


def served() -> LoadedModel:
    ragged = [TensorSignature(name=name, datatype="INT64", shape=[-1, -1]) for name in ("tokens", "parents")]
    signature = Signature(inputs=ragged, outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, 3])])
    options = ModelOptions(ragged="pad", pad_value=-1, preprocess="shoal.models.syntax_tree:flatten")
    factory = ModelFactory(factory="shoal.models.syntax_tree:TreeLSTM", kwargs=SIZES)
    weights = {name: value.numpy() for name, value in fresh().state_dict().items()}
    return Predictor(factory, signature, options).load(WeightSnapshot.of(1, weights))


CHAIN: Tree = [(1, -1), (2, 0), (3, 1), (4, 2)]
FLAT: Tree = [(1, 2), (9, 2), (5, -1)]


def test_requests_with_trees_of_any_size_share_a_batch() -> None:
    model, module = served(), fresh()
    answers = model.predict_batch([as_request(CHAIN, FLAT), as_request([(6, -1)])])
    expected = [node_by_node(module, tree).detach().numpy() for tree in (CHAIN, FLAT, [(6, -1)])]
    np.testing.assert_allclose(np.concatenate([each["logits"] for each in answers]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ([(1, -1), (2, -1)], "a tree has exactly one root"),
        ([(1, 1), (2, 0)], "a tree has exactly one root"),
        ([(1, -1), (2, 2), (3, 1)], "a cycle"),
        ([(1, -1), (2, 4)], "a parent is outside of its tree"),
        ([(1, -1), (2, -2)], "a parent is outside of its tree"),
        ([(1, -1), (2, 2), (-1, -1)], r"a parent is a node that is not there \(token -1\)"),
        ([(1, -1), (-1, 0)], "a node that is not there .* has a parent"),
        ([(-1, -1)], "a tree has exactly one root"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_row(tree: Tree, complaint: str) -> None:
    with pytest.raises(InferenceError, match=rf"flatten: 'parents': {complaint}.* \(row 1\)$") as caught:
        served().predict_batch([as_request(CHAIN, tree)])
    assert caught.value.status == 422


def test_tokens_and_parents_of_two_shapes_are_refused() -> None:
    request = {**as_request(CHAIN), "parents": np.zeros((1, 2), np.int64)}
    with pytest.raises(InferenceError, match=r"'parents' has the shape \[1, 2\], 'tokens' has \[1, 4\]"):
        served().predict_batch([request])
