"""The placement of a run's workers on a real cluster: seen while it waits, once it has a place, and when it is gone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.errors import TrainError
from shoal.libs.asynchronous.process_group import ProcessGroup
from shoal.runs.record.event_log import NullLog
from shoal.train.launch.ray_capacity import WorkerPlacement, count_free_workers, count_workers_that_fit
from shoal.train.spec import TrainSpec
from waiting import wait_for

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

STATE_S = 400.0


def test_a_group_is_seen_while_it_waits_and_once_it_has_a_place(cluster: EmbeddedCluster) -> None:
    import ray
    from ray.util import placement_group, remove_placement_group

    @ray.remote(num_cpus=0)
    class Controller:
        """As Ray Train's own makes them: not in the driver."""

        def make(self) -> PlacementGroup:
            return placement_group([{"CPU": 1}] * 2)

    spec = TrainSpec.parse({"task": "tests/train_task.py:Toy", "workers": 2})
    controller = Controller.remote()
    assert count_workers_that_fit(spec) == ray.cluster_resources()["CPU"]
    wait_for(lambda: count_free_workers(spec) > 1, STATE_S, "room on the cluster that all tests share")
    made = [placement_group([{"CPU": count_free_workers(spec) - 1}])]
    try:
        assert made[0].wait(STATE_S)
        wait_for(lambda: count_free_workers(spec) == 1, STATE_S, "one place that is free")
        group = WorkerPlacement()
        assert group.get_state() == ""
        made.append(ray.get(controller.make.remote()))
        wait_for(lambda: group.get_state() == "PENDING", STATE_S, "a group that waits")
        remove_placement_group(made[1])
        wait_for(lambda: group.get_state() == "", STATE_S, "a group that was given up")
        made.append(ray.get(controller.make.remote()))
        wait_for(lambda: group.get_state() == "PENDING", STATE_S, "the next, which waits")
        remove_placement_group(made[0])
        wait_for(lambda: group.get_state() == "CREATED", STATE_S, "a group with its place")
        assert WorkerPlacement().get_state() == ""
    finally:
        for each in made:
            remove_placement_group(each)
        ray.kill(controller)


@pytest.mark.soak
def test_a_group_that_fails_while_it_starts_leaves_no_placement_group(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    from ray.util.placement_group import placement_group_table

    from shoal.train.launch import ray_train

    before = set(placement_group_table())
    spec = TrainSpec.parse({"task": "tests/train_task.py:Toy", "workers": 2, "parallel": {"backend": "nccl"}})
    with closing(ray_train.RayTrainAttempt(ray_train.WorkerSetup(spec, "r", tmp_path, tmp_path))) as attempt:
        wait_for(lambda: attempt.poll(0.1)[1], STATE_S, "the end of the attempt")
        with pytest.raises(TrainError, match=r"cannot start: .*NCCL"):
            attempt.get_outcome()
    made = [each for name, each in placement_group_table().items() if name not in before]
    assert [each["state"] for each in made] == ["REMOVED"]


def test_workers_that_fail_together_are_all_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayTaskError

    from shoal.libs.asynchronous import ray_processes

    fake = Mock()
    fake.wait.return_value, fake.get.side_effect = [["done"], []], RayTaskError("run", "", ImportError("no net"))
    monkeypatch.setattr(ray_processes, "ray", fake)
    targets = dict.fromkeys(("worker 0", "worker 1", "worker 2"), (print, ()))
    group = ProcessGroup(targets, None, Mock(), NullLog(), ray_processes.RayProcess)
    group.start()
    with pytest.raises(TrainError, match="worker 0 cannot start"):
        group.replace_dead(0.0)
    group.close()
    assert fake.kill.call_count == 3
