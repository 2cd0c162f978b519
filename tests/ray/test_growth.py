"""What an autoscaler may add: where it is found, and what fits."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.util.placement_group import placement_group, remove_placement_group

from shoal.cluster import growth
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.cluster.growth import UNLIMITED, Growth, NodeType, find_growth, find_on_head, parse_growth
from waiting import wait_for

SMALL, GPUS = NodeType("small", {"CPU": 4.0}, 3), NodeType("gpus", {"CPU": 8.0, "GPU": 2.0}, 1)
GROWTH = Growth({"CPU": 1.0}, (SMALL, GPUS))

RAY_CLUSTER: dict[str, Any] = yaml.safe_load("""
metadata: {name: shoal, namespace: team}
spec:
  enableInTreeAutoscaling: true
  headGroupSpec:
    rayStartParams: {num-cpus: "0"}
    template: {spec: {containers: [{name: ray-head, resources: {limits: {cpu: "2", memory: 8Gi}}}]}}
  workerGroupSpecs:
  - groupName: trainers
    replicas: 0
    minReplicas: 0
    maxReplicas: 4
    rayStartParams: {}
    template: {spec: {containers: [{name: ray, resources: {limits: {cpu: "8", memory: 64Gi, nvidia.com/gpu: "2"}}}]}}
""")


def test_while_the_head_does_not_answer_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str) -> None:
        raise Exception(f"no answer of {address}")

    monkeypatch.setattr("ray.autoscaler.v2.sdk.get_cluster_status", fail)
    monkeypatch.setattr(growth.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:1"))
    assert growth.count_waiting({"CPU": 1.0}) is None
    assert growth.describe_launches() == ""


def test_a_configuration_with_empty_values_is_read() -> None:
    empty = yaml.safe_load("max_workers:\navailable_node_types: {a: {resources:, max_workers: 2}}")
    assert parse_growth(empty) == Growth({}, (NodeType("a", {}, 2),))
    assert not parse_growth({"available_node_types": None})


@pytest.mark.parametrize(
    ("bundles", "fits"),
    [
        ([{"CPU": 4.0}] * 5, True),  # three small, two beside the GPUs
        ([{"CPU": 4.0}] * 6, False),
        ([{"CPU": 9.0}], False),
        ([{"GPU": 1.0, "CPU": 4.0}] * 2, True),
        ([{"GPU": 1.0, "CPU": 5.0}] * 2, False),  # of the CPUs there is one place less
        ([{"CPU": 4.0}] * 4 + [{"CPU": 3.0}] * 2, False),  # 22 of 21 CPUs, though each kind fits by itself
        ([{"TPU": 1.0}], False),
    ],
)
def test_what_may_come_to_fit(bundles: list[dict[str, float]], fits: bool) -> None:
    assert GROWTH.can_hold(bundles) is fits
    assert not Growth({"CPU": 100.0}).can_hold(bundles), "without an autoscaler nothing will ever be added"
    assert str(GROWTH) == "3 small (4 CPU), 1 gpus (8 CPU, 2 GPU)"


def test_the_configuration_of_an_autoscaler_names_what_it_may_add() -> None:
    types = {
        "head": {"resources": {"CPU": 2}, "max_workers": 0},
        "small": {"resources": {"CPU": 4}, "max_workers": 9},
        "off": {"resources": {"CPU": 4}, "max_workers": 0},
        "any": {"resources": {"CPU": 8}},
    }
    found = parse_growth({"max_workers": 5, "head_node_type": "head", "available_node_types": types})
    assert [(each.name, each.max_nodes) for each in found.node_types] == [("small", 5), ("any", 5)]
    assert found.max_nodes == 5


@pytest.mark.parametrize(
    ("max_nodes", "bundles", "fits"),
    [
        (1, [{"CPU": 4.0}] * 2, True),  # beside the GPUs
        (1, [{"CPU": 4.0}] * 3, False),
        (2, [{"CPU": 4.0}] * 4, False),  # by type there are five places
        (1, [{"GPU": 1.0}] * 2, True),
        (0, [{"CPU": 4.0}], False),
        (9, [{"CPU": 4.0}] * 5, True),
    ],
)
def test_the_limit_of_all_types_together_holds(max_nodes: int, bundles: list[dict[str, float]], fits: bool) -> None:
    limited = replace(GROWTH, max_nodes=max_nodes)
    assert limited.can_hold(bundles) is fits
    assert limited.list_hosts("GPU") == [0.0, 2.0, 0.0, 0.0, 0.0][: 1 + max_nodes]
    assert str(limited).endswith(f"{max_nodes} nodes in all") == (max_nodes < 4)


def test_on_kuberay_the_ray_cluster_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient
    from requests import HTTPError

    def get(client: KubernetesHttpApiClient, path: str) -> dict[str, Any]:
        assert (client._namespace, path) == ("team", "rayclusters/shoal")
        return RAY_CLUSTER

    def refuse(client: KubernetesHttpApiClient, path: str) -> dict[str, Any]:
        raise HTTPError("403 Client Error: Forbidden")

    namespace = tmp_path / "namespace"
    namespace.write_text("team")
    monkeypatch.setattr(growth, "_KUBERAY_NAMESPACE", namespace)
    monkeypatch.setenv("RAY_CLUSTER_NAME", "shoal")
    monkeypatch.setattr(KubernetesHttpApiClient, "get", get)
    (found,) = find_on_head("127.0.0.1:1").node_types
    assert (found.name, found.max_nodes) == ("trainers", 4)
    assert (found.resources["CPU"], found.resources["GPU"]) == (8, 2)
    monkeypatch.setitem(RAY_CLUSTER["spec"], "enableInTreeAutoscaling", False)
    assert not find_on_head("127.0.0.1:1")
    monkeypatch.setattr(KubernetesHttpApiClient, "get", refuse)
    with caplog.at_level(logging.WARNING):
        assert not find_on_head("127.0.0.1:1")
    assert "only present nodes count" in caplog.text
    assert "403" in caplog.text


def test_a_cluster_without_an_autoscaler_does_not_grow_and_a_platform_may_say_what_it_adds(
    cluster: EmbeddedCluster,
) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import ClusterConfig

    assert not find_growth()
    gcs, config = GcsClient(cluster.address), ClusterConfig()
    config.node_group_configs.add(name="pool", resources={"CPU": 16}, max_count=-1)
    try:
        gcs.report_cluster_config(config.SerializeToString())
        found = find_growth()
        assert found.node_types == (NodeType("pool", {"CPU": 16}, UNLIMITED),)
        assert found.head["CPU"] == 8
    finally:
        gcs.report_cluster_config(ClusterConfig().SerializeToString())
    assert not find_growth()


def test_a_driver_on_another_host_asks_the_head(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(gcs_address=cluster.address, get_node_id=lambda: "another")
    monkeypatch.setattr(growth, "_find_config_file", None)  # in this process: the head has its own
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    assert not find_growth()


def test_a_replica_of_several_workers_that_has_no_place_is_counted(cluster: EmbeddedCluster) -> None:
    group = placement_group([{"CPU": 100.0}] * 2)
    try:
        wait_for(lambda: growth.count_waiting_groups([{"CPU": 100.0}] * 2) == 1)
        assert growth.count_waiting_groups([{"CPU": 100.0}]) == 0
    finally:
        remove_placement_group(group)
