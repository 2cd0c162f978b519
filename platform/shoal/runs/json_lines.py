"""The output of a job's driver as lines of JSON, for collectors of logs. Called by `job_main`; imports no Ray.

Each line that the driver prints or logs becomes one object: `time` (ISO 8601, UTC), `level`, `logger`, `message`, and
for an exception `exception`. Workers get Ray's own JSON by `job_main.connect`.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Literal, TextIO

TEXT, JSON = "text", "json"
LogFormat = Literal["text", "json"]  # of a spec's field `logs`


class JsonFormatter(logging.Formatter):
    """One object a record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class JsonLines(io.TextIOBase):
    """A stream that writes each full line as a log record's object, of a progress bar its last state."""

    def __init__(self, target: TextIO, name: str, level: int) -> None:
        self.target = target
        self._name = name
        self._level = level
        self._formatter, self._rest = JsonFormatter(), ""
        self._lock = threading.RLock()  # a signal's handler may write as well

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.target.encoding

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                if line.strip():
                    shown = line.rstrip("\r").rpartition("\r")[-1]
                    record = logging.LogRecord(self._name, self._level, "", 0, shown, None, None)
                    self.target.write(f"{self._formatter.format(record)}\n")
        return len(text)

    def fileno(self) -> int:
        """The target's: programs that inherit it, and faulthandler, write to it as they are."""
        return self.target.fileno()

    def flush(self) -> None:
        self.target.flush()

    def close(self) -> None:
        """Write what has no end of line. The target stays open."""
        if self._rest:
            self.write("\n")
        self.flush()


def log_json() -> None:
    """Let this process's log be lines of JSON, by one handler in place of all others."""
    target = sys.stderr.target if isinstance(sys.stderr, JsonLines) else sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def write_json_lines() -> None:
    """Turn this process's output and its log into lines of JSON, from now on."""
    log_json()
    sys.stdout = JsonLines(sys.stdout, "stdout", logging.INFO)
    sys.stderr = JsonLines(sys.stderr, "stderr", logging.ERROR)
