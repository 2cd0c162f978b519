"""What a learner checks of a batch: the log-probabilities of its actors, and that its loss is finite.

Called by the learner. Pure but for the clock, which callers pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shoal.rl.algorithms.algorithm import NonFiniteLoss
from shoal.rl.experience.quarantine import compute_evidence
from shoal.rl.experience.queue import ExperienceBatch
from shoal.wire import DropReason

CHECK_INTERVAL_S = 0.1  # between two checks, at least: one takes a millisecond
CHECKED_STEPS = 256  # of a batch, to within one segment, whose log-probabilities are checked
# The run fails after so many batches in a row without a usable segment, and so many seconds: in a slow game, the
# batches between two segments of good actors may all be of one actor that sends bad data.
MAX_BAD_BATCHES, MAX_BAD_S = 3, 30.0


class EvidenceCheck:
    """Scores the evidence against actors whose log-probabilities are impossible, from a sample of each batch.

    compute_log_ratios: log π(a|x) - log μ(a|x) of each step [N] of a batch
    """

    def __init__(self, compute_log_ratios: Callable[[ExperienceBatch], np.ndarray], seed: int) -> None:
        self._compute_log_ratios = compute_log_ratios
        self._random, self._checked_at = np.random.default_rng(seed % 2**64), -math.inf

    def score(self, batch: ExperienceBatch, now: float) -> list[float]:
        """The evidence against the actor of each segment; 0 for those outside the sample. [S]

        Empty where the last check was just now.
        """
        if now < self._checked_at + CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        evidence = np.zeros(len(batch.lengths))
        order = self._random.permutation(len(evidence))
        chosen = np.zeros(len(evidence), np.bool_)
        chosen[order[: 1 + np.searchsorted(np.cumsum(batch.lengths[order]), CHECKED_STEPS)]] = True
        sample = batch.select(chosen)
        log_ratios = self._compute_log_ratios(sample)
        if np.isfinite(log_ratios).all():
            evidence[chosen] = compute_evidence(log_ratios, sample.log_probabilities, sample.lengths)
        scores: list[float] = evidence.tolist()
        return scores


class BadBatchPolicy:
    """Drops old segments, and those that spoil a batch's loss; ends a run that finds nothing else.

    update:    learn from a batch; False when not one step was taken, since its loss was not finite
    is_usable: whether one segment by itself has a finite loss
    """

    def __init__(
        self,
        max_version_lag: int,
        update: Callable[[ExperienceBatch], bool],
        is_usable: Callable[[ExperienceBatch], bool],
    ) -> None:
        self._max_version_lag = max_version_lag
        self._update = update
        self._is_usable = is_usable
        self._num_bad, self._bad_since = 0, 0.0  # batches in a row

    def learn(self, batch: ExperienceBatch, lags: np.ndarray, now: float) -> list[DropReason | None]:
        """The outcome of each segment: learnt from (None), or the drop reason. [S]

        lags: of the oldest version of each segment [S]

        When the batch's loss is not finite, segments whose own loss is not finite are dropped: one actor's bad data.
        """
        stale = lags > self._max_version_lag
        learnt = ~stale
        if learnt.any() and not self._update(batch.select(learnt) if stale.any() else batch):
            learnt &= [self._is_usable(batch.select(one)) for one in np.eye(len(learnt), dtype=bool)]
            if not learnt.any() or not self._update(batch.select(learnt)):
                learnt[:] = False
                self._bad_since = self._bad_since if self._num_bad else now
                self._num_bad += 1
        if learnt.any():
            self._num_bad = 0
        return [
            None if is_learnt else DropReason.STALE_CONSUMPTION if is_old else DropReason.NON_FINITE
            for is_learnt, is_old in zip(learnt, stale, strict=True)
        ]

    def require_progress(self, now: float) -> None:
        """Raise NonFiniteLoss when too many batches in a row, for too long, had no usable segment."""
        if self._num_bad >= MAX_BAD_BATCHES and now - self._bad_since >= MAX_BAD_S:
            raise NonFiniteLoss(
                f"the loss of {self._num_bad} batches in a row was not finite, each segment of them by itself;"
                " lower algorithm.learning_rate or check the rewards"
            )
