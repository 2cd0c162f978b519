"""A trained network's entry in the registry: everything needed to build it again, and building it.

Owns the entry (factory, signature, source of the Task). Called at the end of a run. `build` is called by name when a
registered model is loaded, and needs no file of the user's: the source is part of the entry.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from shoal.errors import ConfigError
from shoal.registry import Criterion, ModelFactory, ModelVersion, Registry, Signature
from shoal.registry.code_import import activate_code, load_source
from shoal.runs import RunRecorder
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import Hook, Registration, Task, find_task, get_source, make_task
from shoal.weights.tensor_files import list_files, make_weight_file, open_tensors, write_tensors

logger = logging.getLogger(__name__)


def make_model_name(spec: TrainSpec) -> str:
    """The model's name in the registry: the spec's, or derived from the task's."""
    place, _, name = spec.task.partition(":")
    file = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    said = re.sub(r"{(\w+)}", lambda found: Path(str(spec.args.get(found[1]) or "")).name.split(".")[0], spec.name)
    return re.sub(r"[^a-z0-9._-]", "-", (said or name or file).lower()).strip("._-") or "model"


def make_factory(spec: TrainSpec) -> ModelFactory:
    """How to build the network: with the source of a Task in a file, or by its module's name.

    The source is the one that this process has loaded, even if the file has changed; modules that it imports are
    stored as they are now.
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
    ).with_code()


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
    lineage: Mapping[str, object] | None = None,
    criterion: Criterion | None = None,
    scores: Mapping[int, float] = MappingProxyType({}),
) -> ModelVersion:
    """Register the network that a run retained, and record that.

    factory:   how to build it, with the source as of the run's beginning
    data:      fingerprints of the datasets, by part
    lineage:   where a search has found it
    criterion: by which it may become the champion; None: as the spec says
    scores:    of champions, see `Registry.register`

    Raises RegistryError, and ConfigError for a name or alias that does not fit.
    """
    assert outcome.weights is not None
    snapshot = make_weight_file(outcome.selected_step, outcome.weights)
    travelling, example = _find_registration(factory)
    if travelling is not None:
        if travelling.args is not None:
            kwargs = {**factory.kwargs, "args": dict(travelling.args)}
            factory = factory.model_copy(update={"kwargs": kwargs})
        if travelling.convert is not None:
            converted = travelling.convert(open_tensors(list_files(outcome.weights)))
            types = {name: (tensor.dtype, tensor.shape) for name, tensor in converted.items()}
            path = write_tensors(outcome.weights.with_name("converted.safetensors"), types, converted.items())
            snapshot = make_weight_file(outcome.selected_step, path)
    version = Registry().register(
        make_model_name(spec),
        snapshot,
        model=factory,
        signature=signature,
        run_id=recorder.id,
        metrics=outcome.metrics,
        data=data,
        lineage={**(lineage or {}), **(travelling.lineage if travelling else {})},
        files=travelling.files if travelling else {},
        example=example,
        aliases=spec.aliases,
        criterion=criterion or spec.choose_criterion(outcome.metrics),
        scores=scores,
        problem=travelling.problem if travelling else "",
    )
    recorder.record_model(version.name, version.version, version.aliases, version.decision)
    if not signature.inputs:
        logger.warning(
            "%s is registered, but its module has no `forward` for what a batch has: it cannot be served", version.ref
        )
    return version


def _find_registration(factory: ModelFactory) -> tuple[Registration | None, Mapping[str, Any]]:
    """Of the Task as it was when the run began, whatever has become of its file; and its example."""
    try:
        with activate_code(factory.code):
            task = _make_task(**{"source": "", "name": "", **factory.kwargs})
            return task.registration(), task.example or {}
    except ConfigError as error:  # what was trained is kept all the same
        logger.warning("the version that is registered cannot be loaded as it is: %s", error)
        return None, {}


def _make_task(task: str, args: Mapping[str, Any], source: str, name: str) -> Task:
    factory = getattr(load_source(source, task, "model.kwargs.source"), name) if source else find_task(task)
    made: object = factory(**args)
    assert isinstance(made, Task)
    return made
