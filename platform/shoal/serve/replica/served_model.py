"""One model of an endpoint on one replica: its queue, its versions, its counts.

Made by the model manager. Answers calls on the event loop. Its forward runs in the batcher's thread and reads the
answering version once for each batch. Knows no protocol, no source of versions and no rollout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from shoal.batching.batcher import BatcherCounts, Prediction
from shoal.errors import Closed, InferenceError, ModelError
from shoal.open_inference.messages import VersionStatistics
from shoal.registry.manifest import Signature
from shoal.serve.messages.counts import LibraryMetric, merge
from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.messages.inference import CLIENT_GONE, ServedModelProtocol, TracerProtocol, size_bytes
from shoal.serve.messages.model_errors import failed_model
from shoal.serve.messages.replica_report import ModelFailure, ModelReport, truncate_reason
from shoal.serve.model.action_sampler import ActionSampler, check_parameters
from shoal.serve.model.predictor import Predictor
from shoal.serve.replica.fallback_predictor import FallbackPredictor, is_model_error
from shoal.serve.replica.live_versions import LiveVersionSelector
from shoal.serve.replica.model_statistics import ForwardTimes, ModelStatistics
from shoal.serve.replica.shadow import ShadowTraffic
from shoal.serve.replica.version_router import (
    Answering,
    BatchGroup,
    CallBatch,
    ModelBatcher,
    Track,
    VersionTable,
    get_version,
)
from shoal.serve.scaling import ModelLoad
from shoal.serve.spec.model_options import ModelOptions

logger = logging.getLogger(__name__)

SHORT_FORWARD_S = 0.001  # a thread's wake-up, and its wait for the interpreter's lock, cost as much under load
STEP_SIZE = 32  # the size class of an engine's step over one token: above those of all batches
NO_TRACK = Track()  # of a call that was refused before it had one
TIMER_TOLERANCE_S = 0.01  # the most between the timers of one deadline: the protocol's, which cancels, and the queue's


class RequestFault(Exception):
    """A request that fails on the stable version and on the candidate; `error` is the chosen one's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class FailureLog:
    """A model's own errors on requests: logged, reported to the controller, and concealed from callers.

    The text of a model's exception may contain its code, paths or data. `last` is the newest failure, None before.

    show_errors: whether callers receive the model's text
    """

    def __init__(self, model: str, show_errors: bool) -> None:
        self._model, self._show_errors = model, show_errors
        self.last: ModelFailure | None = None

    def to_answer(self, error: Exception, version: int) -> InferenceError:
        """The error that the caller receives: a rejection as it is, a model's own error as a reference to the log."""
        if isinstance(error, InferenceError) and not isinstance(error, ModelError):
            return error
        text = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        reference = secrets.token_hex(4)
        self.last = ModelFailure(reference, version, truncate_reason(text))
        logger.error("%s: version %d failed on a request (%s)", self._model, version, reference, exc_info=error)
        if self._show_errors:
            return InferenceError(500, f"this request failed: {text}")
        return failed_model(reference)


class StreamedAnswers(Protocol):
    """What a library streams for a served model: `ServedModel.streams`. Called on the event loop."""

    @property
    def is_idle(self) -> bool:
        """Whether no answer is in progress."""
        ...

    def follow(self) -> None:
        """Other versions answer from now on."""
        ...

    def close(self, problem: str) -> None:
        """End every answer with 503, for this reason. Idempotent."""
        ...

    def measure_load(self) -> ModelLoad:
        """What an autoscaling policy needs, with a token, say, as the unit of requests and rows."""
        ...

    def list_metrics(self) -> Mapping[str, LibraryMetric]:
        """Series of the model, by the name of their family."""
        ...


