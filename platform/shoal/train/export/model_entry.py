"""A trained network's entry in the registry: everything needed to build it again, and building it.

Owns the entry (factory, signature, source of the Task). Called at the end of a run. `build` is called by name when a
registered model is loaded, and needs no file of the user's: the source is part of the entry.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from shoal.errors import ConfigError
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.runs import RunRecorder
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import Hook, Task, find_task, get_source, make_task
from shoal.weights import WeightSnapshot


def make_model_name(spec: TrainSpec) -> str:
    """The model's name in the registry: the spec's, or derived from the task's."""
    place, _, name = spec.task.partition(":")
    file = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    chosen = spec.name or name or file
    return re.sub(r"[^a-z0-9._-]", "-", chosen.lower()).strip("._-") or "model"


def make_factory(spec: TrainSpec) -> ModelFactory:
    """How to build the network: with the source of a Task in a file, or by its module's name.

    The source is the one that this process has loaded, even if the file has changed.
    """
    source = get_source(spec.task)
    kwargs: dict[str, Any] = {"task": spec.task, "args": dict(spec.args)}
    if source is not None:
        kwargs |= {"source": source, "name": find_task(spec.task).__name__}
    task = make_task(spec.task, spec.args)
    return ModelFactory(
        factory=f"{__name__}:build",
        kwargs=kwargs,
        preprocess=f"{__name__}:preprocess" if task.preprocess is not None else "",
        postprocess=f"{__name__}:postprocess" if task.postprocess is not None else "",
    )


def build(task: str, args: Mapping[str, Any], source: str = "", name: str = "") -> nn.Module:
    """The network of a registered Task, with fresh weights. Raises ConfigError when its source does not run."""
    return _make_task(task, args, source, name).model()


def preprocess(task: str, args: Mapping[str, Any], source: str = "", name: str = "") -> Hook | None:
    """The registered Task's `preprocess` for requests. Raises ConfigError as `build`."""
    return _make_task(task, args, source, name).preprocess


def postprocess(task: str, args: Mapping[str, Any], source: str = "", name: str = "") -> Hook | None:
    """The registered Task's `postprocess` for answers. Raises ConfigError as `build`."""
    return _make_task(task, args, source, name).postprocess


def register_model(
    spec: TrainSpec,
    outcome: TrainResult,
    factory: ModelFactory,
    signature: Signature,
    data: Mapping[str, str],
    recorder: RunRecorder,
) -> ModelVersion:
    """Register the network that a run retained, and record that.

    factory: how to build it, with the source as of the run's beginning
    data:    fingerprints of the datasets, by part

    Raises RegistryError, and ConfigError for a name or alias that does not fit.
    """
    assert outcome.weights is not None
    snapshot = WeightSnapshot.from_payload(outcome.selected_step, outcome.weights.read_bytes())
    version = Registry().register(
        make_model_name(spec),
        snapshot,
        model=factory,
        signature=signature,
        run_id=recorder.id,
        metrics=outcome.metrics,
        data=data,
        aliases=spec.aliases,
    )
    recorder.record_model(version.name, version.version, version.aliases)
    return version


def _make_task(task: str, args: Mapping[str, Any], source: str, name: str) -> Task:
    made: object = getattr(_load_source(source, task), name)(**args) if source else find_task(task)(**args)
    assert isinstance(made, Task)
    return made


def _load_source(source: str, task: str) -> ModuleType:
    """The module of the source, executed once per process. Registered sources are the user's own code."""
    name = f"shoal_registered_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module, file = ModuleType(name), f"<{task}, as registered>"
    module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks show the lines
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:  # user code may raise anything
        del sys.modules[name]
        problem = f"the registered source does not run: {type(error).__name__}: {error}"
        remedy = "what it imports must be installed here; files beside the Task's are not registered with it"
        raise ConfigError("model.kwargs.source", task, problem, remedy) from error
    return module
