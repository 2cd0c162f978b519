"""Where workers that reserve nothing are placed: decisions about nodes as Ray lists them, without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from shoal.cluster.capacity import choose_host, make_host_options
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.rl.gateway.zmq_listener import require_reachable_gateway


def list_nodes(alive: bool = True, **cpus: float) -> list[dict[str, Any]]:
    return [{"NodeID": name, "Alive": alive, "Resources": {"CPU": each} if each else {}} for name, each in cpus.items()]


@pytest.mark.parametrize(
    ("cpus", "chosen"),
    [
        ({"here": 2, "big": 64}, "here"),
        ({"here": 0, "small": 1, "big": 64}, "big"),
        ({"here": 0, "other": 0}, "here"),
        ({}, "here"),
    ],
)
def test_this_node_is_chosen_where_it_has_cpus(cpus: dict[str, float], chosen: str) -> None:
    assert choose_host(list_nodes(**cpus) + list_nodes(alive=False, lost=128), "here") == chosen


HERE = "0a" * 28
ONE = "0b" * 28
TWO = "0c" * 28


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found = list_nodes(**{HERE: 0, ONE: 4, TWO: 2})
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: HERE))
    return found


def find_node(options: dict[str, Any]) -> str:
    assert options["memory"], "Ray places an actor that asks for nothing at random"
    return str(options["scheduling_strategy"].node_id)


def test_a_driver_on_a_head_without_cpus_places_its_workers_elsewhere(nodes: list[dict[str, Any]]) -> None:
    assert find_node(make_host_options()) == ONE
    assert make_host_options()["scheduling_strategy"].soft, "it is placed again when its node is lost"
    nodes[:] = list_nodes(**{HERE: 0})
    assert find_node(make_host_options()) == HERE, "where no node has a CPU"


HEAD, OTHER = "198.18.7.10", "198.18.7.11"


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        (HEAD, {}),
        (OTHER, {"gateway": {"host": "0.0.0.0", "curve": True}}),
        (OTHER, {"gateway": {"advertise": "127.0.0.1:5555"}}),
        (OTHER, {"learn_from_endpoint": True}),
    ],
)
def test_a_gateway_is_where_its_actors_reach_it(host: str, changes: dict[str, Any]) -> None:
    require_reachable_gateway(ActorLearnerSpec.parse(changes), host, HEAD)


def test_a_gateway_on_the_loopback_of_another_host_than_the_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.host = '127\.0\.0\.1': is the loopback of {OTHER}.*advertise"):
        require_reachable_gateway(ActorLearnerSpec(), OTHER, HEAD)