class ServedModel:
    """Implements `ServedModelProtocol`. Only the model manager changes `table`; `predictor` is the newest version's.

    live: selects the versions of a model that follows a run; None for a registered one
    counts: continues those of the model that this one replaces
    """

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        batcher: ModelBatcher,
        *,
        tracer: TracerProtocol | None = None,
        show_errors: bool = False,
        counts: ModelStatistics | None = None,
    ) -> None:
        self.name = name
        self.predictor = predictor
        self._tracer = tracer
        self.batcher = batcher
        self.streams: StreamedAnswers | None = None
        self._loop = asyncio.get_running_loop()
        self.signature: Signature = predictor.signature
        self.options: ModelOptions = predictor.options
        self.plan_options: dict[str, Any] = {}  # `options` as its plan has them
        self.successor: ServedModel | None = None  # under other options: answers late calls
        self.cold: ServedModelProtocol | None = None  # it made way for others: finds who answers late calls
        self.router = VersionTable(name)
        self._failures = FailureLog(name, show_errors)
        self.forward_times = ForwardTimes()
        self.live: LiveVersionSelector | None = None
        self._queue = batcher.add_queue(
            name,
            self._forward,
            max_batch_rows=self.options.max_rows,
            max_queue_rows=self.options.max_queue_size,
            max_queue_bytes=self.options.max_queue_bytes,
            weight=self.options.weight,
            short_s=SHORT_FORWARD_S if predictor.has_even_forwards else 0.0,
            on_batch=self._count_batch,
        )
        self.counts = counts or ModelStatistics(name)
        outputs = {spec.name: spec.datatype for spec in self.signature.outputs}
        self.shadow = ShadowTraffic(name, batcher, self._forward, self.options, self.counts, outputs, self._record_time)

    @property
    def version(self) -> int:
        return self.router.version

    @property
    def versions(self) -> list[int]:
        return self.router.versions

    async def infer(self, call: InferCall) -> Prediction[Outputs]:
        arrived_s = time.monotonic()
        layout = self.predictor.layout
        asked = call
        if not layout.is_first:
            call = msgspec.structs.replace(call, inputs=layout.to_batch_first(dict(call.inputs), call.num_rows))
        deadline_s = call.deadline_s
        track = NO_TRACK
        try:
            check_parameters(call, self.predictor.sampler)
            track = self.router.choose_track(call.version, call.track, call.sticky)
            assert track.loaded is not None
            if (limits := track.loaded.size_limits) is not None:
                limits.check(call.inputs)
            if call.trace is not None:
                call.trace.submitted_ns = time.time_ns()
            prediction = await self._queue.submit(
                call,
                call.num_rows,
                group=BatchGroup(track, self.predictor.compute_bucket(call.inputs)),
                deadline_s=deadline_s,
                tenant=call.tenant,
                size_bytes=size_bytes(asked.inputs),
            )
        except Closed:
            if (successor := self._find_successor()) is not None:
                return await successor.infer(asked)
            raise InferenceError(503, f"model {self.name!r} is closing; try again later", retry_after_s=1.0) from None
        except RequestFault as fault:
            self._count_failure(track, 500, arrived_s)
            self.counts.excuse_failure(get_version(track.loaded))
            raise self.describe_failure(fault.error, get_version(track.loaded)) from None
        except Exception as error:  # noqa: BLE001 - any error of the model's: its caller receives a reference
            self._count_failure(track, error.status if isinstance(error, InferenceError) else 500, arrived_s)
            raise self.describe_failure(error, get_version(track.loaded)) from None
        except asyncio.CancelledError:
            is_late = deadline_s is not None and time.monotonic() > deadline_s - TIMER_TOLERANCE_S
            status = 504 if is_late else CLIENT_GONE
            self._count_failure(track, status, arrived_s)
            if call.trace is not None:
                call.trace.cancelled_status = status
            raise
        seconds, (outputs, version, queued_s, computed_s, rows) = time.monotonic() - arrived_s, prediction
        self.counts.count_request(version, 200, seconds, queued_s, computed_s, call.num_rows)
        if self.shadow.percent and self.router.is_stable(track):
            self.shadow.sample_call(call, outputs, self.predictor.compute_bucket(call.inputs))
        if layout.is_first and call.outputs is None:
            return prediction
        if call.outputs is not None:
            outputs = {name: array for name, array in outputs.items() if name in call.outputs}
        return Prediction(layout.to_model_shapes(outputs), version, queued_s, computed_s, rows)

    def _find_successor(self) -> ServedModelProtocol | None:
        """The model that answers late calls, unless their batch is in another dimension."""
        successor = self.successor
        if successor is not None and successor.predictor.layout.dimensions != self.predictor.layout.dimensions:
            return None
        return successor or self.cold

    def statistics(self) -> list[VersionStatistics]:
        return self.counts.list_statistics(self.versions)

    def batcher_counts(self) -> BatcherCounts:
        return self._queue.counts()

    @property
    def is_idle(self) -> bool:
        counts = self._queue.counts()
        ended = counts.answered + counts.failed + counts.cancelled + counts.expired + counts.evicted
        return counts.submitted == ended and (self.streams is None or self.streams.is_idle)

    def report(self) -> ModelReport:
        """The model's part of the report to the controller."""
        table, versions = self.router, self.versions
        report = ModelReport(table.version, table.candidate_version, tuple(versions))
        rows = [2**power for power in range(self.options.max_rows.bit_length())]
        latency, counts = self._queue.latency, self.counts.snapshot()
        if self.streams is not None:
            counts.others = merge([self.streams.list_metrics()])
        return replace(
            report if self.live is None else self.live.report(),
            counts=counts,
            forwards=self.forward_times.retain_medians(versions),
            queued_rows=self._queue.queued_rows,
            failure=self._failures.last,
            latency=tuple((each, seconds) for each in rows if (seconds := latency.seconds(each)) > 0.0),
        )

    def measure_load(self) -> ModelLoad:
        queue = self._queue
        return ModelLoad(queue.counts(), queue.queued_requests, queue.latency.list_points(), self.options.max_rows)

    def close(self) -> None:
        """Fail queued requests with 503. Idempotent."""
        self.close_streams("is closing; try again later")
        self.shadow.close()
        self._queue.close()

    def close_streams(self, problem: str) -> None:
        """End every streamed answer with 503: the model, and this problem."""
        if self.streams is not None:
            self.streams.close(f"model {self.name!r} {problem}")

    def apply(self, plan: ModelPlan) -> None:
        """Let the planned versions answer, as far as they are loaded, and drop all others."""
        loaded = {version: each for version, each in self.router.loaded.items() if version in plan.staged}
        self.point(Answering(loaded.get(plan.stable), loaded.get(plan.candidate), plan.shares, tuple(loaded.values())))

    def point(self, answering: Answering) -> None:
        """Let these versions answer from the next batch on. Callable from any thread."""
        if not self.version:
            self._queue.seed_latency_model(self.predictor.warm_up_times)
        table = self.router
        table.point(answering)
        self.counts.pending = lambda: self._queue.queued_requests
        self.shadow.set_candidate(table.candidate, answering.shares.shadow_percent)
        self.counts.set_serving(table.version, table.candidate_version, table.percent)
        if self.streams is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.streams.follow)

    def record_step(self, version: int, num_tokens: int, seconds: float) -> None:
        """Record a step of a streamed answer's engine, which a canary is compared by. Callable from any thread."""
        if self.live is None:
            self.forward_times.add(version, num_tokens << STEP_SIZE, seconds)

    def describe_failure(self, error: Exception, version: int) -> InferenceError:
        """What the caller receives for an error of a version: its text, or a reference to the log."""
        return self._failures.to_answer(error, version)

    def _count_failure(self, track: Track, status: int, arrived_s: float) -> None:
        """Count a failure: a 5xx of the model's making counts against the version, a request refused before a forward
        against none."""
        version = get_version(track.loaded) if status == 500 else 0
        self.counts.count_request(version, status, time.monotonic() - arrived_s)

    # What follows runs in a forward's thread, or for short batches on the event loop.

    def _forward(self, batch: CallBatch) -> Sequence[Outputs]:
        loaded = batch.requests[0].group.track.loaded
        assert loaded is not None  # a track has a version before a call gets it, and never loses it
        batch.version, requests = loaded.version, [entry.request.inputs for entry in batch.requests]
        if (limits := loaded.size_limits) is not None:  # another version may have been checked: the one of then
            for request in requests:
                limits.check(request)
        if isinstance(loaded, FallbackPredictor):
            outputs, batch.version, batch.is_alone = loaded.predict(requests, self.counts.count_columns)
            return _act(self.predictor.sampler, batch, outputs)
        try:
            return _act(loaded.sampler, batch, loaded.predict_batch(requests, self.counts.count_columns))
        except Exception as error:
            other = self.router.counterparts.get(loaded.version)
            if other is not None and len(requests) == 1 and is_model_error(error):
                try:
                    other.predict_batch(requests)
                except Exception as same:  # noqa: BLE001 - only whether it fails counts
                    if is_model_error(same):
                        raise RequestFault(error) from error
            raise

    def _count_batch(self, batch: CallBatch) -> None:
        self.counts.count_batch(batch)
        if self._tracer is not None:
            self._tracer.record_batch(self.name, batch)
        self._record_time(batch)

    def _record_time(self, batch: CallBatch) -> None:
        if not batch.failed and batch.is_alone:
            self.forward_times.add(batch.version, batch.rows, batch.computed_s)


def _act(sampler: ActionSampler | None, batch: CallBatch, outputs: Sequence[Outputs]) -> Sequence[Outputs]:
    if sampler is None:
        return outputs
    return [sampler.act(each, entry.request) for each, entry in zip(outputs, batch.requests, strict=True)]
