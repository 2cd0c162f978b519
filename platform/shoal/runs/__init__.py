"""The durable run record: runs, their events, metrics, weight versions, models and endpoints, and the report.

Names are imported at their first use: a replica needs none of them, and starts sooner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.errors import needs_extra

if TYPE_CHECKING:
    from shoal.runs.record.opening import create, recording, reopen
    from shoal.runs.record.recorder import RunRecorder
    from shoal.runs.report import write_report, write_report_at_end
    from shoal.runs.run_kind import RunKind
    from shoal.runs.run_reader import EndpointRecord, Run, list_running, list_runs, load
    from shoal.runs.run_status import HEARTBEAT_TIMEOUT_S, Status, transition

with needs_extra("cluster"):
    import pydantic  # noqa: F401  # of the extra: without it the import of this package names it

__all__ = [
    "HEARTBEAT_TIMEOUT_S",
    "EndpointRecord",
    "Run",
    "RunKind",
    "RunRecorder",
    "Status",
    "create",
    "list_running",
    "list_runs",
    "load",
    "recording",
    "reopen",
    "transition",
    "write_report",
    "write_report_at_end",
]

_HOMES = {
    **dict.fromkeys(("create", "recording", "reopen"), "shoal.runs.record.opening"),
    "RunRecorder": "shoal.runs.record.recorder",
    **dict.fromkeys(("write_report", "write_report_at_end"), "shoal.runs.report"),
    **dict.fromkeys(("EndpointRecord", "Run", "list_running", "list_runs", "load"), "shoal.runs.run_reader"),
    **dict.fromkeys(("HEARTBEAT_TIMEOUT_S", "Status", "transition"), "shoal.runs.run_status"),
    "RunKind": "shoal.runs.run_kind",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
