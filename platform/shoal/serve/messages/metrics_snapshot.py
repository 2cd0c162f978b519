"""The counts of a model as plain data, to cross processes, to be summed over replicas and to be shown.

Made by `model_statistics`, read by the controller, by `prometheus` and by the protocol's statistics. Pure functions of
dictionaries: counts nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, NotRequired, TypedDict


class DurationSnapshot(TypedDict):
    """A row of the statistics extension: a count and a total time."""

    count: int
    ns: int


class HistogramSnapshot(TypedDict):
    """`counts[i]` values are at most `bounds[i]` and above the bound before; the last count has the rest."""

    bounds: list[float]
    counts: list[int]
    sum: float


class InferenceStats(TypedDict):
    """The times of one version, per request; `compute_infer` is the time of the request's batch."""

    success: DurationSnapshot
    fail: DurationSnapshot
    queue: DurationSnapshot
    compute_infer: DurationSnapshot


class BatchStats(TypedDict):
    """The times of one version and one batch size, in rows."""

    batch_size: int
    compute_infer: DurationSnapshot


ColumnValues = dict[str, dict[str, int]]  # by column of a table: values that training has not seen, by their sort


class VersionSnapshot(TypedDict):
    """One version, with the field names of the statistics extension.

    statuses:  requests by HTTP status
    compared:  requests that another version answered and this one computed too; `disagreed` of them differed
    shadow_failed: requests that another version answered and that failed on this one
    failed_on_both: requests that failed on this version and, computed to find the cause, on the one it is compared with
    request_s: of successful requests, from arrival to answer
    """

    last_inference: int  # milliseconds since 1970
    inference_count: int  # rows
    execution_count: int  # batches
    inference_stats: InferenceStats
    batch_stats: list[BatchStats]
    statuses: dict[str, int]
    compared: int
    disagreed: int
    shadow_failed: int
    failed_on_both: int
    columns: ColumnValues
    request_s: HistogramSnapshot


class ActiveVersions(TypedDict):
    """The versions that answer; 0: none. `percent` is the candidate's part of the requests."""

    stable: int
    candidate: int
    percent: float


