"""Models on demand: which replica is to load one, and for how large it is taken; replicas only report."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from controller_setting import OPTIONS, FakeCatalogue

from shoal.errors import InferenceError
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.state import Deployment
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency

REPLICAS = ("r1", "r2", "r3", "r4")
LEASE_S = 5.0


class Endpoint:
    """One model of 100 bytes on demand, and four replicas that have room for it."""

    def __init__(self, memory_bytes: int = 150, **options: bool) -> None:
        self.now_s, catalogue = 0.0, FakeCatalogue()
        self.controller = EndpointController(
            "e", [Deployment("m", "/registry", "1", {**OPTIONS, **options})], catalogue=lambda folder: catalogue,
            clock=lambda: self.now_s, memory_bytes=memory_bytes, lease_s=LEASE_S,
        )  # fmt: skip
        for replica in REPLICAS:
            self.report(replica)
        self.controller.tick()
        for replica in REPLICAS:
            self.report(replica)

    def report(self, replica: str, version: int = 0, measured_bytes: Mapping[int, int] = MappingProxyType({})) -> None:
        residency = Residency(measured_bytes, 0, 0.1, 0.1, 0.0, 0, 1, 0, 1, 0, 0)
        models = {"m": ModelReport(version, 0, (version,), residency=residency)} if version else {}
        generation = self.controller.plan.generation
        self.controller.report(ReplicaReport(replica, 1, generation, True, models, address=replica))

    def request(self, *lost: str) -> str:
        """The replica that is to load it, for a caller who cannot reach some."""
        assert self.controller.assignments.request("m", "", lost)
        (replica,) = set(self.controller.state.placement["m"]) - set(lost)
        return replica


def test_a_model_that_kills_what_loads_it_is_left_for_a_while() -> None:
    endpoint = Endpoint()
    first = endpoint.request()
    second = endpoint.request(first)  # one replica may die of something else
    with pytest.raises(InferenceError, match="cannot be loaded") as caught:
        endpoint.request(first, second)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)
    assert "2 replicas were lost" in endpoint.controller.assignments.find_error("m")
    assert "m" not in endpoint.controller.state.placement
    endpoint.now_s += 4.9
    with pytest.raises(InferenceError):
        endpoint.request(first, second)
    endpoint.now_s += 0.2
    third = endpoint.request(first, second)
    with pytest.raises(InferenceError) as caught:
        endpoint.request(first, second, third)
    assert caught.value.retry_after_s == 10.0


def test_a_replica_that_does_not_report_any_more_counts_too() -> None:
    endpoint = Endpoint()
    first = endpoint.request()
    for _ in REPLICAS:
        endpoint.now_s += LEASE_S / 3
        for replica in {*REPLICAS} - {first}:
            endpoint.report(replica)
    endpoint.controller.tick()
    assert first not in endpoint.controller.reports
    second = endpoint.request()
    with pytest.raises(InferenceError, match="cannot be loaded"):
        endpoint.request(second)


def test_replicas_lost_after_a_load_do_not_count() -> None:
    endpoint = Endpoint()
    lost: list[str] = []
    for _ in REPLICAS[1:]:
        lost.append(endpoint.request(*lost))
        endpoint.report(lost[-1], version=1)
    assert endpoint.request(*lost) not in lost


def test_a_hot_model_is_found_though_a_replica_that_only_forwards_reports_it_too() -> None:
    endpoint = Endpoint()
    holder = endpoint.request(REPLICAS[0])
    for second in range(1, 4):
        endpoint.now_s = float(second)
        for replica in REPLICAS:
            used = Residency(requests=second * 1000) if replica == holder else Residency(forwarded=second * 1000)
            latency = ((1, 0.01),) if replica == holder else ()
            model = ModelReport(int(replica == holder), latency=latency, residency=used)
            report = ReplicaReport(replica, 1, endpoint.controller.plan.generation, True, {"m": model}, address=replica)
            endpoint.controller.report(report)
        endpoint.controller.tick()
    assert len(endpoint.controller.state.placement["m"]) == 2


@pytest.mark.parametrize(
    ("measured", "pin", "size_bytes"),
    [
        ([{}], False, 100),  # of its payload
        ([{1: 160}], False, 160),  # and so also after the controller has restarted
        ([{1: 1 << 40}], False, 200),  # something else may have grown while it was loaded: it is measured again
        ([{1: 1 << 40}, {1: 101}], False, 101),  # replicas measured it differently
        ([{2: 160}], False, 100),  # a version that is gone
        ([{1: 1 << 40}], True, 100),  # as at the start, which then accepted any one of the others
    ],
)
def test_a_version_counts_with_what_a_load_took(measured: list[dict[int, int]], pin: bool, size_bytes: int) -> None:
    endpoint = Endpoint(200, pin=pin)
    for replica, each in zip(REPLICAS, measured, strict=False):
        endpoint.report(replica, version=1, measured_bytes=each)
    endpoint.controller.store.commit()
    assert endpoint.controller.plan.models[0].size_bytes == size_bytes
