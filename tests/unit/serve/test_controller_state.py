"""The state of an endpoint on disk: what a full disk does to it, and that it goes when the endpoint does."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from shoal.serve.controller.state import ControllerState, StateFile
from shoal.weights import WeightSnapshot


def test_what_was_removed_is_not_kept_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    file.save(ControllerState(deployment="a", generation=3))
    found = file.load("a")
    assert found is not None
    assert found.generation == 3
    file.remove()
    file.save(ControllerState(deployment="a", generation=4))  # the last report of a replica that is on its way out
    file.remove()
    assert [*tmp_path.iterdir()] == []
    assert StateFile(tmp_path / "endpoint.json").load("a") is None


def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    weights = WeightSnapshot.of(7, {"w": np.zeros(1, np.float32)})
    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for generation in (3, 4):
            file.save(ControllerState(deployment="a", generation=generation))
        file.store_weights("m", weights)
        file.retry_writes()
        assert file.load_weights("m", 7) == weights
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
        str(tmp_path / "endpoint.json"),
        str(tmp_path / "endpoint.weights" / "m"),
    ]
    assert StateFile(tmp_path / "endpoint.json").load("a") is None
    file.retry_writes()
    written = StateFile(tmp_path / "endpoint.json")
    found = written.load("a")
    assert found is not None
    assert found.generation == 4
    assert written.load_weights("m", 7) == weights


def test_what_a_full_disk_refused_is_forgotten_with_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        file.save(ControllerState(deployment="a"))
        file.remove()
    file.retry_writes()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", ["", "[]", "7", "{}", '{"models": []}', '{"models": {"m": {}}}', "\udce9"])
def test_what_is_no_state_is_refused_and_the_endpoint_starts_from_what_it_was_deployed_with(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoint.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert StateFile(path).load("d") is None
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path} cannot be read, the endpoint starts from its deployment")
