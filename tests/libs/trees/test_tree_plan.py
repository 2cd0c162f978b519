"""The plan of a batch: its orders and levels, its pieces, and the cache of plans."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.libs.trees import ChildSumLSTMCell, TreeBatch, TreeError, TreeRNN
from shoal.libs.trees.plan import TreePlan
from shoal.libs.trees.planner import _PlanCache, _plans, plan_forest


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    _plans.clear()
    yield
    _plans.clear()


def plan_of(*parents: list[int]) -> TreePlan:
    return TreeBatch.from_parents(parents).plan


def heights_of(parents: list[int]) -> list[int]:
    """By asking each node's ancestors."""
    heights = [0] * len(parents)
    for node in range(len(parents)):
        steps, above = 0, node
        while above >= 0:
            heights[above] = max(heights[above], steps)
            steps, above = steps + 1, parents[above]
    return heights


def grow(choices: list[int]) -> list[int]:
    """A tree of one node more than there are choices, numbered from the leaves up where the first choice is odd."""
    parents = [-1, *(choice % (node + 1) for node, choice in enumerate(choices))]
    if not choices or choices[0] % 2 == 0:
        return parents
    last = len(parents) - 1
    return [-1 if parents[last - node] < 0 else last - parents[last - node] for node in range(len(parents))]


forests = st.lists(st.lists(st.integers(0, 30), max_size=20).map(grow), min_size=1, max_size=8)


@given(forests)
@settings(max_examples=40)
def test_orders_and_levels_of_trees(parents: list[list[int]]) -> None:
    plan = plan_of(*parents)
    offsets = np.cumsum([0, *map(len, parents)])
    parent = [-1 if up < 0 else up + start for tree, start in zip(parents, offsets, strict=False) for up in tree]
    height = [each for tree in parents for each in heights_of(tree)]
    num_children = [parent.count(node) for node in range(len(parent))]
    order, nodes = plan.order.tolist(), plan.node_of_row.tolist()
    assert sorted(order) == sorted(nodes) == list(range(len(parent)))
    assert [nodes[row] for row in plan.row] == order
    assert [nodes[row] for row in plan.row_of_node] == list(range(len(parent)))
    assert [height[node] for node in order] == sorted(height), "leaves first, then level by level"
    assert plan.num_leaves == height.count(0)
    inner = order[plan.num_leaves :]
    assert plan.arity.tolist() == [num_children[node] for node in inner]
    assert [(height[node], num_children[node]) for node in inner] == sorted(
        (height[node], num_children[node]) for node in inner
    )
    assert [height[node] for node in inner] == np.repeat(
        np.arange(1, plan.num_levels), np.diff(plan.level_start)
    ).tolist()
    edges = [node for above in inner for node in range(len(parent)) if parent[node] == above]
    roots = [node for node in range(len(parent)) if parent[node] < 0]
    assert nodes == edges + roots, "a child's row is its edge; roots are last, as their trees come"
    assert [nodes[row] for row in plan.root_row] == roots
    assert [inner[place] for place in plan.edge_parent] == [parent[node] for node in edges]
    assert plan.max_arity == max(num_children)


@given(forests, st.integers(1, 7), st.booleans())
@settings(max_examples=40)
def test_pieces_cover_every_level_once(parents: list[list[int]], max_nodes: int, by_arity: bool) -> None:
    plan = plan_of(*parents)
    pieces = plan.split_levels(max_nodes, by_arity=by_arity)
    places = [place for piece in pieces for place in range(*piece.positions.indices(plan.num_nodes))]
    edges = [edge for piece in pieces for edge in range(*piece.edges.indices(plan.num_nodes))]
    assert places == list(range(plan.num_nodes))
    assert edges == list(range(plan.num_nodes - plan.num_trees))
    ends = {0, *(plan.level_start + plan.num_leaves).tolist()}
    seen = set()
    for piece in pieces:
        first, last = piece.positions.start, piece.positions.stop
        seen |= {first, last}
        assert 0 < last - first <= max_nodes
        if first < plan.num_leaves:
            assert (piece.arity, piece.edges.stop - piece.edges.start) == (0, 0)
            continue
        arities = set(plan.arity[first - plan.num_leaves : last - plan.num_leaves].tolist())
        assert piece.arity == (arities.pop() if len(arities) == 1 else None)
        assert not by_arity or piece.arity is not None
        mine = plan.edge_parent[piece.edges] + plan.num_leaves
        assert mine.tolist() == sorted(mine.tolist())
        assert set(mine.tolist()) == set(range(first, last))
    assert ends <= seen, "no piece reaches over two levels"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_chains_are_padded_by_half_at_most(lengths: list[int]) -> None:
    plan = plan_of(*[[*range(1, length), -1] for length in lengths])
    chains = plan.padded_chains
    steps = plan.order[np.concatenate([group.flatten() for group in chains.groups])]
    assert steps[chains.slots].tolist() == plan.node_of_row.tolist(), "each row has its own node's step"
    assert len(steps) <= 2 * plan.num_nodes
    first_node = plan.first_node.tolist()
    for group in chains.groups:
        for column in plan.order[group].T.tolist():
            chain = lengths[first_node.index(column[0])]
            assert column == [*range(column[0], column[0] + chain), *[column[0]] * (len(column) - chain)]


