"""What a replica counts of the texts of a model, for metrics and for scaling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.batching.latency_model import ForwardTime
from shoal.extend.serve import SECONDS, BatcherCounts, Histogram, LibraryMetric, ModelLoad
from shoal.libs.language.engine import Observation
from shoal.libs.language.served.prepared import TextGenerator


class TextStatistics:
    """Counts only rise. A token that is written is the unit of load; those of a prompt are computed many at a time, and
    count as the rows of the steps that could have been computed instead."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._first_s, self._between_s = Histogram(SECONDS), Histogram(SECONDS)
        self._prompt_tokens = self._new_tokens = 0
        self._load = 0.0

    def count_prompt(self, num_tokens: int, engine: TextGenerator | None) -> None:
        """Count a request that was admitted."""
        self._prompt_tokens += num_tokens
        self._load += num_tokens * self._weigh(engine.list_step_times() if engine is not None else [])

    def count_token(self, seconds: float, *, is_first: bool) -> None:
        """Count a token, `seconds` after the one before it, or after the request."""
        self._new_tokens += 1
        self._load += 1.0
        (self._first_s if is_first else self._between_s).observe(seconds)

    def _weigh(self, times: Sequence[tuple[int, float]]) -> float:
        """What a token of a prompt costs, of one that is written while all slots are taken."""
        if not times:
            return 1.0
        many, seconds = max(times)
        return min(1.0, seconds / many / (ForwardTime(times).seconds(self._slots) / self._slots))

    def measure_load(self, engines: Iterable[TextGenerator]) -> ModelLoad:
        """Written tokens as requests, steps as batches."""
        waiting, latency = 0, list[tuple[int, float]]()
        for engine in engines:
            observed, times = engine.observe(), engine.list_step_times()
            waiting += round(observed.queued_tokens * self._weigh(times)) + observed.queued
            latency = latency or times
        done = round(self._load)
        counts = BatcherCounts(submitted=done, answered=done, rows=done)
        return ModelLoad(counts, waiting, latency, self._slots)

    def list_metrics(self, observed: Iterable[Observation]) -> Mapping[str, LibraryMetric]:
        """Families of Prometheus, by name."""
        observed = list(observed)
        running = sum(each.running for each in observed)
        versions = {version for each in observed for version in each.versions}
        used = max((each.cells_used for each in observed), default=0.0)
        return {
            "shoal_text_first_token_seconds": LibraryMetric(
                "histogram", "Time to the first token of a request", self._first_s
            ),
            "shoal_text_between_tokens_seconds": LibraryMetric(
                "histogram", "Time between two tokens of an answer", self._between_s
            ),
            "shoal_text_prompt_tokens_total": LibraryMetric("counter", "Tokens of prompts", self._prompt_tokens),
            "shoal_text_new_tokens_total": LibraryMetric("counter", "Tokens written", self._new_tokens),
            "shoal_text_running_answers": LibraryMetric("gauge", "Answers that are computed now", running),
            "shoal_text_queued_answers": LibraryMetric(
                "gauge", "Answers that wait", sum(each.queued for each in observed)
            ),
            "shoal_text_cells_used_ratio": LibraryMetric("gauge", "Share of the cache that running answers use", used),
            "shoal_text_versions": LibraryMetric("gauge", "Versions that compute running answers", len(versions)),
        }
