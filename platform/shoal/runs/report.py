"""The report of a run, which a library writes: it names the function in its extensions, in the group REPORTS.

Called at the end of runs.
"""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.errors import RunError
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.runs.run_reader import Run, load

REPORTS = "shoal.reports"
PAGE = "page"  # the word of the report that runs write at their end
_log = logging.getLogger(__name__)


def write_report(run: Run) -> Path:
    """Write `report.html` and, if there is anything to draw, `learning_curve.png`; returns the path of the page.

    Raises RunError when the run's folder is not writable, and without a library that writes reports.
    """
    if PAGE not in collect_extensions(REPORTS):
        raise RunError(f"no library writes the report of run {run.id} here: install one")
    path: Path = find_extension(PAGE, REPORTS)(run)
    return path


def write_report_at_end(run_id: str) -> None:
    """Write the report of an ended run, if a library writes one. A failure is logged and ends nothing else."""
    if PAGE not in collect_extensions(REPORTS):
        return
    try:
        write_report(load(run_id))
    except Exception as error:  # noqa: BLE001 - whatever drawing raises: the run has ended as its record says
        problem = f"the report of run {run_id} could not be written: {type(error).__name__}: {error}"
        _log.warning("%s. Try again with `shoal report %s`", problem, run_id)
