"""Warnings of a run that goes on, in words for people. Pure functions of events."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

WAITING = "waiting"  # the event of a wait for capacity: `reason` is empty at its end
NO_CHECKPOINT = "no_checkpoint"  # the event of a resumed run that begins again
_FAILED = {
    "checkpoint_failed": "a checkpoint could not be written, training goes on",
    "upload_failed": "checkpoints are on this run's hosts alone, training goes on",
    "built_eagerly": "each rank builds the full model before it is sharded or split",
    "register_failed": "a version could not be registered, learning goes on",
}
_PLAIN = {
    NO_CHECKPOINT: "there is no checkpoint: it begins again, at step 0",
    "broker_back": "the broker is back",
    "upload_recovered": "checkpoints are in the store again",
}
_LOST = {  # by whether there was no step
    False: "after step {step:,} ({error}): going on from the last checkpoint",
    True: "before the first step ({error}): starting them again",
}


def format_warning(kind: str, details: Mapping[str, Any]) -> str:
    """The message of an event that reports a problem which did not end the run; "" for other events."""
    match kind:
        case "checkpoint_failed" | "upload_failed" | "register_failed" | "built_eagerly":
            return f"{_FAILED[kind]}: {details['error']}"
        case "restored" if details["damaged"]:
            return f"going on from step {details['step']:,}; damaged, and passed over: {'; '.join(details['damaged'])}"
        case "workers_lost":
            return "workers were lost " + _LOST[details["step"] < 0].format_map(details)
        case "worker_lost" | "server_lost":
            lost = f"{kind.removesuffix('_lost')} {details['index']} died ({details['cause']})"
            return f"{lost}: another takes its place, the others go on"
        case "replica_lost":
            return f"the learner with the process id {details['pid']} is gone: the others go on"
        case "worker_departed":
            return f"worker {details['index']} was asked to leave: another takes its place, the others go on"
        case "hosts_missing":
            least = f"{details['workers']} workers have no room on the hosts that are left, which hold {details['fit']}"
            return f"{least}: waiting up to {details['wait_s'] / 60:.0f} min for another"
        case "waiting" if details["reason"]:
            return _format_wait(**details)
        case "room_taken":
            places = f"{details['workers']} workers have no room beside what runs ({details['fit']} places are free)"
            return f"{places}: waiting up to {details['wait_s'] / 60:.0f} min for it to end"
        case "malformed":
            shown = f"{details['origin']}: {details['problem']}: {details['text']!r}"
            return f"a message is no reading, and is passed over ({shown}); more are counted"
        case "publisher_restarted":
            names = ", ".join(details["publishers"])
            return f"{names} counts from the beginning again: such messages are duplicates; give it another name"
        case "broker_lost":
            return f"the broker {details['broker']} is gone ({details['reason']}): reconnecting"
        case "broker_rejects":
            return f"the broker {details['broker']} rejects this run: {details['reason']}"
        case "broker_back" if not details["has_session"]:
            return "the broker is back and has lost its session: what was sent meanwhile is lost; switch on persistence"
        case "drift":
            return f"errors have grown at {details['count']} sensors: {', '.join(details['sensors'])}"
        case "tracked" if details.get("problem"):
            remedy = f"shoal runs track RUN --to {details['tracker']}"
            return f"{details['tracker']} lacks values of this run ({details['problem']}): {remedy}"
    return _format_loop_warning(kind, details)


def _format_loop_warning(kind: str, details: Mapping[str, Any]) -> str:
    """The same, of a run with actors."""
    match kind:
        case "gateway_moved":
            return f"the gateway has moved to {details['address']}: connect the actors that do not follow it"
        case "actors_missing":
            missing = f"no actor has come back since the gateway restarted {details['seconds']:.0f} s ago"
            return f"{missing}, and nothing is learnt: connect them to {details['address']}"
        case "credit_exhausted":
            waiting = f"{details['waiting']} actors wait for credit ({', '.join(details['actors'])})"
            slots = f"of the queue's {details['capacity']} slots {details['queued']} hold segments"
            held = "".join(f", {name} has {number}" for name, number in details["credit"].items())
            return f"{waiting}: {slots}{held}"
        case "actor_quarantined":
            release = f"shoal release RUN {shlex.quote(details['actor_id'])}"
            return f"{details['actor_id']} is in quarantine, it {details['reason']}: mend it, then {release}"
        case "tried" if details.get("reason"):
            return f"{details['reason']}: learning goes on"
        case "invalid_segment":
            return f"{details['actor_id']} sends what is dropped: {details['reason']}: {details['detail']}"
    return _PLAIN.get(kind, "")


def _format_wait(reason: str, wait_s: float | None, **_: Any) -> str:
    return reason if wait_s is None else f"{reason} (up to {wait_s / 60:.3g} min)"


def describe_wait(events: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a run waits for capacity now; "" when it does not.

    events: the details of the newest event of each kind
    """
    return format_warning(WAITING, events[WAITING]) if WAITING in events else ""
