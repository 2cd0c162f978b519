"""Actors whose log-probabilities are impossible: the evidence against each, and who is in quarantine.

Called by the queue, which gets the evidence from the learner, and by the command line, which shows and releases actors
by the file of a run's ledger. Knows no policy.

The evidence. An honest actor chooses a with probability μ(a) and says so. Then the mean of π(a) / μ(a) is at most 1,
for any other policy π and however far the actor lags behind. So exp of a segment's evidence, the product over its steps
of 1 - λ + λ π(a) / μ(a), has a mean of at most 1, too. The sum of evidence, which starts again where it would fall
below 0, is the CUSUM of such a process (Shin, Ramdas and Rinaldo, arXiv:2203.03532): of an honest actor it passes LIMIT
once in e^LIMIT segments on average, or more seldom. Of an actor that claims less probability than it has, it grows with
each step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError
from shoal.rl.experience.segment_ledger import LEDGER_NAME, ActorKey

LIMIT = 30.0  # nats: 10^13 : 1
BET = 0.05  # λ: what one step can take from the evidence, at most, is log(1 - λ)
# By how much the logarithms of actor and learner may differ, rounding: densities far from their mean have large ones.
TOLERANCE, RELATIVE_TOLERANCE = 1e-3, 1e-5
_MAX_LOG_RATIO = 50.0


def compute_evidence(log_ratios: np.ndarray, log_probabilities: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The evidence against the actor of each segment, nats [S].

    log_ratios: log π(a) - log μ(a) of each step [N], where π does not depend on these steps
    log_probabilities: log μ(a) [N], as the actor claims; lengths: of segments [S]
    """
    tolerances = TOLERANCE + RELATIVE_TOLERANCE * np.abs(log_probabilities.astype(np.float64))
    ratios = np.exp(np.minimum(log_ratios.astype(np.float64) - tolerances, _MAX_LOG_RATIO))
    per_step = np.log1p(BET * (ratios - 1.0))
    evidence: np.ndarray = np.add.reduceat(per_step, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    return evidence


class EvidenceTable:
    """The present evidence against each actor, in nats, and the number of segments that it is of."""

    def __init__(self) -> None:
        self._evidence: dict[str, tuple[float, int]] = {}

    def add(self, keys: Iterable[ActorKey], evidence: Sequence[float]) -> dict[str, str]:
        """Add that of one segment for each key; returns the actors against whom it is too much now, with the reason."""
        accused: dict[str, str] = {}
        for (actor_id, _), value in zip(keys, evidence, strict=True):
            before, num_segments = self._evidence.get(actor_id, (0.0, 0))
            total, num_segments = before + value, num_segments + (value != 0.0)
            if total > LIMIT:
                accused[actor_id] = (
                    "claims log-probabilities that its actions cannot have: too low"
                    f" (1 : e^{total:.0f} that it is by chance, over {num_segments} segments)"
                )
            if total > LIMIT or not total > 0.0:
                self._evidence.pop(actor_id, None)
            else:
                self._evidence[actor_id] = total, num_segments
        return accused


def read_quarantine(ledger: Path) -> dict[str, str]:
    """The actors in quarantine in a run, with the reasons, from the file of its ledger."""
    if not ledger.exists():
        return {}
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as database:
        try:
            return dict(database.execute("SELECT actor_id, reason FROM quarantine"))
        except sqlite3.OperationalError:  # a gateway is about to create the table
            return {}


def find_ledgers(run_folder: Path) -> list[Path]:
    """Find the ledgers of the run, and of its policies, members or shards."""
    return sorted(run_folder.rglob(LEDGER_NAME))


def read_run_quarantine(run_folder: Path) -> dict[str, str]:
    """The actors in quarantine at any gateway of a run, with the reasons."""
    return {actor: reason for ledger in find_ledgers(run_folder) for actor, reason in read_quarantine(ledger).items()}


def release_actor(ledger: Path, actor_id: str) -> bool:
    """Release an actor of a run, which notices within a heartbeat. False if the actor is not in quarantine."""
    if actor_id not in read_quarantine(ledger):
        return False
    with closing(sqlite3.connect(ledger, isolation_level=None)) as database:
        return database.execute("DELETE FROM quarantine WHERE actor_id = ?", (actor_id,)).rowcount > 0


def release_in_run(run_folder: Path, actor_id: str) -> None:
    """Release an actor at all gateways of a run. Raises ConfigError where it is in quarantine at none."""
    released = [release_actor(ledger, actor_id) for ledger in find_ledgers(run_folder)]
    if not any(released):
        names = ", ".join(sorted(read_run_quarantine(run_folder))) or "none"
        raise ConfigError("actor", actor_id, f"is not in quarantine in run {run_folder.name}", f"these are: {names}")
