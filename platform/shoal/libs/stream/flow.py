"""A stream run: from the words of a command to its record, its versions in the registry and its report.

    check ► record ► broker and sensors, if they are our own ► `StreamLoop` ► report

Called by `python -m shoal.libs.stream`, `jobs/stream.py`, tests and scripts. Nothing here needs Ray but `stream_main`
where $RAY_ADDRESS is set. Endpoints follow the alias of the registered versions.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

import shoal.runs
from shoal.config import last_override
from shoal.errors import RecordUnwritable, RegistryError
from shoal.extend.cluster import end_programs, job_main, start_program
from shoal.extend.flows import recorded_run
from shoal.extend.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.extend.runs import RunRecorder, format_number, print_line
from shoal.extend.train import ConsoleLog, RecordLog, shutdown_event
from shoal.libs.stream.loop import StreamLoop
from shoal.libs.stream.sensor_table import SilenceDetector
from shoal.libs.stream.spec import OnlineSpec, StreamSpec
from shoal.libs.stream.trainer import OnlineTrainer
from shoal.sources import StreamSource
from shoal.weights import WeightSnapshot

JOB, AUTO = "stream", "auto"
REPORT_EVERY_S = 2.0
FLEET_END_S = 10.0
MAX_SHOWN_SENSORS = 5


def stream_main(recipe: StreamSpec) -> None:
    """The main function of jobs/stream.py: a job of the cluster of $RAY_ADDRESS, or a run of this process."""

    def resume(overrides: list[str]) -> list[str]:
        if last_override(overrides, "resume") != AUTO:
            return overrides
        overrides = [each for each in overrides if not each.startswith("resume=")]
        resumed = find_resumable(recipe.override(overrides))
        return [*overrides, f"resume={resumed}"] if resumed else overrides

    job_main(recipe, run_stream, JOB, check_stream, resume, needs_cluster=False)


def find_resumable(spec: StreamSpec) -> str:
    """The newest run that learns the same sensors under the same name; "" if there is none."""

    def identify(spec: StreamSpec) -> tuple[object, ...]:
        return spec.name, spec.files, spec.mqtt.topic, spec.mqtt.value_field, spec.mqtt.sensor_field

    runs = (run for run in shoal.runs.list_runs() if run.kind is shoal.runs.RunKind.STREAM)
    return next((run.id for run in runs if identify(StreamSpec.from_record(run.spec)) == identify(spec)), "")


def check_stream(spec: StreamSpec) -> None:
    """Raises ConfigError or DataError when the broker does not answer, or no message of the spec's width comes."""
    if spec.resume or not (spec.files or spec.mqtt.broker):
        return
    make_source(spec).example()


def make_source(spec: StreamSpec, report: Callable[..., None] = lambda kind, **details: None) -> StreamSource:
    """The source that the spec names: files, or a broker's topic."""
    if spec.files:
        from shoal.libs.stream.replay_source import ReplaySource

        return ReplaySource(spec.files, spec.online.width)
    from shoal.libs.stream.mqtt import SensorSource

    return SensorSource(spec.mqtt, spec.online.width, report)


def run_stream(spec: StreamSpec, job: str = JOB) -> str:
    """Learn and answer until the spec's end, the files' end or a signal; returns the run's id.

    Raises a ShoalError on failure, which the record has too, and KeyboardInterrupt after a signal: all is committed.
    """
    check_stream(spec)
    torch.set_num_threads(1)  # batches of a few rows: a second thread costs more than it computes
    with recorded_run(spec, job, JOB) as recorder:
        with ExitStack() as stack:
            here = _start_own_broker(spec, recorder, stack)
            monitor = _Monitor(here, recorder, stack.enter_context(shutdown_event()))
            source = make_source(here, monitor.report)
            publish = getattr(source, "publish_forecasts", lambda answers: None)
            trainer = OnlineTrainer(here.online)
            report = monitor.report
            on_saved = monitor.take_saved
            loop = StreamLoop(trainer, source, recorder.folder, here.commit, publish, report, on_saved)
            # To go through all that libraries have made takes the garbage collector a tenth of a second, in which
            # nothing is answered: it passes over what exists now.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            loop.run(lambda: monitor.check(loop))
        monitor.finish(loop)
        if monitor.asked.is_set():
            raise KeyboardInterrupt
    return recorder.id


