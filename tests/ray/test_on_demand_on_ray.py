"""More models than fit, for real: Ray, HAProxy and HTTP between replicas, of which one is killed."""

from __future__ import annotations

import os
import signal
from contextlib import closing, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import pytest

from leftovers import listening_ports
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

STATE_S = 400.0
NAMES = [f"many{number}" for number in range(4)]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning"),  # Serve's own
]


@pytest.mark.soak
def test_two_replicas_answer_for_four_models_and_a_killed_one_is_replaced(cluster: EmbeddedCluster) -> None:
    from shoal.client import Client
    from shoal.errors import ClusterError
    from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import model_from_ref
    from shoal.weights import WeightSnapshot

    x, y = (TensorSignature(name=name, datatype="FP32", shape=[-1, 1]) for name in "xy")
    signature = Signature(inputs=[x], outputs=[y])
    model = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 1, "out_features": 1})
    for number, name in enumerate(NAMES):
        arrays = {"weight": np.zeros((1, 1), np.float32), "bias": np.full(1, number, np.float32)}
        made = Registry().register(name, WeightSnapshot.of(1, arrays), model=model, signature=signature)
    spec = EndpointSpec(name="many", num_cpus=0.1, num_replicas=2, memory=made.manifest.size_bytes + 50)
    with closing(deploy(spec, [model_from_ref(name) for name in NAMES])) as endpoint, Client(endpoint.url) as client:

        def residency() -> dict[str, int]:
            return {each["name"]: each["residency"]["replicas"] for each in endpoint.status()["models"]}

        assert residency() == dict.fromkeys(NAMES, 0)
        for _ in range(2):  # whichever replica is asked
            for number, name in enumerate(NAMES):
                for _ in range(2):
                    assert client.infer(name, [[5.0]])["y"].tolist() == [[float(number)]]
        wait_for(lambda: sum(residency().values()) == 2, STATE_S, "two loaded models")
        status = {each["name"]: each["residency"] for each in endpoint.status()["models"]}
        assert sum(each["forwarded"] for each in status.values()) > 0, status
        assert sum(each["evictions"] for each in status.values()) > 0, status

        loaded = [name for name, replicas in residency().items() if replicas]
        stats = {each["pid"]: set(each["models"]) for each in endpoint.stats()}
        first, last = (int(cluster.environment[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
        assert urlsplit(cluster.dashboard_url).port == first - 1  # which no other cluster has
        assert len([port for port, _ in listening_ports(stats) if first <= port < last]) == 2
        victim = next(pid for pid, models in stats.items() if loaded[0] in models)
        os.kill(victim, signal.SIGKILL)
        for _ in range(4):
            assert client.infer(loaded[0], [[5.0]])["y"].tolist() == [[float(NAMES.index(loaded[0]))]]

        def pids() -> set[int]:
            with suppress(ClusterError):  # some are asked that have just died
                return {each["pid"] for each in endpoint.stats()}
            return set()

        wait_for(lambda: len(pids() - {victim}) == 2, STATE_S, "another replica")
        for number, name in enumerate(NAMES):
            assert client.infer(name, [[5.0]])["y"].tolist() == [[float(number)]]


def test_a_replica_of_another_host_needs_an_ingress_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.errors import ConfigError
    from shoal.serve.on_ray import replica_worker
    from shoal.serve.spec.endpoint import EndpointSpec

    spec = EndpointSpec(name="many", memory="1MiB")
    monkeypatch.setattr(replica_worker, "is_head", lambda host: True)
    replica_worker.require_reachable_peers(spec)
    monkeypatch.setattr(replica_worker, "is_head", lambda host: False)
    replica_worker.require_reachable_peers(spec.model_copy(update={"ingress": "every_node"}))
    with pytest.raises(ConfigError, match=r"endpoint\.ingress = 'head'.* give ingress: every_node"):
        replica_worker.require_reachable_peers(spec)
