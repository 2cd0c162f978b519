"""Run records, for libraries: records, reports and trackers."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.runs import Run, RunKind, RunRecorder, Status, list_runs, load
    from shoal.runs.curves import (
        MetricHistory,
        NewestValue,
        list_metric_names,
        read_curves,
        read_newest,
        sample_curves,
        summarize_metrics,
        thin,
    )
    from shoal.runs.event_messages import NO_CHECKPOINT, WAITING, format_warning
    from shoal.runs.figures import (
        COLOURS,
        INK,
        MUTED,
        RULE,
        draw_panels,
        is_logarithmic,
        to_png,
        to_svg,
        truncate_middle,
    )
    from shoal.runs.formatting import (
        format_age,
        format_duration,
        format_metric,
        format_metrics,
        format_number,
        format_size,
        format_timestamp,
        format_value,
    )
    from shoal.runs.json_lines import LogFormat
    from shoal.runs.output_files import list_outputs, read_output
    from shoal.runs.panels import (
        FOLDED,
        HIDDEN,
        PANELS,
        Cell,
        Count,
        Line,
        Panel,
        RunPanels,
        encode_picture,
        find_logarithmic,
        list_counts,
    )
    from shoal.runs.record.metric_mirror import LogEntry, MetricMirror
    from shoal.runs.record.opening import make_run_id
    from shoal.runs.record.provenance import (
        format_masked_command,
        is_secret_name,
        make_command_variable,
        mask_command_line,
        split_secrets,
    )
    from shoal.runs.record.removal import TRIAL_STARTED, remove_runs
    from shoal.runs.record.serialization import escape_text
    from shoal.runs.run_reader import (
        MEAN_RETURN,
        RETURNS,
        VALIDATION,
        EventRecord,
        MetricValue,
        infer_direction,
        is_higher_better,
        list_with_best,
    )
    from shoal.runs.tracker import Tracker, TrackerNames, load_tracker
    from shoal.runs.waits import WaitReporter, print_line

__getattr__ = load_on_demand(__name__)
