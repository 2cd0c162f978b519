"""The durable run record: runs, their events, metrics, weight versions, models and endpoints, and the report."""

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.runs.record.recorder import RunRecorder, create, reopen
    from shoal.runs.record.recording import recording
    from shoal.runs.report.report import write_report, write_report_at_end
    from shoal.runs.run_kind import RunKind
    from shoal.runs.run_reader import EndpointRecord, Run, list_running, list_runs, load
    from shoal.runs.run_status import HEARTBEAT_TIMEOUT_S, Status, transition

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
