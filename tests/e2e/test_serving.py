"""Serving as a user does it: deploy, ask, canary, promote, roll back, predict a file, delete; nothing stays behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

import shoal.runs
from leftovers import listening
from registered import register
from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import ConnectionLost
from shoal.registry import Registry
from shoal.runs import Status
from shoal.runs.record.provenance import find_owner
from shoal_program import shoal_command
from typed import said, typed
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

MODEL = "constant-served"  # answers with its own version, whatever it is asked
ROWS = np.zeros((2, 3), np.float32)
END_S = 400.0  # a deadline for things that take seconds: a loaded machine must not fail a test
pytestmark = pytest.mark.timeout(1800)


class Asking:
    """Asks all the time, and keeps the versions that answered and everything that was wrong."""

    def __init__(self, client: Client) -> None:
        self._client, self._stop = client, threading.Event()
        self.versions: list[int] = []
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(END_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            try:
                answer = self._client.infer(MODEL, ROWS)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test must hear of it
                self.wrong.append(repr(error))
                continue
            self.versions.append(answer.version)
            if set(answer["y"].ravel()) != {answer.version}:
                self.wrong.append(f"{answer}")

    def settled_on(self, versions: set[int]) -> bool:
        return len(self.versions) >= 60 and set(self.versions[-60:]) == versions


@pytest.fixture(scope="module")
def run_id(cluster: EmbeddedCluster) -> Iterator[str]:
    """The run of an endpoint of version 1, which the tests leave to be deleted."""
    home = os.environ["SHOAL_HOME"]
    register(MODEL, aliases=("champion",))
    register(MODEL)
    _, said = shoal_command("serve", "deploy", f"{MODEL}@champion", "--timeout-s", str(END_S), "endpoint.num_cpus=0.5")
    assert "is ready at http://127.0.0.1:" in said
    assert os.environ["SHOAL_HOME"] == home
    found = find_endpoint().run_id
    yield found
    if shoal.runs.load(found).status is Status.RUNNING:  # a test has failed: others need the room
        shoal_command("serve", "delete", MODEL)


@pytest.fixture(scope="module", autouse=True)
def _home(shared_home: Path) -> Iterator[None]:
    """Before the fixture of each test sets it, the module's needs it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(shared_home))
        yield


def test_from_deploy_to_roll_back_no_request_fails(run_id: str) -> None:
    found = find_endpoint(MODEL)
    assert "version 1" in typed("predict", MODEL, "--input", "1,2,3").output
    assert f"{MODEL}@1 stable: share 100%" in said("serve status")
    with Client(found.url, token=token_for(found.url)) as client, Asking(client) as asking:
        wait_for(lambda: asking.settled_on({1}), END_S, "answers")
        assert "50% by 1 (stable), 50% by 2 (candidate)" in said("serve canary", f"{MODEL}@2", "--percent", "50")
        wait_for(lambda: asking.settled_on({1, 2}), END_S, "both versions")
        assert len({client.infer(MODEL, ROWS, sticky="one of many").version for _ in range(20)}) == 1
        assert client.infer(MODEL, ROWS, track="candidate").version == 2
        said("serve promote", MODEL)
        wait_for(lambda: asking.settled_on({2}), END_S, "the promoted version")
        assert Registry().get(f"{MODEL}@champion").version == 2
        said("serve rollback", MODEL, "--reason", "a test")
        wait_for(lambda: asking.settled_on({1}), END_S, "the version before")
        assert Registry().get(f"{MODEL}@champion").version == 1
        assert not asking.wrong
    kinds = ["deploy", "canary", "promote", "rollback"]
    wait_for(lambda: [*_kinds(run_id)] == kinds, END_S, f"{kinds} in the record: {_kinds(run_id)}")


def _kinds(run_id: str) -> list[str]:
    return [str(kind) for kind in shoal.runs.load(run_id).events()["kind"]]


def test_a_name_is_taken_once(run_id: str) -> None:
    error = typed("serve deploy", MODEL).exception
    assert f"endpoint.name = {MODEL!r}: is the name of an endpoint of {find_owner()} on this cluster" in str(error)


def test_deleted_it_leaves_nothing_behind(run_id: str) -> None:
    found = find_endpoint(MODEL)
    port = urlsplit(found.url).port
    sockets = {(number, inode) for number, inode in listening() if number == port}
    assert sockets
    job = psutil.Process(shoal.runs.load(run_id).pid)
    assert "is gone" in shoal_command("serve", "delete", MODEL)[1]
    wait_for(lambda: not job.is_running() or job.status() == psutil.STATUS_ZOMBIE, END_S, "end of the job")
    assert shoal.runs.load(run_id).status is Status.STOPPED
    assert [point.state for point in shoal.runs.load(run_id).endpoints()] == ["closed"]
    with Client(found.url, timeout_s=5.0) as client, pytest.raises(ConnectionLost):
        client.metadata(MODEL)
    assert not sockets & listening()
    assert not [*(Path(os.environ["SHOAL_HOME"]) / "endpoints").glob("*.json")]
