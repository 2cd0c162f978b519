"""The promises that a campaign checks, each with its evidence. They read the record of a run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.extend.runs import Run

LEDGER = "ledger.sqlite"


@dataclass(frozen=True)
class Finding:
    """Whether a promise held. evidence: the numbers by which one sees it"""

    promise: str
    is_held: bool
    evidence: str


def check_accounts(run: Run) -> Iterator[Finding]:
    """received = learned + queued + dropped(reason), for each ledger of the run and each account in it."""
    for path in sorted(run.folder.rglob(LEDGER)):
        received = consumed = 0
        reasons: dict[str, int] = {}
        wrong: list[str] = []
        for actor, incarnation, next_seq, of_actor, learned, dropped in _read_accounts(path):
            counts = {reason: num for reason, num in json.loads(dropped).items() if num}
            received += of_actor
            consumed += learned
            for reason, num in counts.items():
                reasons[reason] = reasons.get(reason, 0) + num
            if of_actor != learned + sum(counts.values()):
                wrong.append(f"{actor}/{incarnation}: {of_actor} != {learned} + {counts}")
            if of_actor != next_seq:
                wrong.append(f"{actor}/{incarnation}: the next number is {next_seq}, received are {of_actor}")
        told = f"received {received:,} = learned {consumed:,} + dropped {sum(reasons.values()):,} {reasons or ''}"
        yield Finding("sent = learned + queued + dropped(reason)", not wrong, "; ".join(wrong[:3]) or told.rstrip())


def _read_accounts(path: Path) -> list[tuple[str, int, int, int, int, str]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(
            "SELECT actor_id, incarnation, next_seq, received, consumed, dropped FROM accounts"
        ).fetchall()


def check_versions(run: Run) -> Iterator[Finding]:
    """Versions of the weights only grow, and none is published twice with other weights."""
    rows = [tuple(row) for row in run.query("SELECT version, step FROM versions WHERE run = :run ORDER BY time")]
    if rows:
        wrong = [f"{later} after {earlier}" for (earlier, _), (later, _) in pairwise(rows) if later <= earlier]
        told = f"{len(rows):,} versions, {rows[0][0]:,} to {rows[-1][0]:,}"
        yield Finding("versions only grow", not wrong, "; ".join(wrong[:3]) or told)


def check_checkpoints(run: Run, saved: Sequence[tuple[float, int]]) -> Iterator[Finding]:
    """After each loss of workers a run goes on from a checkpoint that is as new as the newest one was.

    saved: by Unix time, the step of the newest checkpoint, as it was seen at each fault
    """
    restored = [each for each in run.read_events() if each.kind == "restored"]
    wrong: list[str] = []
    for event in restored:
        newest = max((step for at, step in saved if at <= event.time), default=-1)
        if event.details["step"] < newest:
            wrong.append(f"step {newest:,} was saved, and step {event.details['step']:,} restored")
    if restored:
        told = f"{len(restored)} times restored, none behind the newest checkpoint"
        yield Finding("no step lost beyond the checkpoint", not wrong, "; ".join(wrong[:3]) or told)


def check_losses(run: Run, undisturbed: Run, metric: str) -> Finding:
    """The values of a metric are those of the undisturbed run, to the bit."""
    values, expected = (_read_metric(each, metric) for each in (run, undisturbed))
    wrong = [f"step {step:,}: {values[step]!r}, not {expected[step]!r}" for step in expected
             if step in values and values[step] != expected[step]]  # fmt: skip
    missing = expected.keys() - values.keys()
    told = f"{len(expected):,} values of {metric} are equal"
    if missing:
        wrong.append(f"{len(missing)} values are missing, the first at step {min(missing):,}")
    return Finding(f"{metric} equals an undisturbed run's", bool(expected) and not wrong, "; ".join(wrong[:3]) or told)


def _read_metric(run: Run, metric: str) -> dict[int, float]:
    rows = run.query("SELECT step, value, time FROM metrics WHERE run = :run AND name = '" + metric + "' ORDER BY time")
    return {step: value for step, value, _ in map(tuple, rows)}


def check_leftovers(processes: Sequence[str], folders: Sequence[Path]) -> Finding:
    """Nothing is left of the run's processes and of its clusters' temporary files."""
    left = [*processes, *map(str, folders)]
    return Finding("no process and no file is left", not left, "; ".join(left[:5]) or "none")
