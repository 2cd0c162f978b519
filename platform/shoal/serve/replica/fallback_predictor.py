"""A version on trial, with the previous version as fallback.

If the newer version fails on a batch, the older one computes it. If that fails too, the request is at fault and nothing
changes. Otherwise the older version's answers are returned, and the guard judges the newer version. If the newer
version seems slow, both compute the next batches. Made by `live.versions`, called by forward threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import InferenceError
from shoal.serve.controller.canary_guard import NUM_COMPARED, Evidence, judge, latency_ratio
from shoal.serve.messages.infer_call import Arrays, Outputs
from shoal.serve.model.column_drift import CountColumns
from shoal.serve.model.formats.template import InputLimits
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.model_statistics import ForwardTimes
from shoal.serve.spec.model_options import GuardOptions


class Answered(NamedTuple):
    """The outputs of each request of a batch, and the version that computed them.

    is_alone: no other version has computed the batch, so its time is this version's
    """

    outputs: list[Outputs]
    version: int
    is_alone: bool


class FallbackPredictor:
    """The newer version `now`, and the one `before` it; None without a fallback.

    forwards: the versions' forward times
    reject:   called in a forward's thread, without a lock, with the reason to reject `now`; maybe more than once
    """

    def __init__(
        self,
        now: LoadedModel,
        before: LoadedModel | None,
        guard: GuardOptions,
        forwards: ForwardTimes,
        reject: Callable[[FallbackPredictor, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.now, self.before = now, before
        self._guard = guard
        self._forwards = forwards
        self._reject = reject
        self._clock = clock
        self._lock = threading.Lock()
        self._requests, self._num_fallbacks = 0, 0
        self._next_check = guard.min_requests  # the number of requests at which its speed is checked next
        self.is_suspect = False  # it seems slow: both compute the next batches
        self._num_compared = 0
        self._ratios: list[float] = []

    @property
    def version(self) -> int:
        return self.now.version

    @property
    def size_limits(self) -> InputLimits | None:
        return self.now.size_limits

    @property
    def is_proven(self) -> bool:
        """Whether `now` has answered a request; without a version before it, it is the first one or has returned."""
        return self.before is None or self._requests > self._num_fallbacks

    def predict(self, requests: Sequence[Arrays], count_columns: CountColumns | None = None) -> Answered:
        """Compute a batch. Raises the error of `now` when `before` fails too. count_columns: see `LoadedModel`"""
        before = self.before
        if before is None:
            return Answered(self.now.predict_batch(requests, count_columns), self.version, True)
        if self.is_suspect:
            return self._compare(before, requests, count_columns)
        try:
            outputs = self.now.predict_batch(requests, count_columns)
        except Exception as error:  # noqa: BLE001 - on any error the version before may succeed
            return self._fall_back(before, requests, error)
        with self._lock:
            self._requests += len(requests)
            if self._requests >= self._next_check:
                self._next_check *= 2
                ratio = latency_ratio(
                    self._forwards.get_medians(before.version), self._forwards.get_medians(self.version)
                )
                self.is_suspect = ratio is not None and ratio > self._guard.max_latency_ratio
        return Answered(outputs, self.version, True)

    def _fall_back(self, before: LoadedModel, requests: Sequence[Arrays], error: Exception) -> Answered:
        if not is_model_error(error):
            raise error
        try:
            outputs = before.predict_batch(requests)
        except Exception:  # noqa: BLE001 - both fail: the request is at fault
            raise error from None
        with self._lock:
            self._requests += len(requests)
            self._num_fallbacks += len(requests)
            reason = self._judge()
        if reason:
            self._reject(self, f"{reason} ({type(error).__name__}: {error})")
        return Answered(outputs, before.version, False)

    def _compare(self, before: LoadedModel, requests: Sequence[Arrays], count: CountColumns | None) -> Answered:
        """Compute a batch with both, under the same load of the machine."""
        is_first = self._num_compared % 2 == 0  # the second reads from a warm cache
        before_s = self._time(before, requests) if is_first else None
        started_s = self._clock()
        try:
            outputs = self.now.predict_batch(requests, count)
        except Exception as error:  # noqa: BLE001 - as in `predict`
            return self._fall_back(before, requests, error)
        now_s = self._clock() - started_s
        before_s = before_s if is_first else self._time(before, requests)
        reason = ""
        with self._lock:
            self._requests += len(requests)
            self._num_compared += 1
            if before_s:
                self._ratios.append(now_s / before_s)
            if self._num_compared == NUM_COMPARED:
                reason = self._judge()
                self.is_suspect = False
                self._num_compared = 0
                self._ratios = []
        if reason:
            self._reject(self, reason)
        return Answered(outputs, self.version, False)

    def _time(self, version: LoadedModel, requests: Sequence[Arrays]) -> float | None:
        started_s = self._clock()
        try:
            version.predict_batch(requests)
        except Exception:  # noqa: BLE001 - there is nothing to compare with
            return None
        return self._clock() - started_s

    def _judge(self) -> str:
        return judge(self._guard, Evidence(self._requests, fallbacks=self._num_fallbacks, ratios=self._ratios))


def is_model_error(error: Exception) -> bool:
    """Whether a forward's error is the model's, and no rejection of the request."""
    return not isinstance(error, InferenceError) or error.status == 500
