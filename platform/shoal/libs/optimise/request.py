"""What a search for a smaller model is to try, and the model with the Task that judges it: checked before any training.

Owns the request, its students (as the user names them, or narrower than the teacher by default) and its checks. Called
by `search`. Trains nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config import format_override
from shoal.errors import ConfigError, MissingExtra, summarize_error
from shoal.extend.data import Data, load_first_batch
from shoal.extend.models import read_source
from shoal.extend.parallel import compute_loss_and_metrics
from shoal.extend.registry import ModelFactory, ModelVersion, Registry, activate_code, find_callable, require_alias
from shoal.extend.runs import infer_direction
from shoal.extend.train import Task, TrainSpec, choose_metric, load_data, make_task, model_entry, spec_from_overrides
from shoal.libs.optimise import entry
from shoal.libs.optimise.choice import Cost, MaxDrop
from shoal.libs.optimise.distil import list_tensors
from shoal.libs.optimise.measure import count_network_flops
from shoal.libs.optimise.steps import STEPS, Model, Step, require_step
from shoal.yaml_text import parse_yaml

Say = Callable[[str], None]
_OWN_FIELDS = {
    "workers": "leave it out: a student is trained in this process",
    "init": "leave it out: a student begins with weights of its own",
    "name": "give --name",
    "task": "give --data",
    "stop.target": "leave it out, and give stop.epochs or stop.steps",
}
TASK_FACTORY = f"{model_entry.__name__}:build"
_DIVISORS = ("narrow",)  # arguments by which every width is divided
_WIDTHS = ("width", "hidden", "hidden_size", "d_model", "channels")
_STUDENT_REMEDY = "write hidden=64, file.py:Student, or file.py:Student,hidden=64"


@dataclass(frozen=True)
class OptimiseRequest:
    """What is to be tried.

    model:     NAME, NAME@VERSION or NAME@ALIAS
    data:      a Task as `shoal run` takes it, for the data, the loss and the metrics; "": the model's own
    overrides: of the training of a student, `a.b=c`, over the Task's recipe
    students:  `hidden=64` or `file.py:Student`; None: one at half the width, where that is known; (): no distillation
    steps:     each is taken on the teacher and on each student; None: those that are possible here
    metric:    that may drop; "": that of the recipe's `stop`, or the first but the loss
    batch:     the samples of the second latency
    confidence: that a chosen model has dropped by no more; 0.5: by the measured drop alone
    cost:      that is to be small
    temperature, weight: of the distillation
    name, alias: of the registered version; "" as name: the model's own
    """

    model: str
    data: str = ""
    overrides: tuple[str, ...] = ()
    students: tuple[str, ...] | None = None
    steps: tuple[Step, ...] | None = None
    max_drop: MaxDrop = field(default_factory=lambda: MaxDrop(0.01, is_relative=True))
    metric: str = ""
    batch: int = 32
    confidence: float = 0.95
    cost: Cost = "latency"
    temperature: float = 2.0
    weight: float = 0.7
    name: str = ""
    alias: str = "small"


@dataclass(frozen=True)
class Subject:
    """The teacher, with the Task that judges it.

    spec:    of a training on that Task
    example: the network's outputs of two samples
    inputs:  the network's arguments of one sample, of two, and of a batch
    """

    version: ModelVersion
    spec: TrainSpec
    task: Task
    data: Data
    model: Model
    network: nn.Module
    example: Any
    inputs: tuple[Sequence[Tensor], ...]
    metric: str
    is_higher_better: bool


def open_subject(request: OptimiseRequest) -> Subject:
    """The teacher, its Task and its metric. Raises ConfigError and DataError by the option that is wrong,
    RegistryError and WeightsError."""
    _require_plain_options(request)
    version = Registry().get(request.model)
    Registry().require_distinct_name("--name", request.name or version.name)
    factory = version.manifest.model
    if factory.format != "module":
        problem = f"is a program of the format {factory.format}, which cannot be made smaller"
        parent = version.manifest.lineage.get("parent")
        remedy = f"name its parent, {parent}" if parent else "register the module that it was exported from"
        raise ConfigError("MODEL", version.ref, problem, remedy)
    spec = _find_spec(request, version)
    task = make_task(spec.task, spec.args)
    data = load_data(task, spec.task)
    payload = entry.read_payload(version.snapshot())
    network = entry.build_network(factory, payload)
    if callable(getattr(network, "predict", None)):
        raise ConfigError("MODEL", version.ref, "answers by its method predict, which no Task measures")
    if data.validation is None:
        raise ConfigError("--data", spec.task, "has no validation data to measure on", "give Data(validation=...)")
    measured = Data(data.validation, collate=data.get_settings("validation").collate)
    batches = [load_first_batch(measured, each, is_exact=True) for each in (1, 2, request.batch)]
    inputs = tuple(task.inputs(each) for each in batches)
    expected = version.manifest.signature.inputs
    if len(inputs[0]) != len(expected) or not all(isinstance(each, Tensor) for each in inputs[0]):
        given = ", ".join(type(each).__name__ for each in inputs[0])
        problem = f"gives the network {given}; {version.ref} takes {', '.join(each.name for each in expected)}"
        raise ConfigError("--data", spec.task, problem, "give the Task that trained it, or one with its inputs")
    outputs = run_network(network, inputs[1], "--data", spec.task, version.ref)
    list_tensors(outputs)
    metric, is_higher_better = _choose_metric(request, spec, task, outputs, batches[1])
    model = Model((), factory, payload, flops=count_network_flops(network, inputs[0]))
    if request.cost == "flops" and model.flops is None:
        problem = f"cannot be counted: {version.ref} has operations whose arithmetic is unknown"
        raise ConfigError("--by", request.cost, problem, "choose latency, batch or size")
    return Subject(version, spec, task, data, model, network, outputs, inputs, metric, is_higher_better)


def choose_students(request: OptimiseRequest, subject: Subject, say: Say) -> list[Student]:
    """The students, each of which has been built and gives outputs as the teacher does. Raises ConfigError."""
    teacher = subject.model.factory
    if request.students is not None:
        students = [parse_student(each, teacher) for each in dict.fromkeys(request.students)]
    elif default := choose_default_student(teacher, subject.task):
        students = [default]
    else:
        say("no distillation: no argument of the model is known as its width; name a --student")
        students = []
    if students and not subject.task.has_loss:
        remedy = "write Task.loss, or --student none"
        raise ConfigError("--data", subject.spec.task, "has no loss for a student", remedy)
    for each in students:
        _require_student_fits(each, subject)
    return students


def choose_steps(request: OptimiseRequest, say: Say) -> list[Step]:
    """The steps that are asked for, or those whose libraries are installed. Raises MissingExtra."""
    if request.steps is not None:
        for each in request.steps:
            require_step(each)
        return list(dict.fromkeys(request.steps))
    steps = []
    for each in STEPS:
        try:
            require_step(each)
            steps.append(each)
        except MissingExtra as error:
            say(f"no {each}: {error}")
    return steps


def run_network(network: nn.Module, inputs: Sequence[Any], option: str, value: str, title: str) -> Any:
    """The outputs for the Task's inputs. Raises ConfigError for `option` where they do not fit."""
    try:
        with torch.no_grad():
            return network.eval()(*inputs)
    except Exception as error:  # user code may raise anything
        shapes = ", ".join(str(list(each.shape)) for each in inputs)
        problem = f"{title} does not take the Task's inputs {shapes}: {summarize_error(error)}"
        raise ConfigError(option, value, problem) from error


