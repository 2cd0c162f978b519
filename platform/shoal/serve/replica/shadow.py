"""Shadow traffic: the candidate also computes a share of the stable version's calls, and the answers are compared.

Owned by a served model. The client has its answer before the shadow begins. Shadowed calls wait in their own queue,
with the smallest share of the slots, and are dropped when it is full. A client's call waits for at most one forward of
the candidate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import Closed, InferenceError
from shoal.open_inference.datatypes import bf16_values
from shoal.serve.messages.infer_call import Arrays, InferCall, Outputs
from shoal.serve.messages.inference import size_bytes
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.fallback_predictor import FallbackPredictor
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.version_router import BatchGroup, CallBatch, ModelBatcher, Track, WeightedDraw
from shoal.serve.spec.model_options import ModelOptions

SHADOW_WEIGHT = 1e-6  # share of the slots; a model's is 1
MAX_PENDING_CALLS = 256  # calls of any number of rows
NOT_COMPUTED = (429, 503, 504)  # statuses of calls refused before a forward: no evidence about the version


class ShadowTraffic:
    """The shadow of one model. It takes `percent` of the calls; 0 without a version to compare with.

    datatypes: of the outputs, by name
    on_batch:  called after every forward, in its thread
    """

    def __init__(
        self,
        model: str,
        batcher: ModelBatcher,
        forward: Callable[[CallBatch], Sequence[Outputs]],
        options: ModelOptions,
        counts: ModelStatistics,
        datatypes: Mapping[str, str],
        on_batch: Callable[[CallBatch], None],
    ) -> None:
        self.percent = 0.0
        self.candidate: Track | None = None
        self._tolerance = options.guard.tolerance
        self._counts = counts
        self._datatypes = datatypes
        self._draws = WeightedDraw()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = batcher.add_queue(
            f"{model}/shadow",
            forward,
            max_batch_rows=options.max_rows,
            max_queue_rows=options.max_queue_size,
            max_queue_bytes=options.max_queue_bytes,
            weight=SHADOW_WEIGHT,
            on_batch=on_batch,
        )

    def set_candidate(self, candidate: Track | None, percent: float) -> None:
        """Set the version to compare with, and the share of calls."""
        self.candidate, self.percent = candidate, percent if candidate is not None else 0.0

    def sample_call(self, call: InferCall, outputs: Arrays, bucket: Hashable) -> None:
        """Shadow, by chance, a call that the stable version answered with `outputs`."""
        if self.draw() and self.candidate is not None:
            self.start(self._compare(call, outputs, BatchGroup(self.candidate, bucket)))

    def draw(self) -> bool:
        """Whether the candidate is to compute the present call too."""
        is_open = self.candidate is not None and len(self._tasks) < MAX_PENDING_CALLS
        return is_open and self._draws.draw(self.percent)

    def start(self, comparison: Coroutine[Any, Any, None]) -> None:
        """Run a comparison, until `close`."""
        task = asyncio.get_running_loop().create_task(comparison)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Drop waiting calls. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._queue.close()

    async def _compare(self, call: InferCall, expected: Arrays, group: BatchGroup) -> None:
        loaded = group.track.loaded
        assert loaded is not None
        try:
            if loaded.size_limits is not None:
                loaded.size_limits.check(call.inputs)
            answer = await self._queue.submit(call, call.num_rows, group=group, size_bytes=size_bytes(call.inputs))
        except Closed:
            return
        except InferenceError as error:
            self.count_failure(group.track, loaded, error.status)
            return
        except Exception:  # noqa: BLE001 - on any error a client would have had no answer
            self.count_failure(group.track, loaded, 500)
            return
        if answer.version == loaded.version:
            is_equal = outputs_agree(expected, answer.outputs, self._datatypes, self._tolerance)
            self.count(group.track, loaded, agrees=is_equal)

    def count(self, candidate: Track, loaded: LoadedModel | FallbackPredictor, *, agrees: bool) -> None:
        """Count an answer of the candidate, if it still is the candidate."""
        if candidate is self.candidate:
            self._counts.count_shadow(loaded.version, disagreed=not agrees)

    def count_failure(self, candidate: Track, loaded: LoadedModel | FallbackPredictor, status: int) -> None:
        """Count a failure. Since the stable version answered, a refused input (4xx) counts as another answer, not as a
        failure."""
        if candidate is not self.candidate or candidate.loaded is not loaded or status in NOT_COMPUTED:
            return  # another candidate or stable version is compared by now
        if status < 500:
            self._counts.count_shadow(loaded.version, disagreed=True)
        else:
            self._counts.count_shadow_failure(loaded.version)


def outputs_agree(expected: Arrays, outputs: Arrays, datatypes: Mapping[str, str], tolerance: float) -> bool:
    """Whether all outputs are equal: numbers to within `tolerance`, relative or absolute, all else exactly."""
    if expected.keys() != outputs.keys():
        return False
    for name, array in expected.items():
        other = outputs[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            return False
        if datatypes[name] == "BF16":
            array, other = bf16_values(array), bf16_values(other)
        if array.dtype.kind == "f":
            if not np.allclose(array, other, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        elif not np.array_equal(array, other):
            return False
    return True
