"""An endpoint on Ray whose replicas follow its load: Serve sees none of the requests, its policy sees all of them."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID

import shoal
import shoal.errors
from endpoint_process import NUM_FEATURES, Client, EndpointProcess
from shoal.client.endpoint_status import EndpointStatus
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, hold_while_asleep
from shoal.serve.on_ray.autoscaling import EndpointAutoscaler
from waiting import wait_for

TIMEOUT_S = 300.0
NUM_HELD = 20
REPLICA = ReplicaID("r", DeploymentID(name="replica", app_name="m"))
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    # No forward is this short, so any request at all needs every replica, however fast the machine is.
    scale = {"min": 0, "max": 2, "objective_s": 1e-7, "idle_s": 10}
    with EndpointProcess(scale=scale, num_cpus=0.1) as process:
        process.publish(1)
        yield process


@pytest.mark.soak
def test_requests_that_bypass_serve_bring_another_replica(endpoint: EndpointProcess) -> None:
    client = Client(endpoint.url)
    wait_for(lambda: client.infer()[0] == 200, TIMEOUT_S)

    def has_two_replicas() -> bool:
        assert client.infer()[0] == 200
        return len(endpoint.stats()) == 2

    wait_for(has_two_replicas, TIMEOUT_S)
    client.close()


def ask_status(endpoint: EndpointProcess) -> EndpointStatus:
    with shoal.Client(endpoint.url, timeout_s=TIMEOUT_S) as client:
        return client.status()


@pytest.mark.soak
def test_an_idle_endpoint_sleeps_and_answers_all_that_wake_it(endpoint: EndpointProcess) -> None:
    def is_asleep() -> bool:
        # Of the ingress, which is told last, and of the controller.
        return ask_status(endpoint).asleep and bool(endpoint.command("status")["asleep"])

    def ask(number: int) -> int:
        # A start may take longer than a request is held, which is then asked for again.
        with shoal.Client(endpoint.url, timeout_s=TIMEOUT_S, num_retries=100, binary=number % 2 == 0) as caller:
            return int(caller.infer("linear", np.zeros((1, NUM_FEATURES), np.float32)).version)

    wait_for(is_asleep, TIMEOUT_S)
    assert endpoint.stats() == []
    with ThreadPoolExecutor(NUM_HELD) as pool:
        try:
            assert list(pool.map(ask, range(NUM_HELD))) == [1] * NUM_HELD
        except shoal.errors.InferenceError as error:
            told = [endpoint.command(each) for each in ("stored_version", "stats", "status")]
            raise AssertionError(f"{told} {endpoint.read_logs()}") from error
    wait_for(is_asleep, TIMEOUT_S)
    client = Client(endpoint.url, TIMEOUT_S)
    status, _, answer = client.request("POST", "/shoal/v1/rollout", "{}")
    assert (status, answer["error"]) == (503, "the endpoint is asleep: send it a prediction, then the change")
    assert client.request("GET", "/favicon.ico", "")[0] == 404
    client.close()
    assert is_asleep()
    assert "replica_lost " not in endpoint.command("events"), endpoint.read_logs()


def decide(policy: EndpointAutoscaler, now_s: float, running: int) -> int:
    numbers = {"requests": now_s * 1000, "waiting": 0.0, "loop_s": 0.0, "seconds_1": 0.01}
    series = {name: {REPLICA: [SimpleNamespace(value=each)]} for name, each in numbers.items()}
    context: Any = SimpleNamespace(
        app_name="m", current_time=now_s, raw_metrics=series, current_num_replicas=running,
        target_num_replicas=running, total_queued_requests=0.0,
    )  # fmt: skip
    return policy(context)[0]


def test_a_spent_budget_has_the_ingress_refuse_what_would_wake_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "haproxy"))
    hold_while_asleep(os.environ, "m", is_on=True)
    midnight_s = datetime(2026, 1, 6, tzinfo=UTC).timestamp()
    scale = {"min": 0, "max": 2, "budget": "1/day"}
    policy = EndpointAutoscaler(scale, 0.1, str(tmp_path / "m.budget.json"))
    told = []
    for hour, running in ((0, 1), (0.9, 1), (1.1, 1), (1.2, 0), (24.1, 0)):
        decide(policy, midnight_s + hour * 3600, running)
        told.append((tmp_path / "asleep" / "m").read_text())
    refused = [0, 0, *[midnight_s + 86_400] * 2, 0]
    assert told == [f"{until_s:.0f} 0.000 0.000" for until_s in refused]


def test_the_account_of_a_budget_outlives_serves_controller(tmp_path: Path) -> None:
    file, midnight_s = tmp_path / "endpoints" / "m.budget.json", datetime(2026, 1, 6, tzinfo=UTC).timestamp()
    scale = {"max": 4, "floors": {"00:00-24:00": 2}, "budget": "50/day"}

    first = EndpointAutoscaler(scale, 0.1, str(file))
    assert [decide(first, midnight_s + 1800 * each, 4) for each in range(3)] == [2, 4, 2]  # one hour beyond the floor
    again = EndpointAutoscaler(scale, 0.1, str(file))
    assert [decide(again, midnight_s + 3601 + each, 2) for each in range(3)] == [2, 2, 2]
    # Ten hours without an endpoint cost nothing, nor does what was spent by the month count for a day.
    hours = EndpointAutoscaler(scale, 0.1, str(file))
    decide(hours, midnight_s + 36_000, 0)
    assert hours._policy is not None
    assert hours._policy.budget is not None
    assert hours._policy.budget.spent_s <= 4 * 3600
    monthly = EndpointAutoscaler({**scale, "budget": "1600/month"}, 0.1, str(file))
    assert decide(monthly, midnight_s + 36_001, 2) == 2
    assert monthly._policy is not None
    assert monthly._policy.budget is not None
    assert monthly._policy.budget.spent_s == 0
    decide(monthly, midnight_s + 30_000, 2)  # a clock that is put back freezes nothing
    assert monthly._decided_s == midnight_s + 30_000