def _require_plain_options(request: OptimiseRequest) -> None:
    if request.batch < 2:
        raise ConfigError("--batch", request.batch, "is no batch", "one sample is measured anyway: give 2 or more")
    if not (math.isfinite(request.temperature) and request.temperature > 0):
        raise ConfigError("--temperature", request.temperature, "is not above 0", "leave it out, or give 4, say")
    if not 0.5 <= request.confidence < 1:
        remedy = "with 0.5 the measured drop alone decides"
        raise ConfigError("--confidence", request.confidence, "is not from 0.5 to below 1", remedy)
    if not 0 < request.weight <= 1:
        remedy = "with 1 a student learns from the teacher alone"
        raise ConfigError("--weight", request.weight, "is not above 0 and at most 1", remedy)
    require_alias(request.alias, "--alias")


def _find_spec(request: OptimiseRequest, version: ModelVersion) -> TrainSpec:
    """The recipe of the Task, with the overrides; of the model's own Task with the args that it was trained with."""
    factory = version.manifest.model
    is_own = not request.data
    if is_own and factory.factory != TASK_FACTORY:
        problem = f"is needed, since {version.ref} was not registered by a Task"
        parent = version.manifest.lineage.get("parent")
        instead = f", or name the model's parent, {parent}" if parent else ""
        raise ConfigError("--data", "", problem, f"give file.py:MyTask, as `shoal run` takes it{instead}")
    for each in request.overrides:
        if (name := each.partition("=")[0]) in _OWN_FIELDS:
            raise ConfigError(name, each.partition("=")[2], "is not for a student's training", _OWN_FIELDS[name])
    spec = spec_from_overrides([format_override("task", factory.kwargs["task"] if is_own else request.data)])
    if is_own:
        spec = spec.model_copy(update={"args": {**spec.args, **factory.kwargs["args"]}})
    return spec.override(request.overrides)