def _start_own_broker(spec: StreamSpec, recorder: RunRecorder, stack: ExitStack) -> StreamSpec:
    """Start a private broker and its sensors if the spec names neither broker nor files; returns the spec to run."""
    mqtt = spec.mqtt
    if not spec.files and not mqtt.broker:
        from shoal.libs.stream.mqtt import PrivateBroker

        broker = stack.enter_context(PrivateBroker(recorder.folder / "broker"))
        mqtt = mqtt.model_copy(update={"broker": broker.address})
        if spec.sensors:
            stack.enter_context(_run_fleet(spec, broker.address, recorder))
    client_id = mqtt.client_id or f"shoal-{recorder.id}"  # a resumed run has the same
    return spec.model_copy(update={"mqtt": mqtt.model_copy(update={"client_id": client_id})})


@contextmanager
def _run_fleet(spec: StreamSpec, broker: str, recorder: RunRecorder) -> Iterator[None]:
    """The simulated sensors, in another process that ends with this one."""
    command = [sys.executable, "-m", "shoal.libs.stream.fleet", "--broker", broker, "--topic", spec.mqtt.topic]
    command += ["--sensors", str(spec.sensors), "--rate-hz", str(spec.rate_hz)]
    fleet = start_program(command, recorder.folder / "sensors.log")
    try:
        yield
    finally:
        end_programs([fleet], FLEET_END_S)


class _Monitor:
    """Prints and records how the stream goes, registers its weights, and says when it is to end.

    asked: set by SIGTERM and Ctrl-C: the loop ends between two batches, and all that was learnt is committed
    """

    def __init__(self, spec: StreamSpec, recorder: RunRecorder, asked: threading.Event) -> None:
        self.asked = asked
        self._spec = spec
        self._recorder = recorder
        self._record = RecordLog(recorder)
        self._event_log = ConsoleLog(self._record, print_line)
        self._began_s = self._reported_s = time.monotonic()
        self._has_started, self._registered_s = False, -spec.register_every_s
        self._drifting: dict[str, None] = {}  # sensors, in the order of their drifts
        self._silence = SilenceDetector()

    def report(self, kind: str, **details: Any) -> None:
        """Record an event; print it if it is a warning. Drifts, which may be many, are one event for each line."""
        if kind == "drift":
            self._drifting.update(dict.fromkeys(details["sensors"]))
            return
        self._event_log.record_event(kind, **details)
        if kind == "recovered":
            ended = f"{details['relearnt']} batches of the log were learnt again"
            print_line(f"going on after batch {details['batch']:,}; {ended}")

    def check(self, loop: StreamLoop) -> bool:
        """Whether the run is to end. Reports when it is time."""
        spec, num_messages = self._spec, loop.trainer.totals.num_messages
        if not self._has_started:
            self._has_started = True
            origin = ", ".join(spec.files) or f"{spec.mqtt.topic} at {spec.mqtt.broker}"
            with suppress(RecordUnwritable):
                self._recorder.forget_after(num_messages)
            self.report("stream", origin=origin, answers=spec.mqtt.answers, step=num_messages)
            print_line(f"run {self._recorder.id}: learns and answers {origin}")
        if time.monotonic() - self._reported_s >= REPORT_EVERY_S:
            self._log(loop)
        is_done = spec.max_messages is not None and num_messages >= spec.max_messages
        is_late = spec.max_wall_s is not None and time.monotonic() - self._began_s >= spec.max_wall_s
        return self.asked.is_set() or is_done or is_late

    def _log(self, loop: StreamLoop) -> None:
        self._reported_s = time.monotonic()
        totals = loop.trainer.totals
        deduplicator = loop.deduplicator
        table = loop.trainer.table
        silent, back = ([], []) if self._spec.files else self._silence.update(table, self._reported_s)
        metrics = loop.statistics.take(totals) | {
            "stream/redelivered": loop.num_redelivered,
            "stream/duplicates": deduplicator.num_duplicates,
            "stream/missing": deduplicator.num_gaps,
            "stream/malformed": loop.malformed.total(),
            "stream/clock_jumps": totals.num_clock_jumps,
            "stream/drifts": totals.num_drifts,
            "stream/silent": self._silence.num_silent,
            "stream/updates": loop.trainer.num_updates,
        }
        metrics |= {f"malformed/{reason}": count for reason, count in loop.malformed.items()}
        if self._spec.files:  # a replay is of the past: it has no lag
            metrics = {name: value for name, value in metrics.items() if not name.startswith("stream/lag")}
        self._record.log(totals.num_messages, metrics)
        print_line(format_stream_line(totals.num_messages, metrics))
        drifting, self._drifting = list(self._drifting), {}
        for kind, names in (("drift", drifting), ("sensors_silent", silent), ("sensors_back", back)):
            if names:
                self._event_log.record_event(kind, count=len(names), sensors=names[:MAX_SHOWN_SENSORS])

    def take_saved(self, state: dict[str, Any]) -> None:
        """Register the weights of a durable checkpoint when it is time; from the writer's thread."""
        if time.monotonic() - self._registered_s >= self._spec.register_every_s:
            self._register(state)

    def _register(self, state: dict[str, Any]) -> None:
        """Register a trainer's state as the next version. A registry that cannot be written is reported."""
        self._registered_s = time.monotonic()
        num_batches, num_updates = state["counts"]
        totals = state["totals"]
        tensors = {name: tensor.numpy() for name, tensor in state["network"].items()}
        metrics = {"mae": totals["absolute_error"] / max(totals["num_forecasts"], 1), "updates": float(num_updates)}
        factory, signature = describe_network(self._spec.online)
        try:
            version = Registry().register(
                self._spec.name,
                WeightSnapshot.of(num_batches, tensors),
                model=factory,
                signature=signature,
                run_id=self._recorder.id,
                metrics=metrics,
                aliases=self._spec.aliases,
            )
            self._recorder.record_model(version.name, version.version, version.aliases)
        except (RegistryError, RecordUnwritable) as error:
            self.report("register_failed", error=str(error))

    def finish(self, loop: StreamLoop) -> None:
        """Record the end, and register the last weights."""
        self._log(loop)
        totals, seconds = loop.trainer.totals, time.monotonic() - self._began_s
        num_forecasts = max(totals.num_forecasts, 1)
        detail = f"{totals.num_messages:,} messages of {len(loop.trainer.table):,} sensors learnt and answered"
        self.report(
            "trained",
            reason="interrupted" if self.asked.is_set() else "ended",
            detail=detail,
            steps=totals.num_messages,
            kept=totals.num_messages,
            seconds=seconds,
            metrics={"mae": totals.absolute_error / num_forecasts, "as_now": totals.naive_error / num_forecasts},
        )
        print_line(f"run {self._recorder.id}: {detail}, {seconds:.1f} s")
        self._register(loop.trainer.state_dict())


