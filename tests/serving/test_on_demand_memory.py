"""More models than fit: what counts as how much, and what is pinned."""

from __future__ import annotations

from typing import Any

import pytest

from serving.on_demand_setting import NAMES, infer_everywhere, loaded, on_demand
from serving.replica_set import ReplicaSet, infer, register, until
from shoal.errors import ConfigError
from shoal.registry import Registry
from shoal.serve.controller.config import build_controller_config
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import model_from_ref


@on_demand(num_replicas=1)
async def test_a_model_measured_to_be_large_fits_again_after_the_controller_has_restarted(endpoint: ReplicaSet) -> None:
    replica, size_bytes = endpoint.replicas["r1"], Registry().get("m0@1").manifest.size_bytes
    replica.manager.on_demand.get_use("m1")
    replica.manager._host.memory.loads["m1"].measured_bytes[1] = int(1.6 * size_bytes)
    endpoint.restart_controller()
    for name in ("m0", "m1", "m0", "m1"):
        await infer_everywhere(endpoint, name)
        assert loaded(endpoint) == [name]  # the two take more than there is


@on_demand(num_replicas=1)
async def test_a_model_measured_to_exceed_all_memory_is_loaded_alone_and_measured_again(endpoint: ReplicaSet) -> None:
    """Something else may have grown while it was loaded."""
    await infer_everywhere(endpoint, "m0", "m1")
    measured_bytes = endpoint.replicas["r1"].manager._host.memory.loads["m0"].measured_bytes
    measured_bytes[1] = 1 << 40
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await until(lambda: len(loaded(endpoint)) == 1)
    await infer_everywhere(endpoint, "m1", "m0")
    assert loaded(endpoint) == ["m0"]
    measured_bytes[1] = 1  # as the next load may say
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await infer_everywhere(endpoint, "m1", "m0")
    assert loaded(endpoint) == ["m0", "m1"]


@on_demand(fit=1)
async def test_replicas_that_measured_a_model_differently_take_the_least(endpoint: ReplicaSet) -> None:
    assignments, size_bytes = endpoint.controller.assignments, Registry().get("m0@1").manifest.size_bytes
    for replica, measured_bytes in zip(endpoint.replicas.values(), (1 << 40, size_bytes + 1), strict=True):
        replica.manager.on_demand.get_use("m0")
        replica.manager._host.memory.loads["m0"].measured_bytes[1] = measured_bytes
        endpoint.controller.report(replica.report())
    endpoint.controller.store.commit()
    assignments._memory_bytes = 2 * size_bytes
    assert assignments._version_bytes("m0", endpoint.controller.state.models["m0"]) == size_bytes + 1


@on_demand(num_replicas=1, models={"m0": {"pin": True}})
async def test_a_pinned_model_counts_with_its_payload(endpoint: ReplicaSet) -> None:
    """As at the start, which then accepted any one of the others."""
    endpoint.replicas["r1"].manager.on_demand.get_use("m0")
    endpoint.replicas["r1"].manager._host.memory.loads["m0"].measured_bytes[1] = 1 << 40
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await infer_everywhere(endpoint, "m0", "m1")


@on_demand(num_replicas=1, fit=1)
async def test_a_small_version_fits_after_a_large_one_of_its_name(endpoint: ReplicaSet) -> None:
    replica, name = endpoint.replicas["r1"], "m0"
    await infer_everywhere(endpoint, name)
    replica.manager._host.memory.loads[name].measured_bytes[1] = 1 << 40
    await endpoint.administer(action="delete", model=name)
    register(name)
    await endpoint.administer(action="deploy", model=name, version=2)
    assert (await infer(replica, name)).version == 2


@on_demand(models={"m0": {"pin": True}})
async def test_a_pinned_model_is_on_every_replica_and_stays(endpoint: ReplicaSet) -> None:
    assert loaded(endpoint) == ["m0", "m0"]
    await infer_everywhere(endpoint, *NAMES)
    assert loaded(endpoint).count("m0") == 2
    await until(lambda: len(loaded(endpoint)) == 4)


@on_demand(num_replicas=1, fit=3)
async def test_a_model_that_is_pinned_later_counts_once(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1")
    await endpoint.administer(action="set", model="m0", options={"pin": True})
    await until(lambda: list(endpoint.controller.state.placement) == ["m1"])
    (memory,) = endpoint.controller.assignments._build_memory(set()).values()
    size_bytes = Registry().get("m0@1").manifest.size_bytes
    assert memory.free_bytes == endpoint.controller.assignments._memory_bytes - 2 * size_bytes  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory": 10}, r"endpoint\.memory = '10 B'.*'m0' takes"),
        ({"memory": 10, "model": {"pin": True}}, r"endpoint\.memory = '10 B'.*less than the pinned models take"),
    ],
)
def test_a_memory_that_is_too_small_is_refused_at_once(fields: dict[str, Any], reason: str) -> None:
    register("m0")
    with pytest.raises(ConfigError, match=reason):
        build_controller_config(EndpointSpec.parse({"name": "e", **fields}), [model_from_ref("m0")])
