"""The audit log: who changed what, from where, when, and how it ended."""

import json
import logging
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from failures import full_disk
from shoal.errors import InferenceError
from shoal.serve.controller import audit
from shoal.serve.controller.audit import MAX_CHARS, AuditLog, read_audit_log
from shoal.serve.controller.state import Event
from shoal.serve.messages.auth_failures import MIN_REPORT_INTERVAL_S, AuthFailure
from shoal.serve.messages.inference import format_origin
from shoal.serve.messages.replica_report import ReplicaReport

CHANGE = {"action": "canary", "model": "lenet", "version": 3, "percent": 5}


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_a_change_that_was_made_for_somebody(path: Path) -> None:
    before = datetime.now(UTC)
    with AuditLog(path, "digits").audit_request(
        "canary", CHANGE, format_origin("administrator", "10.0.0.7 CN=alice smith,O=ours")
    ):
        assert not path.exists()
    (line,) = written(path)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line == {
        "endpoint": "digits", "entry": "asked", "action": "canary", "by": "administrator",
        "from": "10.0.0.7", "subject": "CN=alice smith,O=ours", "change": CHANGE, "result": "done",
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
    with pytest.raises(type(error)), AuditLog(path, "digits").audit_request("canary", CHANGE, "administrator"):
        raise error
    (line,) = written(path)
    assert line.items() >= expected.items()
    assert "from" not in line


def test_a_change_that_nobody_asked_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = AuditLog(path, "digits")
    log.record_change(Event(0, 1.0, "rollback", "lenet", 2, 3, "guard", "too many errors"))
    said = "action rollback, model lenet, version 2, previous 3, by guard, reason too many errors\n"
    assert capsys.readouterr().out.endswith(said)
    log.record_change(Event(1, 2.0, "replica_lost", reason="gone"))
    first, second = written(path)
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "endpoint": "digits", "entry": "changed", "action": "rollback", "by": "guard", "model": "lenet", "version": 2,
        "previous": 3, "reason": "too many errors",
    }  # fmt: skip
    assert (second["by"], second["reason"]) == ("controller", "gone")


def test_only_the_owner_may_read_it_and_nothing_is_overwritten(path: Path) -> None:
    for endpoint in ("one", "two"):
        AuditLog(path, endpoint).record_change(Event(0, 1.0, "deploy", "m"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["endpoint"] for line in written(path)] == ["one", "two"]


def test_a_report_is_no_change(path: Path) -> None:
    with AuditLog(path, "digits").audit_request("metric", {"metric": "accuracy", "value": 0.9}, "ada"):
        pass
    assert not path.exists()


def test_a_long_value_is_cut_and_a_line_is_a_line(path: Path) -> None:
    change = {"parameters": {"config": "x\n" * 10_000, "n": 1, "list": ["y" * 1000, None, True]}}
    with AuditLog(path, "digits").audit_request("load", change, "ada"):
        pass
    (line,) = written(path)
    parameters = line["change"]["parameters"]
    assert parameters["config"].endswith("... (20000 characters)")
    assert len(parameters["list"][0]) < 2 * MAX_CHARS
    assert parameters["list"][1:] == [None, True]


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.ERROR),
        AuditLog(tmp_path / "no" / "such", "digits").audit_request("canary", CHANGE, "ada"),
    ):
        pass
    assert "no audit line" in caplog.text
    assert "lenet" in caplog.text


