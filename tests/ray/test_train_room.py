"""The placement of a run's workers on a real cluster: seen while it waits, once it has a place, and when it is gone."""

from __future__ import annotations

from shoal.cluster.embedded import EmbeddedCluster
from shoal.train.ray_room import Group, free_places, workers_that_fit
from shoal.train.spec import TrainSpec
from waiting import wait_for

STATE_S = 400.0


def test_a_group_is_seen_while_it_waits_and_once_it_has_a_place(cluster: EmbeddedCluster) -> None:
    from ray.util import placement_group, remove_placement_group

    spec = TrainSpec.parse({"task": "tests/train_task.py:Toy", "workers": 2})
    beside = placement_group([{"CPU": workers_that_fit(spec) - 1}])
    assert beside.wait(STATE_S)
    wait_for(lambda: free_places(spec) == 1, STATE_S, "one place that is free")
    group = Group()
    assert group.state() == ""
    first = placement_group([{"CPU": 1}] * 2)
    wait_for(lambda: group.state() == "PENDING", STATE_S, "a group that waits")
    remove_placement_group(first)
    wait_for(lambda: group.state() == "", STATE_S, "a group that was given up")
    second = placement_group([{"CPU": 1}] * 2)
    wait_for(lambda: group.state() == "PENDING", STATE_S, "the next, which waits")
    remove_placement_group(beside)
    wait_for(lambda: group.state() == "CREATED", STATE_S, "a group with its place")
    assert Group().state() == ""
    remove_placement_group(second)