class LibraryMetric(TypedDict):
    """A family of Prometheus with one series for a model, which a library counts."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: float | HistogramSnapshot


class ModelSnapshot(TypedDict):
    """One model on one replica, or on several (`merge_snapshots`). Plain data for other processes and JSON."""

    name: str
    live: bool
    serving: ActiveVersions
    swaps: int
    pending: int
    versions: dict[str, VersionSnapshot]
    older: VersionSnapshot
    refused: dict[str, int]  # by HTTP status, requests refused before a version was chosen
    queue_s: HistogramSnapshot
    compute_s: HistogramSnapshot
    batch_rows: HistogramSnapshot
    others: NotRequired[dict[str, LibraryMetric]]  # of libraries, by name


def merge_snapshots(snapshots: Iterable[ModelSnapshot]) -> ModelSnapshot:
    """Sum one model's counts over several replicas; `serving` is the first one's. Takes at least one snapshot."""
    first, *rest = snapshots
    merged: ModelSnapshot = {**first}
    for each in rest:
        versions = dict(merged["versions"])
        for version, counts in each["versions"].items():
            versions[version] = add_versions(versions[version], counts) if version in versions else counts
        merged = {
            **merged,
            "swaps": max(merged["swaps"], each["swaps"]),
            "pending": merged["pending"] + each["pending"],
            "versions": dict(sorted(versions.items(), key=lambda item: int(item[0]))),
            "older": add_versions(merged["older"], each["older"]),
            "refused": dict(sorted((Counter(merged["refused"]) + Counter(each["refused"])).items())),
            "queue_s": _sum_histograms(merged["queue_s"], each["queue_s"]),
            "compute_s": _sum_histograms(merged["compute_s"], each["compute_s"]),
            "batch_rows": _sum_histograms(merged["batch_rows"], each["batch_rows"]),
            "others": add_library_metrics(merged.get("others", {}), each.get("others", {})),
        }
    return merged


def sum_versions(snapshot: ModelSnapshot) -> VersionSnapshot:
    """Sum all versions of a model, also those no longer listed separately."""
    summed = snapshot["older"]
    for counts in snapshot["versions"].values():
        summed = add_versions(summed, counts)
    return summed


def count_requests_and_errors(counts: VersionSnapshot) -> tuple[int, int]:
    """Count the requests given to a version, shadowed ones too, and those that ended with a 5xx of its making."""
    errors = sum(count for status, count in counts["statuses"].items() if int(status) >= 500)
    shadowed = counts["compared"] + counts["shadow_failed"]
    return sum(counts["statuses"].values()) + shadowed, errors + counts["shadow_failed"]


def add_versions(one: VersionSnapshot, other: VersionSnapshot) -> VersionSnapshot:
    """Sum the counts of two versions, or of one on two replicas."""
    sizes = {each["batch_size"]: each["compute_infer"] for each in one["batch_stats"]}
    for each in other["batch_stats"]:
        have = sizes.get(each["batch_size"], {"count": 0, "ns": 0})
        sizes[each["batch_size"]] = _sum_durations(have, each["compute_infer"])
    mine, theirs = one["inference_stats"], other["inference_stats"]
    return {
        "last_inference": max(one["last_inference"], other["last_inference"]),
        "inference_count": one["inference_count"] + other["inference_count"],
        "execution_count": one["execution_count"] + other["execution_count"],
        "inference_stats": {
            "success": _sum_durations(mine["success"], theirs["success"]),
            "fail": _sum_durations(mine["fail"], theirs["fail"]),
            "queue": _sum_durations(mine["queue"], theirs["queue"]),
            "compute_infer": _sum_durations(mine["compute_infer"], theirs["compute_infer"]),
        },
        "batch_stats": [{"batch_size": rows, "compute_infer": sizes[rows]} for rows in sorted(sizes)],
        "statuses": dict(sorted((Counter(one["statuses"]) + Counter(other["statuses"])).items())),
        "compared": one["compared"] + other["compared"],
        "disagreed": one["disagreed"] + other["disagreed"],
        "shadow_failed": one["shadow_failed"] + other["shadow_failed"],
        "failed_on_both": one["failed_on_both"] + other["failed_on_both"],
        "columns": add_columns(one["columns"], other["columns"]),
        "request_s": _sum_histograms(one["request_s"], other["request_s"]),
    }


def add_columns(one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> ColumnValues:
    """Sum the counts of columns."""
    return {name: dict(Counter(one.get(name, {})) + Counter(other.get(name, {}))) for name in sorted({**one, **other})}


def add_library_metrics(
    one: Mapping[str, LibraryMetric], other: Mapping[str, LibraryMetric]
) -> dict[str, LibraryMetric]:
    """Sum counters and histograms; gauges, of which some are shares, are left out."""
    summed = {name: metric for name, metric in {**other, **one}.items() if metric["kind"] != "gauge"}
    for name in summed.keys() & one.keys() & other.keys():
        mine, theirs = one[name]["value"], other[name]["value"]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            summed[name] = {**summed[name], "value": _sum_histograms(mine, theirs)}
        elif not (isinstance(mine, dict) or isinstance(theirs, dict)):
            summed[name] = {**summed[name], "value": mine + theirs}
    return summed


def _sum_durations(one: DurationSnapshot, other: DurationSnapshot) -> DurationSnapshot:
    return {"count": one["count"] + other["count"], "ns": one["ns"] + other["ns"]}


def _sum_histograms(one: HistogramSnapshot, other: HistogramSnapshot) -> HistogramSnapshot:
    counts = [mine + theirs for mine, theirs in zip(one["counts"], other["counts"], strict=True)]
    return {"bounds": one["bounds"], "counts": counts, "sum": one["sum"] + other["sum"]}


def subtract_histogram(earlier: HistogramSnapshot, later: HistogramSnapshot) -> HistogramSnapshot:
    """The values observed between two snapshots of one histogram.

    A replica that left takes its counts with it: a lower count than before counts as none.
    """
    counts = [max(0, new - old) for new, old in zip(later["counts"], earlier["counts"], strict=True)]
    return {"bounds": later["bounds"], "counts": counts, "sum": max(0.0, later["sum"] - earlier["sum"])}


def estimate_quantile(histogram: HistogramSnapshot, q: float) -> float | None:
    """Estimate the `q` quantile (0 to 1), linear between bounds; None without values.

    Above the last bound nothing is known: the result is the last bound.
    """
    wanted = q * sum(histogram["counts"])
    if wanted <= 0.0:
        return None
    num_below = 0
    for (low, high), count in zip(pairwise([0.0, *histogram["bounds"]]), histogram["counts"], strict=False):
        if num_below + count >= wanted:
            return low + (high - low) * (wanted - num_below) / count
        num_below += count
    return histogram["bounds"][-1]
