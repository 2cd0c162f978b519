"""The durable run record: runs, their events, metrics, weight versions, models and endpoints, and the report.

Names are imported at their first use: a replica needs none of them, and starts sooner.
"""

from typing import TYPE_CHECKING

from shoal.errors import needs_extra
from shoal.plugins.lazy import load_on_demand

with needs_extra("cluster"):
    import pydantic  # of the extra: without it the import of this package names it

if TYPE_CHECKING:
    from shoal.runs.record.opening import create, recording, reopen
    from shoal.runs.record.recorder import RunRecorder
    from shoal.runs.report import write_report, write_report_at_end
    from shoal.runs.run_kind import RunKind
    from shoal.runs.run_reader import EndpointRecord, Run, list_running, list_runs, load
    from shoal.runs.run_status import HEARTBEAT_TIMEOUT_S, Status, transition

__getattr__ = load_on_demand(__name__)
