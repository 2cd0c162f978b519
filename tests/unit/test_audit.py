"""The audit log: who changed what, from where, when, and how it ended."""

import json
import logging
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InferenceError
from shoal.serve.audit import MAX_CHARS, AuditLog, origin
from shoal.serve.controller_state import Event

CHANGE = {"action": "canary", "model": "lenet", "version": 3, "percent": 5}


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_a_change_that_was_made_for_somebody(path: Path) -> None:
    before = datetime.now(UTC)
    with AuditLog(path, "digits").asked("canary", CHANGE, origin("administrator", "10.0.0.7, 127.0.0.1")):
        assert not path.exists()
    (line,) = written(path)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line == {
        "endpoint": "digits", "entry": "asked", "action": "canary", "by": "administrator",
        "from": "10.0.0.7, 127.0.0.1", "change": CHANGE, "result": "done",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InferenceError(409, "no"), {"result": "refused", "status": 409, "error": "no"}),
        (RuntimeError("oops"), {"result": "failed", "error": "RuntimeError: oops"}),
        (KeyboardInterrupt(), {"result": "failed", "error": "KeyboardInterrupt: "}),
    ],
)
def test_a_change_that_was_not_made(path: Path, error: BaseException, expected: dict[str, Any]) -> None:
    with pytest.raises(type(error)), AuditLog(path, "digits").asked("canary", CHANGE, "administrator"):
        raise error
    (line,) = written(path)
    assert line.items() >= expected.items()
    assert "from" not in line


def test_a_change_that_nobody_asked_for(path: Path) -> None:
    log = AuditLog(path, "digits")
    log.changed(Event(0, 1.0, "rollback", "lenet", 2, 3, "guard", "too many errors"))
    log.changed(Event(1, 2.0, "replica_lost", reason="gone"))
    first, second = written(path)
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "endpoint": "digits", "entry": "changed", "action": "rollback", "by": "guard", "model": "lenet", "version": 2,
        "previous": 3, "reason": "too many errors",
    }  # fmt: skip
    assert (second["by"], second["reason"]) == ("controller", "gone")


def test_only_the_owner_may_read_it_and_nothing_is_overwritten(path: Path) -> None:
    for endpoint in ("one", "two"):
        AuditLog(path, endpoint).changed(Event(0, 1.0, "deploy", "m"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["endpoint"] for line in written(path)] == ["one", "two"]


def test_a_report_is_no_change(path: Path) -> None:
    with AuditLog(path, "digits").asked("metric", {"metric": "accuracy", "value": 0.9}, "ada"):
        pass
    assert not path.exists()


def test_a_long_value_is_cut_and_a_line_is_a_line(path: Path) -> None:
    change = {"parameters": {"config": "x\n" * 10_000, "n": 1, "list": ["y" * 1000, None, True]}}
    with AuditLog(path, "digits").asked("load", change, "ada"):
        pass
    (line,) = written(path)
    parameters = line["change"]["parameters"]
    assert parameters["config"].endswith("... (20000 characters)")
    assert len(parameters["list"][0]) < 2 * MAX_CHARS
    assert parameters["list"][1:] == [None, True]


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), AuditLog(tmp_path / "no" / "such", "digits").asked("canary", CHANGE, "ada"):
        pass
    assert "no audit line" in caplog.text
    assert "lenet" in caplog.text


def test_no_path_no_line() -> None:
    AuditLog(None, "digits").changed(Event(0, 1.0, "deploy", "m"))