def test_a_plan_names_what_is_no_tree_again_and_again() -> None:
    for _ in range(2):
        with pytest.raises(TreeError):
            plan_of([1, 0])
    assert len(_plans) == 0


# -- the cache


def test_equal_shapes_have_one_plan() -> None:
    first = TreeBatch.from_parents([[-1, 0], [-1]], inputs={"x": [1, 2, 3]})
    second = TreeBatch.from_parents([np.array([-1, 0], np.int32), [-1]], inputs={"x": [4, 5, 6]})
    padded = TreeBatch.from_padded(np.array([[-1, 0], [-1, -1]]), np.array([[True, True], [True, False]]))
    assert first.plan is second.plan is padded.plan
    assert first.plan is plan_of([-1, 0], [-1], [-1]) or len(_plans) == 2
    others = [
        plan_of([-1], [-1, 0]),
        plan_of([1, -1], [-1]),
        TreeBatch.from_parents([[-1, 0], [-1]], max_depth=5).plan,
        TreeBatch.from_edges([2, 1], [[(1, 0)], []]).plan,
        TreeBatch.from_edges([3], [[(1, 0), (2, 0)]]).plan,
        TreeBatch.from_edges([3], [[(2, 0), (1, 0)]]).plan,
    ]
    assert len({id(plan) for plan in [first.plan, *others]}) == 7
    dags = [TreeBatch.from_edges([3], [[(1, 0), (2, 0), (2, 1)]]).plan for _ in range(2)]
    assert dags[0] is dags[1]


def test_a_plan_does_not_change_with_the_arrays_it_was_made_of() -> None:
    sizes, parents = np.array([2, 1]), np.array([-1, 0, -1])
    plan = plan_forest(sizes, parents)
    sizes[:], parents[:] = 1, -1
    assert plan.sizes.tolist() == [2, 1]
    assert plan_forest(np.array([2, 1]), np.array([-1, 0, -1])) is plan


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of([-1] + [0] * leaves) for leaves in range(1, 31)]
    assert len(_plans) == 30
    monkeypatch.setattr(_plans, "max_bytes", _plans.size_bytes // 2)
    assert plan_of([-1, 0]) is plans[0], "it is there, and now the newest"
    newest = plan_of([-1] + [0] * 31)
    assert 5 < len(_plans) < 20
    assert _plans.size_bytes <= _plans.max_bytes
    assert plan_of([-1] + [0] * 31) is newest
    assert plan_of([-1, 0]) is plans[0]
    assert plan_of([-1, 0, 0]) is not plans[1], "the least recently used were dropped"
    monkeypatch.setattr(_plans, "max_bytes", 1)
    huge = plan_of([-1] + [0] * 1000)
    assert len(_plans) == 1
    assert plan_of([-1] + [0] * 1000) is huge


def test_a_plan_counts_as_much_as_it_takes() -> None:
    """With everything that is computed later, of trees, of chains and of DAGs."""
    graph = [(child, parent) for parent in range(1, 100) for child in range(parent)]
    for plan in (
        plan_of(*[[-1] + [0] * 50] * 20),
        plan_of(*[[-1, *range(200)]] * 5),
        plan_of(*[[-1, *range(length)] for length in range(60)]),
        plan_of(*[[-1]] * 100),
        TreeBatch.from_edges([100], [graph]).plan,
    ):
        _plans.clear()
        _plans.get_or_make(b"", lambda plan=plan: plan)  # type: ignore[misc]
        for name in ("first_edge", "edge_parent", "node_of_row", "row_of_node", "first_node", "tree_of_node"):
            getattr(plan, name)
        if plan.is_forest and plan.max_arity == 1:
            TreeRNN(ChildSumLSTMCell(1, 1))(torch.ones(plan.num_nodes, 1), TreeBatch(plan))
        taken = len(pickle.dumps(plan))
        assert taken <= _plans.size_bytes + 1024 <= 2 * taken + 8192


def test_threads_share_the_cache() -> None:
    cache = _PlanCache(20_000)  # some three plans
    plans = {str(size).encode(): plan_of([-1] + [0] * size) for size in range(1, 12)}

    def use(seed: int) -> None:
        random = np.random.default_rng(seed)
        for key in random.choice(list(plans), 300):
            plan = plans[bytes(key)]
            assert cache.get_or_make(bytes(key), lambda plan=plan: plan) is plan  # type: ignore[misc]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert 1 <= len(cache) <= 4
    assert 0 < cache.size_bytes <= 20_000


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_can_plan_whatever_a_thread_was_doing() -> None:
    with _plans._lock:
        pid = os.fork()
        if not pid:
            code = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            try:
                code = plan_of([-1, 0]).num_nodes - 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
