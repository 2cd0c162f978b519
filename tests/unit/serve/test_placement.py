"""Which replica loads a model and what it drops: decisions of pure functions, and what they come to over a trace."""

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from controller_setting import OPTIONS, FakeCatalogue

from shoal.errors import InferenceError
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.placement import (
    HOLD_LOADS,
    Assign,
    ReplicaMemory,
    ResidentModel,
    TooLarge,
    choose_evicted,
    choose_replica,
    is_hot,
    predict_wait_s,
)
from shoal.serve.controller.state import Deployment
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency


def old(idle_s: float, load_s: float = 1.0, size_bytes: int = 10, **fields: bool) -> ResidentModel:
    """A model that may be dropped, but for what the fields say."""
    return ResidentModel(size_bytes, load_s, idle_s, **fields)


def test_a_model_goes_where_memory_is_free() -> None:
    full, free = ReplicaMemory(20, {"a": old(9), "b": old(8)}), ReplicaMemory(20, {"c": old(1)})
    assert choose_replica(10, {"r1": full, "r2": free}) == Assign("r2")
    empty = ReplicaMemory(20, {})
    assert choose_replica(10, {"r1": free, "r2": empty}) == Assign("r2")


@pytest.mark.parametrize(
    ("models", "dropped"),
    [
        ({"a": old(5), "b": old(9)}, ("b",)),  # the longest idle one
        ({"a": old(5, load_s=0.1), "b": old(9, load_s=1.0)}, ("a",)),  # the one that is soon back
        ({"a": old(9), "b": old(5, has_copy=True)}, ("b",)),  # the one that another replica has
        ({"a": old(9, is_in_use=True), "b": old(1)}, ("b",)),
        ({"a": old(9, size_bytes=4), "b": old(5, size_bytes=16)}, ("b",)),  # one large one instead of two
    ],
)
def test_what_is_dropped_costs_least(models: dict[str, ResidentModel], dropped: tuple[str, ...]) -> None:
    memory = ReplicaMemory(20, models)
    assert choose_replica(10, {"r": memory}) == Assign("r", dropped)


def test_nothing_is_dropped_that_is_used_or_new() -> None:
    fresh = ResidentModel(10, load_s=1.0, idle_s=2.0, age_s=2.0)
    assert fresh.hold_s == HOLD_LOADS - 2.0
    assert choose_replica(20, {"r": ReplicaMemory(20, {"a": fresh, "b": old(9)})}) is None
    assert choose_evicted(10, {"a": old(9, is_in_use=True)}) is None
    assert choose_evicted(10, {"a": old(9)}, min_idle_s=10.0) is None
    assert choose_evicted(0, {"a": old(9)}) == ()


def test_a_model_that_no_replica_can_ever_have_is_said_to_be_too_large() -> None:
    assert choose_replica(21, {"r1": ReplicaMemory(20, {}), "r2": ReplicaMemory(10, {})}) == TooLarge(20)
    assert choose_replica(21, {}) is None  # there may be a replica soon


def test_two_models_that_take_turns_for_one_capacity_do_not_spend_their_time_in_loads() -> None:
    """Each is asked for all the time. A clock of 10 ms steps."""
    load_s = 0.2
    now_s = 0.0
    loading_s = 0.0
    loads = 0
    resident, since_s = "a", 0.0
    while now_s < 60.0:
        other = "b" if resident == "a" else "a"
        model = ResidentModel(10, load_s, idle_s=0.0, age_s=now_s - since_s)
        if isinstance(choose_replica(10, {"r": ReplicaMemory(10, {resident: model})}), Assign):
            resident = other
            since_s = now_s
            loading_s = loading_s + load_s
            loads = loads + 1
        now_s += 0.01
    assert loads > 50  # neither starves
    assert loading_s / now_s <= 1.0 / HOLD_LOADS + 0.01


def test_a_hot_model_is_one_whose_batches_grow() -> None:
    latency = [(1, 0.010), (2, 0.012), (4, 0.016), (8, 0.024), (16, 0.040)]
    assert predict_wait_s(1.0, latency) == pytest.approx(0.0001)
    assert not is_hot(50.0, latency)
    assert is_hot(390.0, latency)
    assert predict_wait_s(1000.0, latency) == math.inf
    assert not is_hot(1000.0, ())


@pytest.mark.parametrize("skew", [0.8, 1.1])
def test_the_hit_rate_over_a_trace_is_that_of_the_least_recently_used(skew: float) -> None:
    """A hundred models by Zipf's law, two replicas with ten each, loads of 20 to 80 ms."""
    draw = random.Random(7)
    weights = [1.0 / (rank + 1) ** skew for rank in range(100)]
    trace = draw.choices(range(100), weights, k=6000)
    used_s: dict[int, float] = {}
    since_s: dict[int, float] = {}
    resident: dict[str, set[int]] = {"r1": set(), "r2": set()}
    oracle: OrderedDict[int, None] = OrderedDict()
    load_s = {model: draw.uniform(0.02, 0.08) for model in range(100)}
    hits = oracle_hits = 0
    now_s = 0.0
    for model in trace:
        now_s += draw.expovariate(20.0)
        if model in oracle:
            oracle_hits += 1
            oracle.move_to_end(model)
        else:
            oracle[model] = None
            if len(oracle) > 20:
                oracle.popitem(last=False)
        if any(model in each for each in resident.values()):
            hits += 1
        else:
            memory = {
                replica: ReplicaMemory(
                    10, {str(m): ResidentModel(1, load_s[m], now_s - used_s[m], now_s - since_s[m]) for m in models}
                )
                for replica, models in resident.items()
            }
            decision = choose_replica(1, memory)
            if isinstance(decision, Assign):
                resident[decision.replica] -= {int(each) for each in decision.evicted}
                resident[decision.replica].add(model)
                since_s[model] = now_s
        used_s[model] = now_s
    assert hits >= oracle_hits - 0.02 * len(trace)


# -- models on demand: which replica is to load one, and for how large it is taken; replicas only report

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