def format_stream_line(num_messages: int, metrics: dict[str, float]) -> str:
    """Format one line for a terminal or a log file."""

    def show(name: str) -> str:
        return format_number(metrics[name]) if name in metrics else "-"

    parts = [f"{num_messages:,} messages", f"{show('stream/per_s')}/s"]
    if "stream/batch" in metrics:
        parts[1] += f" in batches of {show('stream/batch')}"
        if "stream/lag_p50_ms" in metrics:
            parts.append(f"lag {show('stream/lag_p50_ms')} ms (p99 {show('stream/lag_p99_ms')})")
        parts += [
            f"learn {show('stream/learn_p50_ms')} ms (p99 {show('stream/learn_p99_ms')})",
            f"mae {show('prequential/mae')} (as now {show('prequential/as_now')})",
        ]
    counts = ("redelivered", "duplicates", "missing", "clock_jumps", "drifts", "silent", "malformed")
    parts += [
        f"{name.replace('_', ' ')} {metrics[key]:,.0f}" for name in counts if metrics.get(key := f"stream/{name}")
    ]
    reasons = [
        f"{name.partition('/')[2]} {count:,.0f}" for name, count in metrics.items() if name.startswith("malformed/")
    ]
    return " | ".join(parts) + (f" ({', '.join(reasons)})" if reasons else "")


def describe_network(spec: OnlineSpec) -> tuple[ModelFactory, Signature]:
    """How an endpoint builds the network, and what it takes: histories `values`, oldest first, to `forecast`."""
    kwargs = {name: getattr(spec, name) for name in ("width", "hidden", "horizon", "memory")}
    shape = [-1, -1] if spec.width == 1 else [-1, -1, spec.width]
    signature = Signature(
        inputs=[TensorSignature(name="values", datatype="FP64", shape=shape)],
        outputs=[TensorSignature(name="forecast", datatype="FP64", shape=[-1])],
    )
    return ModelFactory(factory="shoal.libs.stream.network:StreamNetwork", kwargs=kwargs), signature
