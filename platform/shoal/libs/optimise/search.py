"""The search for a smaller model: distil, convert, measure everything after its last step, choose, register.

Owns the order of events. Called by `shoal optimise` and in Python:

    found = optimise(OptimiseRequest("fashion", max_drop=MaxDrop.parse("1%"), students=("narrow=2",)))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from shoal.errors import ConfigError, InferenceError, WeightsError, summarize_error
from shoal.extend.data import fingerprint
from shoal.extend.registry import ModelVersion, Registry
from shoal.extend.train import TrainSpec, fit_locally, validate_run
from shoal.libs.optimise import distil, measure
from shoal.libs.optimise.choice import Measurement, RowTotals, Verdict, choose, judge, judge_value
from shoal.libs.optimise.entry import build_network, read_payload
from shoal.libs.optimise.request import (
    OptimiseRequest,
    Say,
    Student,
    Subject,
    choose_steps,
    choose_students,
    open_subject,
)
from shoal.libs.optimise.steps import Model, Step, convert_model
from shoal.weights import WeightSnapshot
from shoal.weights.tensor_files import make_weight_file

JOB = "optimise"
_TASK = f"{distil.__name__}:Distillation"


@dataclass(frozen=True)
class Outcome:
    """All that were measured, the teacher first; and those that could not be, with the reason.

    limit:      the worst value of the metric that was allowed
    verdicts:   of each that was measured, whether it is within the limit
    chosen:     the index of the best; 0: the teacher
    registered: None when the teacher stays
    """

    teacher: ModelVersion
    metric: str
    is_higher_better: bool
    limit: float
    models: tuple[Model, ...]
    measured: tuple[Measurement, ...]
    verdicts: tuple[Verdict, ...]
    rejected: tuple[tuple[str, str], ...]
    chosen: int
    registered: ModelVersion | None = None


def optimise(request: OptimiseRequest, say: Say = lambda line: None) -> Outcome:
    """Try, measure, choose, and register the choice. Raises ShoalError; for a bad request before anything is trained.

    say: receives lines about progress

    An interrupted distillation raises KeyboardInterrupt; nothing is registered.
    """
    subject = open_subject(request)
    steps = choose_steps(request, say)
    stop = {"target": None}  # which the teacher may have met with less
    plain = subject.spec.update({"workers": 1, "init": "", "name": subject.version.name, "stop": stop})
    trained: list[tuple[Student, TrainSpec]] = []
    for student in choose_students(request, subject, say):
        args = {
            "task": subject.spec.task,
            "args": subject.spec.args,
            "teacher": subject.version.ref,
            "student": student.factory.model_dump(include={"factory", "kwargs", "code"}),
            "temperature": request.temperature,
            "weight": request.weight,
        }
        trained.append((student, plain.model_copy(update={"task": _TASK, "args": args})))
    for _, spec in trained:
        if spec.resume and len(trained) > 1:
            raise ConfigError("resume", spec.resume, "is one student's run", "name that --student alone")
        validate_run(spec)
    origins = [subject.model, *(_distil(student, spec, subject, say) for student, spec in trained)]
    models, rejected = list(origins), []
    for origin in origins:
        for step in steps:
            try:
                models.append(_take_step(origin, step, subject))
            except (ConfigError, WeightsError, InferenceError) as error:
                problem = error.problem if isinstance(error, ConfigError) else str(error)
                rejected.append((", ".join((*origin.steps, step)), problem))
    say(f"measuring {len(models)} models")
    measured, rows = _measure(models, subject, request.batch)
    teacher = measured[0].metrics[subject.metric]
    if math.isnan(teacher):
        raise ConfigError("--metric", subject.metric, f"of {subject.version.ref} is not a number", "choose another")
    limit = request.max_drop.compute_limit(teacher, subject.is_higher_better)
    verdicts = _judge(measured, rows, subject, limit, request.confidence)
    outcome = Outcome(
        teacher=subject.version,
        metric=subject.metric,
        is_higher_better=subject.is_higher_better,
        limit=limit,
        models=tuple(models),
        measured=tuple(measured),
        verdicts=verdicts,
        rejected=tuple(rejected),
        chosen=choose(measured, [each.status == "within" for each in verdicts], request.cost),
    )
    return replace(outcome, registered=_register(request, subject, outcome)) if outcome.chosen else outcome


def _distil(student: Student, spec: TrainSpec, subject: Subject, say: Say) -> Model:
    say(f"distilling {student.title}")
    outcome = fit_locally(spec, JOB, registers=False, renews=False, say=say)
    if outcome.weights is None:
        raise KeyboardInterrupt
    payload = read_payload(make_weight_file(1, outcome.weights))
    flops = measure.count_network_flops(build_network(student.factory, payload), subject.inputs[0])
    return Model((f"distil {student.title}",), student.factory, payload, outcome.run_id, flops)


def _take_step(origin: Model, step: Step, subject: Subject) -> Model:
    """The model after the step. Raises ConfigError also when it does not compute batches of every size."""
    signature = subject.version.manifest.signature
    model = convert_model(origin, step, subject.model.factory, signature, subject.inputs[1])
    forward = measure.open_forward(model, signature)
    for inputs in subject.inputs:
        num_samples = len(inputs[0])
        try:
            outputs = forward(measure.name_inputs(inputs, signature))
        except Exception as error:  # onnxruntime's errors have no common base
            problem = f"cannot compute {num_samples} samples: {summarize_error(error)}"
            raise ConfigError("--try", step, problem) from error
        if any(len(each) != num_samples for each in outputs.values()):
            raise ConfigError("--try", step, f"gives outputs of another number of samples for {num_samples}")
    return model


def _judge(
    measured: Sequence[Measurement], rows: Sequence[RowTotals | None], subject: Subject, limit: float, confidence: float
) -> tuple[Verdict, ...]:
    """Each beside the teacher: by its rows, or by the metric alone where that is no mean over rows."""
    values, sign = [each.metrics[subject.metric] for each in measured], 1.0 if subject.is_higher_better else -1.0
    allowed, teacher = sign * (values[0] - limit), rows[0]
    return tuple(
        judge_value(sign * (values[0] - value), allowed)
        if teacher is None or own is None
        else judge(teacher, own, subject.is_higher_better, allowed, confidence)
        for value, own in zip(values, rows, strict=True)
    )


def _measure(models: Sequence[Model], subject: Subject, batch: int) -> tuple[list[Measurement], list[RowTotals | None]]:
    signature = subject.version.manifest.signature
    forwards = [measure.open_forward(each, signature) for each in models]
    one, _, many = (measure.name_inputs(each, signature) for each in subject.inputs)
    latencies = [measure.measure_latencies(forwards, each) for each in (one, many)]
    measurements, rows = [], []
    for model, forward, latency_s, batch_latency_s in zip(models, forwards, *latencies, strict=True):
        network = measure.ServedNetwork(forward, signature, subject.example)
        metrics, by_row = measure.score_network(network, subject.task, subject.data, batch, subject.metric)
        rows.append(by_row)
        measurements.append(Measurement(metrics, latency_s, batch_latency_s, len(model.payload), model.flops))
    return measurements, rows


def _register(request: OptimiseRequest, subject: Subject, outcome: Outcome) -> ModelVersion:
    model, data = outcome.models[outcome.chosen], subject.data
    lineage = {
        "parent": subject.version.ref,
        "steps": model.title,
        "verdict": asdict(outcome.verdicts[outcome.chosen]),
        "measured": _list_numbers(outcome.measured[outcome.chosen], outcome.metric),
        "parent_measured": _list_numbers(outcome.measured[0], outcome.metric),
    }
    parts = {"train": data.train, "validation": data.validation}
    return Registry().register(
        request.name or subject.version.name,
        WeightSnapshot.from_payload(1, model.payload),
        model=model.factory,
        signature=subject.version.manifest.signature,
        run_id=model.run_id,
        metrics=outcome.measured[outcome.chosen].metrics,
        data={name: f"{type(each).__name__} {fingerprint(each)}" for name, each in parts.items() if each is not None},
        lineage=lineage,
        files={each: subject.version.fetch_file(each).read_bytes() for each in subject.version.manifest.files},
        aliases=(request.alias,),
    )


def _list_numbers(measured: Measurement, metric: str) -> dict[str, float | None]:
    return {
        metric: measured.metrics[metric],
        "latency_s": measured.latency_s,
        "batch_latency_s": measured.batch_latency_s,
        "size_bytes": measured.size_bytes,
        "flops": measured.flops,
    }