def test_a_line_that_a_full_disk_has_cut_is_passed_over_and_spoils_no_other(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def audit_version(number: int) -> None:
        with AuditLog(path, "digits").audit_request("canary", {"version": number}, "ada"):
            pass

    audit_version(1)
    with full_disk(path.stat().st_size + 20):
        audit_version(2)
    assert "no audit line" in caplog.text
    audit_version(3)
    for newest_first, versions in ((False, [1, 3]), (True, [3, 1])):
        entries = read_audit_log(path.parent, newest_first=newest_first)
        assert [entry["change"]["version"] for entry in entries] == versions


class Refusing:
    """An audit log, what its replicas have refused, and the time."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, 0.0
        self.counted: dict[str, tuple[AuthFailure, ...]] = {}
        self.restart()

    def restart(self) -> None:
        self.log = AuditLog(self.path, "digits", clock=lambda: self.now_s)

    def lines(self, after_s: float = 0.0) -> list[dict[str, Any]]:
        """What is written for the newest reports `after_s` later."""
        before = len(written(self.path)) if self.path.exists() else 0
        self.now_s += after_s
        self.log.record_auth_failures([ReplicaReport(name, refused=refused) for name, refused in self.counted.items()])
        return written(self.path)[before:] if self.path.exists() else []


def test_the_first_refusal_is_told_at_once_and_with_where_it_came_from(path: Path) -> None:
    refusing = Refusing(path)
    assert refusing.lines() == []
    refusing.counted["r1"] = (AuthFailure("", 401, 1, "10.0.0.7", "m"), AuthFailure("ada", 403, 2))
    unknown, ada = refusing.lines()
    assert datetime.fromisoformat(unknown.pop("time"))
    assert unknown == {
        "endpoint": "digits", "entry": "refused", "by": "unknown", "status": 401, "count": 1, "from": "10.0.0.7",
        "model": "m",
    }  # fmt: skip
    assert (ada["by"], ada["status"], ada["count"], "from" in ada) == ("ada", 403, 2, False)
    assert refusing.lines(after_s=2 * MIN_REPORT_INTERVAL_S) == []


def test_however_many_are_refused_there_is_a_line_a_minute_that_counts_them_all(path: Path) -> None:
    refusing = Refusing(path)
    lines = []
    for second in range(1, 601):
        refusing.counted = {name: (AuthFailure("", 401, second * 1000, name),) for name in ("r1", "r2")}
        lines += refusing.lines(after_s=1.0)
    assert len(lines) == 600 / MIN_REPORT_INTERVAL_S
    lines += refusing.lines(after_s=MIN_REPORT_INTERVAL_S)
    assert sum(line["count"] for line in lines) == 2 * 600_000
    refusing.counted["r1"] += (AuthFailure("ada", 403, 1),)  # has a line of its own
    assert [line["by"] for line in refusing.lines()] == ["ada"]


def test_a_replica_that_left_is_forgotten_and_one_that_comes_is_counted_from_its_start(path: Path) -> None:
    refusing = Refusing(path)
    for number in range(100):
        refusing.counted = {f"r{number}": (AuthFailure("", 401, 7),)}
        assert [line["count"] for line in refusing.lines(after_s=MIN_REPORT_INTERVAL_S)] == [7]
    assert len(refusing.log._auth_failures._reported) == 1


def test_a_log_that_is_begun_again_tells_the_counts_again(path: Path) -> None:
    refusing = Refusing(path)
    refusing.counted = {"r1": (AuthFailure("", 401, 7),)}
    assert len(refusing.lines()) == 1
    refusing.restart()
    assert [line["count"] for line in refusing.lines()] == [7]


def test_a_full_file_is_followed_by_another_and_the_oldest_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 1000)
    monkeypatch.setattr(audit, "NUM_FILES", 3)
    logs = [AuditLog(path, name) for name in ("digits", "shop")]
    for number in range(40):
        with logs[number % 2].audit_request("canary", {"version": number}, "administrator"):
            pass
    files = sorted(path.parent.glob("audit.jsonl*"))
    assert [each.name for each in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(each.stat().st_size <= 1000 and stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files)
    versions = [entry["change"]["version"] for entry in read_audit_log(path.parent)]
    assert versions == list(range(40 - len(versions), 40))
    newest = [entry["change"]["version"] for entry in read_audit_log(path.parent, newest_first=True)]
    assert newest == versions[::-1]
    assert len(versions) > len(written(path))
    assert not caplog.records
