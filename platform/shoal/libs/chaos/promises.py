"""The promises that a campaign checks, each with its evidence. They read the record of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.extend.runs import Run, RunKind


@dataclass(frozen=True)
class Promise:
    """One, and whether the run has kept it. evidence: the numbers by which one sees it"""

    name: str
    is_satisfied: bool
    evidence: str


def check_accounts(run: Run) -> Iterator[Promise]:
    """received = learned + queued + dropped(reason), by the ledger of each policy at the end."""
    name = "sent = learned + queued + dropped(reason)"
    accounts = [details for kind, details in run.list_events("accounting")]
    if run.kind is RunKind.LOOP and not accounts:
        yield Promise(name, False, "the run recorded no accounts")
    for each in accounts:
        reasons = {reason: num for reason, num in each["dropped"].items() if num}
        num_known = each["consumed"] + each["queued"] + sum(reasons.values())
        evidence = (
            f"received {each['received']:,}, learned {each['consumed']:,}, queued {each['queued']:,}, dropped {reasons}"
        )
        yield Promise(name, each["received"] == num_known and each["balanced"], evidence)


def check_versions(run: Run) -> Iterator[Promise]:
    """Versions of the weights only grow: none is published twice, or after a later one."""
    versions = run.versions().sort_values("time")["version"].tolist()
    if versions:
        wrong = [f"{later} after {earlier}" for earlier, later in pairwise(versions) if later <= earlier]
        evidence = f"{len(versions):,} versions, {versions[0]:,} to {versions[-1]:,}"
        yield Promise("versions only grow", not wrong, "; ".join(wrong[:3]) or evidence)


def check_checkpoints(run: Run, saved: Sequence[tuple[float, int]]) -> Iterator[Promise]:
    """After each loss of workers, or of a loop's learner, a run goes on from a checkpoint that is as new as the newest
    one was.

    saved: by Unix time, the step of the newest checkpoint (of a loop the updates), as it was seen at each fault
    """
    kind, field = ("learner_restarted", "restored_updates") if run.kind is RunKind.LOOP else ("restored", "step")
    restored = [each for each in run.read_events() if each.kind == kind]
    wrong: list[str] = []
    for event in restored:
        newest = max((step for at, step in saved if at <= event.time), default=-1)
        if event.details[field] < newest:
            wrong.append(f"step {newest:,} was saved, and step {event.details[field]:,} restored")
    if restored:
        evidence = f"{len(restored)} times restored, none behind the newest checkpoint"
        yield Promise("no step lost beyond the checkpoint", not wrong, "; ".join(wrong[:3]) or evidence)


def check_metric(run: Run, undisturbed: Run, metric: str) -> Promise:
    """The values of a metric are those of the undisturbed run, to the bit."""
    recorded = [each.metrics() for each in (run, undisturbed)]
    values, expected = (each[metric].dropna().to_dict() if metric in each else {} for each in recorded)
    wrong = [f"step {step}: {values.get(step)!r}, not {value!r}" for step, value in expected.items()
             if values.get(step) != value]  # fmt: skip
    evidence = f"{len(expected):,} values of {metric} are equal"
    is_satisfied = bool(len(expected)) and not wrong
    return Promise(f"{metric} equals an undisturbed run's", is_satisfied, "; ".join(wrong[:3]) or evidence)
