"""Warnings of a run in progress, in words for people. Pure functions of events."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

WAITING = "waiting"  # the event of a wait for capacity: `reason` is empty at its end
REGISTERED = "registered"  # the event of a version that a run registered: `model`, and the `decision` on the champion
NO_CHECKPOINT = "no_checkpoint"  # the event of a resumed run that begins again

# The message of each kind of event that always has one; its fields are those of the details.
_MESSAGES = {
    "checkpoint_failed": "a checkpoint could not be written, training goes on: {error}",
    "data_noted": "{note}",
    "batch_size_given": "batch_size={used} of the run is used, and not the {loader} of its DataLoader",
    "upload_failed": "checkpoints are on this run's hosts alone, training goes on: {error}",
    "upload_recovered": "checkpoints are in the store again",
    "built_eagerly": "each rank builds the full model before it is sharded or split: {error}",
    "unservable": (
        "{model} is registered, but an endpoint could not load it: {error}; `shoal models show {model} --code` shows"
        " the code that is stored with it"
    ),
    "register_failed": "a version could not be registered, learning goes on: {error}",
    NO_CHECKPOINT: "there is no checkpoint: it begins again, at step 0",
    "worker_lost": "worker {index} died ({cause}): another takes its place, the others go on",
    "server_lost": "server {index} died ({cause}): another takes its place, the others go on",
    "learner_lost": "the learner with the process id {pid} is gone: the others go on",
    "worker_departed": "worker {index} was asked to leave: another takes its place, the others go on",
    "malformed": "a message is no reading, and is passed over ({origin}: {problem}: {text!r}); more are counted",
    "not_held": "messages such as {topic}'s have QoS 0: the broker holds none of them while the run is away",
    "broker_lost": "the broker {broker} is gone ({reason}): reconnecting",
    "broker_rejects": "the broker {broker} rejects this run: {reason}",
    "gateway_moved": "the gateway has moved to {address}: connect the actors that do not follow it",
    "actors_missing": (
        "no actor has come back since the gateway restarted {seconds:.0f} s ago, and nothing is learnt:"
        " connect them to {address}"
    ),
    "invalid_segment": "{actor_id} sends what is dropped: {reason}: {detail}",
}
_LOST = {  # by whether there was no step
    False: "workers were lost after step {step:,} ({error}): going on from the last checkpoint",
    True: "workers were lost before the first step ({error}): starting them again",
}


def format_warning(kind: str, details: Mapping[str, Any]) -> str:
    """The message of an event that reports a problem which did not end the run; "" for other events."""
    if kind in _MESSAGES:
        return _MESSAGES[kind].format_map(details)
    match kind:
        case "restored":
            damaged = f"; damaged, and passed over: {'; '.join(details['damaged'])}" if details["damaged"] else ""
            return f"resumed at step {details['step']:,}{damaged}"
        case "workers_lost":
            return _LOST[details["step"] < 0].format_map(details)
        case "hosts_missing":
            least = f"{details['workers']} workers have no room on the hosts that are left, which hold {details['fit']}"
            return f"{least}: waiting up to {details['wait_s'] / 60:.0f} min for another"
        case "room_taken":
            places = f"{details['workers']} workers have no room beside what runs ({details['fit']} places are free)"
            return f"{places}: waiting up to {details['wait_s'] / 60:.0f} min for it to end"
        case "waiting" if details["reason"]:
            limit = "" if details["wait_s"] is None else f" (up to {details['wait_s'] / 60:.3g} min)"
            return f"{details['reason']}{limit}"
        case "publisher_restarted":
            names = ", ".join(details["publishers"])
            return f"{names} counts from the beginning again: such messages are duplicates; give it another name"
        case "broker_back":
            lost = " and has lost its session: what was sent meanwhile is lost; switch on persistence"
            return f"the broker is back{'' if details['has_session'] else lost}"
        case "drift" | "sensors_silent" | "sensors_back":
            said = {"drift": "errors have grown at", "sensors_silent": "no message comes any more of"}
            names = f"{details['count']} sensors: {', '.join(details['sensors'])}"
            return f"{said.get(kind, 'messages come again of')} {names}"
        case "untracked":
            return f"{details['tracker']} does not have this run's values yet, the run goes on: {details['problem']}"
        case "tracked" if details.get("problem"):
            remedy = f"shoal runs track RUN --to {details['tracker']}"
            return f"{details['tracker']} lacks values of this run ({details['problem']}): {remedy}"
        case "credit_exhausted":
            waiting = f"{details['waiting']} actors wait for credit ({', '.join(details['actors'])})"
            slots = f"of the queue's {details['capacity']} slots {details['queued']} hold segments"
            credit = "".join(f", {name} has {number}" for name, number in details["credit"].items())
            return f"{waiting}: {slots}{credit} (docs/glossary.md#credit)"
        case "settings_changed" if "episodes_before" in details:
            values = ", ".join(f"{name}={value}" for name, value in details["settings"].items())
            before = (
                f"{details['episodes_before']:,} episodes before had the mean return {details['return_before']:.4g}"
            )
            return f"the games are told {values}: {before}"
        case "actor_quarantined":
            release = f"shoal release RUN {shlex.quote(details['actor_id'])}"
            return f"{details['actor_id']} is in quarantine, it {details['reason']}: mend it, then {release}"
        case "tried" if details.get("reason"):
            return f"{details['reason']}: learning goes on"
    return ""


def describe_wait(events: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a run waits for capacity now; "" when it does not.

    events: the details of the newest event of each kind
    """
    return format_warning(WAITING, events[WAITING]) if WAITING in events else ""
