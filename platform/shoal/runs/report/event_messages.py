"""Warnings of a run that goes on, in words for people. Pure functions of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_CHECKPOINT = "no_checkpoint"  # the event of a resumed run that begins again


def format_warning(kind: str, details: Mapping[str, Any]) -> str:
    """The message of an event that reports a problem which did not end the run; "" for other events."""
    match kind:
        case "checkpoint_failed":
            return f"a checkpoint could not be written, training goes on: {details['error']}"
        case "restored" if details["damaged"]:
            return f"going on from step {details['step']:,}; damaged, and passed over: {'; '.join(details['damaged'])}"
        case "workers_lost":
            lost = f"workers were lost after step {details['step']:,} ({details['error']})"
            return f"{lost}: going on from the last checkpoint"
        case "worker_lost" | "server_lost":
            lost = f"{kind.removesuffix('_lost')} {details['index']} died ({details['cause']})"
            return f"{lost}: another takes its place, the others go on"
        case "hosts_missing":
            least = f"{details['workers']} workers have no room on the hosts that are left, which hold {details['fit']}"
            return f"{least}: waiting up to {details['wait_s'] / 60:.0f} min for another"
        case "room_taken":
            places = f"{details['workers']} workers have no room beside what runs ({details['fit']} places are free)"
            return f"{places}: waiting up to {details['wait_s'] / 60:.0f} min for it to end"
        case "invalid_segment":
            return f"{details['actor_id']} sends what is dropped: {details['reason']}: {details['detail']}"
    return "there is no checkpoint: it begins again, at step 0" if kind == NO_CHECKPOINT else ""
