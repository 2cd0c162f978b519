"""What a library may add to the report of a run, and the report of the library that draws it.

A library names the `ReportPanels` of its kind of run in its extensions, in the group PANELS, and the function that
writes a report of any run in the group REPORTS. Called at the end of runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shoal.errors import RunError
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.runs.run_reader import Run, load

PANELS, REPORTS = "shoal.report_panels", "shoal.reports"
PAGE = "page"  # the word of the report that runs write at their end
MAX_ROWS = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A heading with figures, as SVG, a table, and commands. Cells of numbers are right-aligned."""

    title: str
    note: str
    figures: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class ReportPanels:
    """What a kind of run adds to the report.

    titles:   metric -> the title of its small plot, in display order
    cards:    metric -> the label of its headline number, in display order
    hidden:   prefixes of metrics that are neither drawn alone nor listed: the sections show them
    sections: makes the sections of a run as it stands
    """

    titles: Mapping[str, str] = field(default_factory=dict)
    cards: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    sections: Callable[[Run], Sequence[Section]] = lambda run: ()


def build_ranked_table(title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """A section of rows that are sorted, best first: the first MAX_ROWS of them. note: where all are shown."""
    shown = f"the first {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else note
    return Section(title, shown, header=header, rows=rows[:MAX_ROWS])


def find_logarithmic(spec: str) -> set[str] | None:
    """The hyper-parameters that a recorded spec (YAML) searches over their logarithm; None if it has no space."""
    fields = yaml.safe_load(spec)
    space = fields.get("space") if isinstance(fields, dict) else None
    return {path for path, word in space.items() if str(word).startswith("log")} if space else None


def write_report(run: Run) -> Path:
    """Write `report.html` and, if there is anything to draw, `learning_curve.png`; returns the path of the page.

    Raises RunError when the run's folder is not writable, and without a library that writes reports.
    """
    if PAGE not in collect_extensions(REPORTS):
        raise RunError(f"no library writes the report of run {run.id} here: install one")
    path: Path = find_extension(PAGE, REPORTS, {})(run)
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
