"""The plan of a batch: its orders and levels, its pieces, and the cache of plans."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.libs.trees import TreeBatch, TreeError
from shoal.libs.trees.plan import TreePlan
from shoal.libs.trees.planner import _PlanCache, _plans, plan_forest


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    _plans.clear()
    yield
    _plans.clear()


def plan_of(*parents: list[int]) -> TreePlan:
    return TreeBatch.from_parents(parents).plan


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_chains_are_padded_by_half_at_most(lengths: list[int]) -> None:
    plan = plan_of(*[[*range(1, length), -1] for length in lengths])
    chains = plan.chain_buckets
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
