"""Trees as requests have them, padded, and their plans in several threads: what a server relies on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.errors import TreeError
from shoal.libs.trees import TreeBatch
from shoal.libs.trees.plan import TreePlan
from shoal.libs.trees.planner import _PlanCache, _size_bytes, plan_forest

CHAIN = [-1, 0, 1, 2]


def test_a_parent_beyond_the_row_is_missing() -> None:
    """It would otherwise be taken for the row's last node."""
    parents = np.array([CHAIN, [-1, 0, 1, 4]])
    with pytest.raises(TreeError, match="its parent, node 4, is missing: there are 4 nodes") as caught:
        TreeBatch.from_padded(parents, np.ones((2, 4), bool))
    assert (caught.value.tree, caught.value.node) == (1, 3)


def test_rows_without_a_place_are_trees_without_nodes() -> None:
    with pytest.raises(TreeError, match="'tree 0': has no nodes"):
        TreeBatch.from_padded(np.zeros((2, 0), np.int64), np.zeros((2, 0), bool))


def a_plan(num_nodes: int) -> TreePlan:
    return plan_forest(np.array([num_nodes]), np.arange(-1, num_nodes - 1))


def test_the_least_recently_used_plans_are_dropped_first() -> None:
    first, second, third = (a_plan(size) for size in (10, 11, 12))
    cache = _PlanCache(max_bytes=_size_bytes(first) + _size_bytes(third))

    def get(name: bytes, plan: TreePlan) -> TreePlan:
        return cache.get_or_make(name, lambda: plan)

    assert get(b"1", first) is first
    assert get(b"2", second) is second
    assert get(b"1", third) is first  # it is used, and so newer than the second
    assert get(b"3", third) is third
    assert get(b"1", third) is first
    assert get(b"2", third) is third  # the second was dropped


def test_a_plan_above_the_limit_is_kept_while_it_is_the_newest() -> None:
    cache, plan = _PlanCache(max_bytes=1), a_plan(10)
    assert cache.get_or_make(b"1", lambda: plan) is plan
    assert cache.get_or_make(b"1", lambda: a_plan(10)) is plan


def test_threads_share_the_plans() -> None:
    cache, plans = _PlanCache(max_bytes=20 * _size_bytes(a_plan(10))), [a_plan(10) for _ in range(100)]

    def use(start: int) -> bool:
        names = [(start + step * 7) % 100 for step in range(2000)]
        found = [cache.get_or_make(b"%d" % name, lambda name=name: plans[name]) for name in names]  # type: ignore[misc]
        return all(plan is plans[name] for plan, name in zip(found, names, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))