def _choose_metric(request: OptimiseRequest, spec: TrainSpec, task: Task, outputs: Any, batch: Any) -> tuple[str, bool]:
    """The metric, and whether more of it is better."""
    try:
        names = [*compute_loss_and_metrics(task, outputs, batch), *task.stateful_metrics()]
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        problem = f"does not measure the outputs of {request.model}: {summarize_error(error)}"
        raise ConfigError("--data", spec.task, problem, "give the Task that trained it") from error
    metric = choose_metric(names, spec, request.metric or None)
    direction = infer_direction(metric)
    if direction is None:
        known = ", ".join(each for each in names if infer_direction(each) is not None)
        problem = "does not tell by its name whether more is better"
        raise ConfigError("--metric", metric, problem, f"choose one that does: {known or 'rename it'}")
    return metric, direction


def _require_student_fits(student: Student, subject: Subject) -> None:
    try:
        network = entry.build_module(student.factory)
    except ConfigError as error:
        raise ConfigError("--student", student.title, error.problem, error.remedy) from error
    except Exception as error:  # user code may raise anything
        raise ConfigError("--student", student.title, f"cannot be built: {summarize_error(error)}") from error
    outputs = run_network(network, subject.inputs[1], "--student", student.title, "the student")
    own, expected = _describe_outputs(outputs), _describe_outputs(subject.example)
    if own != expected:
        raise ConfigError(
            "--student", student.title, f"gives {own}, the teacher {expected}", "give outputs of its form"
        )


def _describe_outputs(outputs: Any) -> str:
    shapes: Mapping[str, Any] = {name: getattr(each, "shape", ()) for name, each in entry.name_outputs(outputs).items()}
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


@dataclass(frozen=True)
class Student:
    """A network that is to learn from the teacher. title: of its step, as the user wrote it."""

    title: str
    factory: ModelFactory


def parse_student(text: str, teacher: ModelFactory) -> Student:
    """`hidden=64`: the teacher with other arguments; `file.py:Student`, with arguments or without: another network.

    Raises ConfigError.
    """
    first, *others = text.split(",")
    is_own = "=" not in first
    kwargs: dict[str, Any] = {}
    for argument in others if is_own else [first, *others]:
        name, separator, value = argument.partition("=")
        if not (separator and name.strip().isidentifier()):
            raise ConfigError("--student", text, f"{argument!r} is no argument NAME=VALUE", _STUDENT_REMEDY)
        kwargs[name.strip()] = parse_yaml(value)
    if not is_own:
        changed = {**teacher.kwargs, **kwargs}
        if teacher.factory == TASK_FACTORY:
            changed = {**teacher.kwargs, "args": {**teacher.kwargs["args"], **kwargs}}
        return Student(text, teacher.model_copy(update={"kwargs": changed}))
    try:
        source = read_source(first)
    except ValueError as error:
        raise ConfigError("--student", text, str(error), _STUDENT_REMEDY) from None
    own = ModelFactory(
        factory=f"{entry.__name__}:build_student",
        kwargs={"source": source.source, "reference": first, "kwargs": kwargs},
    )
    return Student(text, entry.make_factory(own.with_code(), "fp32", teacher))


def choose_default_student(teacher: ModelFactory, task: Task | None) -> Student | None:
    """The teacher at half its width; None if it has no argument for it."""
    if teacher.factory == TASK_FACTORY:
        arguments, given = inspect.signature(type(task)).parameters, teacher.kwargs["args"]
    else:
        with activate_code(teacher.code):
            arguments = inspect.signature(find_callable("model.factory", teacher.factory)).parameters
        given = teacher.kwargs
    for name, change in (*((each, 2.0) for each in _DIVISORS), *((each, 0.5) for each in _WIDTHS)):
        value = given.get(name, arguments[name].default if name in arguments else None)
        if isinstance(value, int) and not isinstance(value, bool) and value * change >= 1:
            return parse_student(f"{name}={int(value * change)}", teacher)
    return None
