"""Which requests are refused at the door: a bounded queue, and deadlines that learnt times of steps rule out."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from shoal.batching.latency_model import LatencyModel
from shoal.errors import InferenceError
from shoal.libs.language.engine.request import TextRequest

_SMOOTHING = 0.1  # of the share of `max_tokens` that answers use


class QueueAdmission:
    """Counts what is queued. Called by any thread: `admit`; by the one that steps: the rest.

    | queue | capacity | beyond it | who empties it |
    |---|---|---|---|
    | answers | `max_queued`, and `max_queued_tokens` of their prompts | 429, none blocks | a step, into free slots |

    Until a step was observed, every deadline is assumed to be met.
    """

    def __init__(self, max_queued: int, max_queued_tokens: int, slots: int, chunk: int) -> None:
        self._max = max_queued, max_queued_tokens
        self._slots, self._chunk = slots, chunk
        self._lock = threading.Lock()
        self._times = LatencyModel()
        self._used_share = 0.0
        self._remaining: Sequence[int] = ()  # tokens that each running answer may still take, ascending
        self.queued, self.queued_tokens = 0, 0

    def admit(self, request: TextRequest, max_tokens: int) -> None:
        """Count a request to the queue. Raises InferenceError: 429 for a full queue, 504 for a hopeless deadline."""
        tokens = len(request.prompt) + len(request.given)
        with self._lock:
            queued, queued_tokens = self.queued + request.num_answers, self.queued_tokens + tokens
            if self.queued and (queued > self._max[0] or queued_tokens > self._max[1]):
                wait_s = self._estimate_begin_s(self.queued_tokens, self.queued)
                message = (
                    f"{self.queued} answers and {self.queued_tokens} tokens are queued, the limits are {self._max}"
                )
                raise InferenceError(429, message, retry_after_s=max(wait_s, 0.1))
            begin_s = self._estimate_begin_s(queued_tokens, queued)
            end_s = begin_s + (max_tokens - len(request.given)) * self._used_share * self.step_s(self._slots)
            for name, limit_s, expected_s in (("begin_s", request.begin_s, begin_s), ("end_s", request.end_s, end_s)):
                if limit_s is not None and expected_s > limit_s:
                    raise InferenceError(504, f"{name} = {limit_s:g}: expected after {expected_s:.3g} s")
            self.queued, self.queued_tokens = queued, queued_tokens

    def leave(self, num_answers: int, num_tokens: int) -> None:
        """Answers and tokens of prompts are no longer queued; negative numbers: they are again."""
        with self._lock:
            self.queued -= num_answers
            self.queued_tokens -= num_tokens

    def observe_step(self, num_tokens: int, seconds: float, now_s: float, remaining: Sequence[int]) -> None:
        """A step over so many tokens took `seconds`; these tokens are what running answers may still take."""
        with self._lock:
            self._times.observe(num_tokens, seconds, now_s)
            self._remaining = sorted(remaining)

    def observe_end(self, share: float) -> None:
        """An answer ended by itself, after this share of its `max_tokens`."""
        self._used_share += _SMOOTHING * (share - self._used_share)

    def step_s(self, num_tokens: int) -> float:
        """Seconds that a step over so many tokens should take at most."""
        return self._times.seconds(num_tokens)

    def list_step_times(self) -> list[tuple[int, float]]:
        """(tokens, seconds) of the steps that were observed."""
        with self._lock:
            return self._times.list_points()

    def _estimate_begin_s(self, queued_tokens: int, queued: int) -> float:
        steps = float(math.ceil(queued_tokens / self._chunk))
        behind = queued - (self._slots - len(self._remaining))  # answers that must end before the last of these begins
        if behind > 0 and self._remaining:
            rounds, rest = divmod(behind - 1, len(self._remaining))
            steps += (rounds * self._remaining[-1] + self._remaining[rest]) * self._used_share
        return steps * self.step_s(self._slots + self._chunk)
