"""The audit log: a line of JSON for every requested change of an endpoint, and for every change made.

`from` is the client's address; where clients need certificates, `subject` is that of the client's, as in `CN=alice`.
Calls refused for their caller are logged too, many to a line (see `auth_failures`).

    {"time": "2026-11-20T16:40:00.123+00:00", "endpoint": "digits", "entry": "asked", "action": "canary",
     "by": "administrator", "from": "127.0.0.1", "change": {"model": "lenet", ...}, "result": "refused", "status": 409,
     "error": "..."}
    {"time": ..., "endpoint": "digits", "entry": "changed", "action": "rollback", "by": "guard", "model": "lenet", ...}
    {"time": ..., "endpoint": "digits", "entry": "refused", "by": "unknown", "status": 401, "count": 12, ...}

Written by the endpoint's controller to $SHOAL_HOME/audit.jsonl, which only its owner may read; several controllers may
append to one file, and so may the console, for what it changes in runs. A full file becomes audit.jsonl.1, that one
audit.jsonl.2 and so on; the oldest goes. A line that cannot be written, or in part alone, goes to the program's log
and stops nothing.
Contains no key, and only the beginning of long values. The controller prints changes too, for `shoal serve logs`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.errors import InferenceError
from shoal.home import file_lock
from shoal.serve.controller.state import Event
from shoal.serve.messages.auth_failures import MAX_CHARS, AuthFailureReporter
from shoal.serve.messages.inference import parse_origin
from shoal.serve.messages.replica_report import ReplicaReport

AUDIT_FILE = "audit.jsonl"
MAX_BYTES, NUM_FILES = 16 << 20, 8  # of a file; with the one being written
ROTATION_TIMEOUT_S = 1.0
UNAUDITED_ACTIONS = frozenset({"metric"})  # requests that change nothing by themselves
UNKNOWN_CALLER = "unknown"  # a caller with no key or an unknown one
logger = logging.getLogger(__name__)


class AuditLog:
    """The audit log of one endpoint. endpoint: "" for changes that are of none"""

    def __init__(self, path: Path, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._endpoint = endpoint
        self._clock = clock
        self._auth_failures = AuthFailureReporter()

    @contextmanager
    def audit_request(self, action: str, change: Mapping[str, Any], by: str) -> Iterator[None]:
        """Log a change requested by `by` (see `format_origin`), once its outcome is known."""
        result: dict[str, Any] = {"result": "done"}
        try:
            yield
        except InferenceError as error:
            result = {"result": "refused", "status": error.status, "error": str(error)}
            raise
        except BaseException as error:
            result = {"result": "failed", "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            if action not in UNAUDITED_ACTIONS:
                self._write({"entry": "asked", "action": action, **_parse_caller(by), "change": dict(change), **result})

    def record_change(self, event: Event) -> None:
        facts = {"action": event.kind} | event.details() | _parse_caller(event.by)
        self._write({"entry": "changed", **facts})
        sys.stdout.write(f"{time.strftime('%F %T')} {', '.join(f'{name} {each}' for name, each in facts.items())}\n")

    def record_auth_failures(self, reports: Sequence[ReplicaReport]) -> None:
        """Log the calls refused since the last entry. `reports`: the newest of every replica."""
        counted = [(report.replica, report.refused) for report in reports]
        for each in self._auth_failures.take_due(counted, self._clock()):
            details = {"by": each.by or UNKNOWN_CALLER, "status": each.status, "count": each.count}
            last = {"model": each.model} if each.model else {}
            self._write({"entry": "refused", **details, **_parse_address(each.origin), **last})

    def _write(self, entry: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = (
            json.dumps({"time": now, **({"endpoint": self._endpoint} if self._endpoint else {}), **_truncate(entry)})
            + "\n"
        )
        try:
            self._rotate_if_full(len(line))
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "rb+", buffering=0) as file:
                size_bytes = os.fstat(descriptor).st_size
                is_cut = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
                payload = ("\n" * is_cut + line).encode()  # what a full disk has cut is a line of its own
                if file.write(payload) < len(payload):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError as error:
            logger.error("no audit line: %s; it would have been: %s", error, line.strip())

    def _rotate_if_full(self, added_bytes: int) -> None:
        """Begin another file. One that cannot be renamed grows on: a long file is better than a lost line."""
        if not _is_full(self._path, added_bytes):
            return
        with suppress(OSError), file_lock(self._path.with_name(f".{self._path.name}.lock"), ROTATION_TIMEOUT_S):
            if _is_full(self._path, added_bytes):  # no other controller has been faster
                for target, source in pairwise(reversed(_name_files(self._path))):
                    if source.exists():
                        source.replace(target)


def read_audit_log(home: Path, *, newest_first: bool = False) -> Iterator[dict[str, Any]]:
    """The entries of all files in this folder, in the order in which they were written, or in the opposite one.

    Lines that a full disk or a power cut has damaged are passed over.
    """
    paths, step = _name_files(home / AUDIT_FILE), -1 if newest_first else 1
    for path in paths[::-step]:
        lines = path.read_bytes().splitlines()[::step] if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            yield entry


def _name_files(newest: Path) -> list[Path]:
    """The paths of all files, the newest first."""
    return [newest, *(newest.with_name(f"{newest.name}.{age}") for age in range(1, NUM_FILES))]


def _is_full(path: Path, added_bytes: int) -> bool:
    return path.exists() and path.stat().st_size + added_bytes > MAX_BYTES


def _parse_caller(by: str) -> dict[str, str]:
    name, address = parse_origin(by)
    return {"by": name or "controller", **_parse_address(address)}


def _parse_address(text: str) -> dict[str, str]:
    """The client's address, and the subject of its certificate if it has one, as the ingress writes them."""
    address, _, subject = text.partition(" ")
    return {name: value for name, value in (("from", address), ("subject", subject)) if value}


def _truncate(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name)[:MAX_CHARS]: _truncate(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_truncate(each) for each in value]
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    text = str(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
