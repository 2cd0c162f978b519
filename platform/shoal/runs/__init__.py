"""The durable run record: runs, their events, metrics, weight versions, models and endpoints, and the report."""

from shoal.runs.record.recorder import RunRecorder, create, reopen
from shoal.runs.record.recording import record_of
from shoal.runs.report.report import report_at_end, write_report
from shoal.runs.run_kind import Kind
from shoal.runs.run_reader import Endpoint, Run, list_running, list_runs, load
from shoal.runs.run_status import HEARTBEAT_TIMEOUT_S, Status, transition

__all__ = [
    "HEARTBEAT_TIMEOUT_S",
    "Endpoint",
    "Kind",
    "Run",
    "RunRecorder",
    "Status",
    "create",
    "list_running",
    "list_runs",
    "load",
    "record_of",
    "reopen",
    "report_at_end",
    "transition",
    "write_report",
]
