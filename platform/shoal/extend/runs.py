"""Run records, for libraries: records, reports and trackers."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.runs import Run, RunKind, RunRecorder, Status, load
    from shoal.runs.formatting import format_duration, format_number, format_size, format_value
    from shoal.runs.json_lines import LogFormat
    from shoal.runs.record.provenance import format_masked_command, make_command_variable, split_secrets
    from shoal.runs.record.serialization import escape_text
    from shoal.runs.report.event_messages import NO_CHECKPOINT, WAITING
    from shoal.runs.report.panels import ReportPanels, Section, build_ranked_table, find_logarithmic
    from shoal.runs.report.plots import (
        COLOURS,
        INK,
        LINE,
        MARK,
        MAX_HEADING_LENGTH,
        MUTED,
        RULE,
        WIDTH_INCHES,
        add_heading,
        is_logarithmic,
        make_figure,
        mark_moment,
        to_numbers,
        to_png,
        to_svg,
        truncate_middle,
        use_integer_ticks,
    )
    from shoal.runs.run_reader import MetricValue, infer_direction, is_higher_better
    from shoal.runs.sweep_trials import (
        SWEEPING,
        History,
        Sweep,
        SweepTrial,
        TrialLog,
        TrialState,
        load_history,
        load_sweep,
    )
    from shoal.runs.tracking.tracker import Tracker, TrackerNames, list_facts, list_models, list_parameters

__getattr__ = load_on_demand(__name__)
