"""When an endpoint is up whose replicas wait for nodes; Serve is a fake."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from shoal.errors import ClusterError
from shoal.serve.spec.endpoint import EndpointSpec

Look = tuple[str, dict[str, int], int]  # the application's status, its replicas, and how many of these have no place


class FakeServe:
    """Serve, and Ray's count of what waits: the next of `looks` at each look."""

    def __init__(self, looks: Iterator[Look]) -> None:
        self._looks = looks
        self.num_waiting = 0
        self.ran = list[Any]()
        self.message = ""

    def RunTarget(self, *target: object) -> object:  # noqa: N802 - as Serve has it
        return target

    def run_many(self, targets: list[object], wait_for_applications_running: bool) -> list[str]:
        assert not wait_for_applications_running
        self.ran += targets
        return ["handle"]

    def status(self) -> SimpleNamespace:
        status, replicas, self.num_waiting = next(self._looks)
        deployment = SimpleNamespace(replica_states=replicas, message=self.message)
        app = SimpleNamespace(status=ApplicationStatus(status), message="it broke", deployments={"replica": deployment})
        return SimpleNamespace(applications={"shop": app})

    def count_waiting(self, bundle: dict[str, float]) -> int:
        assert bundle == {"CPU": 2.0, "GPU": 0.0}
        return self.num_waiting


def run(monkeypatch: pytest.MonkeyPatch, *looks: Look, wait: str = "10m", message: str = "") -> list[str]:
    """The reasons that were recorded, until the endpoint is up. message: of Serve about the deployment"""
    from shoal.serve.on_ray import deployment

    fake, recorded = FakeServe(iter(looks)), list[str]()
    fake.message = message
    monkeypatch.setattr(deployment, "serve", fake)
    monkeypatch.setattr(deployment, "count_waiting", fake.count_waiting)
    monkeypatch.setattr(deployment, "describe_wait", lambda: "waiting for nodes")
    monkeypatch.setattr(deployment, "POLL_S", 0.0)
    spec = EndpointSpec.parse({"name": "shop", "num_replicas": 3, "num_cpus": 2, "wait": wait})
    handle: Any = deployment.submit_application(None, spec)  # type: ignore[arg-type]
    assert handle == "handle"
    deployment.wait_until_up(spec, lambda kind, **details: recorded.append(details["reason"]))
    assert fake.ran == [(None, "shop", "/")]
    assert next(looks_left := fake._looks, None) is None, list(looks_left)
    return recorded


DEPLOYING, RUNNING = "DEPLOYING", "RUNNING"
THREE, TWO = "3 more replicas wanted, waiting for nodes", "2 more replicas wanted, waiting for nodes"


def test_the_first_replica_is_enough_while_the_others_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(
        monkeypatch,
        (DEPLOYING, {}, 0),
        (DEPLOYING, {"STARTING": 3}, 3),
        (DEPLOYING, {"STARTING": 3}, 3),
        (DEPLOYING, {"STARTING": 3}, 2),
        (DEPLOYING, {"STARTING": 2, "RUNNING": 1}, 2),
    )
    assert recorded == [THREE, TWO, ""]


def test_replicas_that_have_a_place_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(monkeypatch, (DEPLOYING, {"STARTING": 2, "RUNNING": 1}, 0), (RUNNING, {"RUNNING": 3}, 0))
    assert recorded == []


def test_an_endpoint_without_any_place_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"'shop' has no place, no nodes came within 0 s.*endpoint.wait=1h"):
        run(monkeypatch, (DEPLOYING, {"STARTING": 3}, 3), (DEPLOYING, {"STARTING": 3}, 3), wait="0s")


def test_a_deployment_that_fails_is_an_error_as_of_serve_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="it broke"):
        run(monkeypatch, ("DEPLOY_FAILED", {}, 0))


def test_what_the_first_replica_refuses_is_refused_before_serve_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "A replica failed to start with exception. Retrying 1 more time(s). Error:\nshoal.errors.ShoalError: no\n"
    with pytest.raises(RuntimeError, match=r"^no$"):
        run(monkeypatch, (DEPLOYING, {"STARTING": 1}, 0), message=message)
