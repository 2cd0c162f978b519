"""An endpoint whose parts are killed under an open loop: requests sent = answered + refused with a code; none hangs.

What can be shown without Ray (models that raise, leak or answer nonsense; versions that cannot be staged) is shown in
tests/serving. The load is the benchmarks' own driver: it sends at Poisson times whatever becomes of the answers.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
from benchmarks.serving.drive import Drive, Outcome, Target, http_request

from endpoint_process import BODY, Client, EndpointProcess
from leftovers import children_of
from serving.faulty_models import HANG, SIGNATURE, factory, weights
from shoal.registry import Registry
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
RATE = 80.0
SECONDS = 3.0
REPLICA = "ray::ServeReplica"
SERVE_CONTROLLER = "ray::ServeController"
HAPROXY = "haproxy.cfg"
pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    with EndpointProcess(num_replicas=2, hang_s=1.0, model={"deadline_s": 20.0}) as process:
        process.publish(1)
        wait_for(lambda: [each["version"] for each in process.stats()] == [1, 1], STATE_TIMEOUT_S)
        wait_for(lambda: process.reaches(2), STATE_TIMEOUT_S)
        yield process


@pytest.fixture
def client(endpoint: EndpointProcess) -> Iterator[Client]:
    client = Client(endpoint.url)
    yield client
    client.close()


def under_load(
    endpoint: EndpointProcess, folder: Path, fault: Callable[[], object], model: str = "steps", seconds: float = SECONDS
) -> Outcome:
    """What became of every request while `fault` happened. Every answer names one version and is all of it."""
    url = f"{endpoint.url}/v2/models/{model}/infer"
    target = Target(url, [http_request(url, BODY.encode())])
    with Drive(folder, target, rate=RATE, seconds=seconds, timeout_s=30.0, check="version") as drive:
        drive.begun()
        fault()
        outcome = drive.outcome()
    assert len(outcome.due_s) > 0.5 * RATE * seconds
    assert "hung" not in outcome.failures
    assert "mixed" not in outcome.failures
    return outcome


def lost(outcome: Outcome) -> int:
    """Requests whose connection ended before the answer did: their clients know, but nobody gave them a code."""
    assert all(kind in ("lost", "cut short") or kind.startswith("refused 503") for kind in outcome.failures), outcome
    return outcome.failures.get("lost", 0) + outcome.failures.get("cut short", 0)


def processes(endpoint: EndpointProcess, word: str) -> list[int]:
    """Of this endpoint's processes those whose command line has `word`."""
    return sorted(children_of(endpoint.pid, word))


def kill(endpoint: EndpointProcess, word: str) -> int:
    """The process that was killed."""
    victim = wait_for(lambda: processes(endpoint, word), STATE_TIMEOUT_S, word)[0]
    os.kill(victim, signal.SIGKILL)
    return victim


def healthy(endpoint: EndpointProcess) -> bool:
    """Whether both replicas answer."""
    try:
        return len(endpoint.stats()) == 2
    except RuntimeError:
        return False


def test_killed_controllers_cost_nothing(endpoint: EndpointProcess, client: Client, tmp_path: Path) -> None:
    """Nor is forgotten what was changed before: here a candidate, for those who ask for it."""
    client.change(action="canary", model="steps", version=2, percent=0)
    ours = int(endpoint.command("controller_pid"))

    def fault() -> None:
        os.kill(ours, signal.SIGKILL)
        kill(endpoint, SERVE_CONTROLLER)

    assert under_load(endpoint, tmp_path, fault).failures == {}
    wait_for(lambda: asked(endpoint) not in (0, ours), STATE_TIMEOUT_S)
    wait_for(lambda: healthy(endpoint), STATE_TIMEOUT_S)
    [steps] = [model for model in endpoint.command("status")["models"] if model["name"] == "steps"]
    assert steps["phase"] == "canary"
    _, headers, _ = client.request("POST", "/v2/models/steps/infer", BODY, **{"shoal-track": "candidate"})
    assert headers["shoal-model-version"] == "2"
    assert client.change(action="rollback", model="steps")


def asked(endpoint: EndpointProcess) -> int:
    """The pid of the endpoint's controller; 0 while it is away."""
    try:
        return int(endpoint.command("controller_pid"))
    except RuntimeError:
        return 0


def test_a_killed_haproxy_comes_back(endpoint: EndpointProcess, client: Client, tmp_path: Path) -> None:
    """What it held ends with it, and until there is another nobody listens: each client knows at once."""
    victims: list[int] = []
    outcome = under_load(endpoint, tmp_path, lambda: victims.append(kill(endpoint, HAPROXY)), seconds=2 * SECONDS)
    lost(outcome)
    wait_for(lambda: set(processes(endpoint, HAPROXY)) - set(victims), STATE_TIMEOUT_S)
    wait_for(lambda: reachable(endpoint), STATE_TIMEOUT_S)
    after = under_load(endpoint, tmp_path, lambda: None, seconds=1.0)
    assert after.failures == {}


def reachable(endpoint: EndpointProcess) -> bool:
    client = Client(endpoint.url)
    try:
        return client.infer("steps")[0] == 200
    except (OSError, HTTPException):
        return False
    finally:
        client.close()


def test_a_model_that_hangs_costs_one_replica_and_nobody_elses_answer(
    endpoint: EndpointProcess, client: Client, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    Registry(endpoint.registry).register("faulty", weights(1), model=factory(str(hold)), signature=SIGNATURE)
    status, _, body = client.request("POST", "/v2/repository/models/faulty/load", "{}")
    assert status == 200, body
    try:
        before = set(processes(endpoint, REPLICA))
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [HANG, 0.0]}
        request = json.dumps({"inputs": [tensor]})
        status, _, body = client.request("POST", "/v2/models/faulty/infer", request, **{"shoal-deadline-ms": "300"})
        assert status == 504, body
        wait_for(lambda: before - set(processes(endpoint, REPLICA)), STATE_TIMEOUT_S)
        wait_for(lambda: healthy(endpoint), STATE_TIMEOUT_S)
    finally:
        hold.unlink()
    assert under_load(endpoint, tmp_path, lambda: None, seconds=1.0).failures == {}
