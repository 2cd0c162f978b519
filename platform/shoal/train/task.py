"""A `Task` defines the model, the data and the loss of a training, once, for every way of running it.

Owns the base class that users subclass, and finds a Task by its word (a file, a module, a recipe). Called by the
Trainer and by everything that examines a task before it runs. Knows nothing of plans, processes and steps.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from shoal.data import Data
from shoal.errors import ConfigError, DataError, suggest
from shoal.parallel.loss import Loss
from shoal.parallel.task_step import EvalStep, TrainStep
from shoal.recipes import find_recipe, recipe_names
from shoal.registry import Signature
from shoal.registry.code_import import import_module
from shoal.registry.model_code import read_modules
from shoal.train.callback import Callback
from shoal.train.run_facts import RunFacts
from shoal.train.stateful_metric import StatefulMetric

JOBS, MAIN = Path("jobs"), "__main__"
_SOURCE, _MODULES = "__source__", "__modules__"  # of a file's module: its text, and those it imports, as loaded
_texts: dict[str, bytes] = {}  # of the modules that any of these import, as this process has loaded them


Hook = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Registration:
    """What the registry holds of a Task whose own arguments name files of this host.

    args:    the arguments with which every host builds the model; None: as they were given
    files:   further files of the version, by name
    lineage: of the version: what the model was made from
    problem: why an endpoint would refuse the model, which is then no champion; "" where nothing is known
    convert: from the tensors that were trained to those that are registered; None: they are the same
    """

    args: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    problem: str = ""


class Task:
    """A training. Users write `model`, `data` and `loss`; everything else has a default.

    The constructor takes keyword arguments with defaults (`args` of the TrainSpec) and does no work: every worker
    creates the Task before it opens the data. A batch is the result of the data's collate function: a tensor, or a
    tuple, list or dict of tensors, with the sample as dimension 0.

    args:  the arguments with which it was created, of a Task that `shoal.fit` takes as an instance; else None
    defaults: fields of the spec of such a Task where `shoal.fit` is given no others
    parts: for `shoal ablate`: the removable or changeable parts, as {name: arguments of the Task}
    preprocess, postprocess: applied by an endpoint to a batch of requests, and to the network's outputs, each a dict
           of arrays by name with the sample as dimension 0; methods, functions or None. They belong here like `inputs`:
           input that is prepared differently than in training gets wrong answers
    example: a row, as an endpoint's `rows` takes it, for those who try the model: `shoal serve deploy` shows it. A made
           one, none of the data's own
    train_step: a method `train_step(self, model, batch)` for steps other than `loss` of the model's outputs; None: that
           It calls the model, or parts of it, and returns what `loss` may return; or a dict of such, of which "loss" is
           minimised and the others are logged as train/NAME. With several `optimizers` it
           is a generator, which yields (name of an optimizer, loss): the optimizer takes its step with the gradients of
           its own parameters, and the generator goes on with the new weights. Such a Task needs no `loss`; one that has
           it is evaluated by it. Each rank needs the full model
    classes: the names of the classes, in order, for sheets of predictions (`evaluate.samples`)
    eval_step: a method `eval_step(self, model, batch)` for evaluations other than `loss` and `metrics` of the model's
           outputs, which are not computed then; None: those. It returns what `metrics` does
    """

    def __init_subclass__(cls, **fields: Any) -> None:
        super().__init_subclass__(**fields)
        if cls.__module__ == MAIN and (file := vars(sys.modules[MAIN]).get("__file__") or "").endswith(".py"):
            setattr(sys.modules[MAIN], _SOURCE, Path(file).read_text())  # it may be edited while it runs

    args: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = {}
    parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    preprocess: Hook | None = None
    postprocess: Hook | None = None
    example: Mapping[str, Any] | None = None
    train_step: TrainStep | None = None
    eval_step: EvalStep | None = None
    classes: Sequence[str] = ()

    def setup(self, run: RunFacts) -> None:
        """Called on every worker after `data`, and before `model`: what is known of the run."""

    def model(self) -> nn.Module:
        """The model, with fresh weights: the seed is set before the call, the same on every worker."""
        raise NotImplementedError(f"{type(self).__name__}.model")

    def initial_weights(self) -> str | Mapping[str, Tensor]:
        """The weights that the model begins with where the run's `init` is empty: as `init` takes them, or tensors by
        name, of which those that are not there stay fresh; "": fresh ones."""
        return ""

    def registration(self) -> Registration | None:
        """What the registry holds beside the weights, when a run has ended; None: the arguments as they were given."""
        return None

    def fit_args(self) -> Mapping[str, Any]:
        """Arguments that follow from the data, such as encoders that are fitted to it; {}: none. Called once, after
        `data`, when a run begins: they join its arguments, so that every worker, every resume and the registered model
        has the same."""
        return {}

    def adopt_fitted(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The `fit_args` among the arguments of another version, as its network needs them for this Task's data: to be
        written with `fit_args`, so that the other is measured on the same rows."""
        return {}

    def data(self) -> Data:
        """The datasets."""
        raise NotImplementedError(f"{type(self).__name__}.data")

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Scalar: the mean over the samples of the batch. A loss that divides by anything else (tokens with a label,
        weights of classes) is a mean of torch's, such as `cross_entropy`, or a `shoal.Mean(total, count)`, so that a
        batch may be split."""
        raise NotImplementedError(f"{type(self).__name__}.loss")

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The model's positional arguments: all but the last of a tuple, `batch["inputs"]` of a dict, or the batch."""
        if isinstance(batch, Tensor):
            return (batch,)
        if isinstance(batch, Mapping):
            if "inputs" not in batch:
                problem = f"the batch has no 'inputs', but {', '.join(map(str, batch))}"
                raise ConfigError("task", type(self).__name__, problem, "write Task.inputs(batch)")
            return (batch["inputs"],)
        return tuple(batch[:-1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Loss]:
        """Further validation metrics: scalars, each a mean over the samples, or a `shoal.Mean`."""
        return {}

    def sample_losses(self, outputs: Any, batch: Any) -> Tensor | None:
        """[B]: the loss of each sample, for Selective Backprop; None: `loss` is called for each alone, which is
        slow."""
        return None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """The optimiser; None: that of the spec's `optimizer`."""
        return None

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer] | None:
        """Several optimisers, by name, of which each trains a part of the model's parameters: for `train_step`."""
        return None

    @property
    def has_loss(self) -> bool:
        """Whether `loss` measures the model's outputs."""
        return type(self).loss is not Task.loss

    def augmentations(self) -> Mapping[str, Callable[[Tensor, Tensor, Sequence[Generator]], Tensor]]:
        """How a population may change the inputs of training, by name: see `shoal.libs.population.augmentation`,
        which has those for images. Each member has a strength of its own; other trainings apply none."""
        return {}

    def stateful_metrics(self) -> Mapping[str, StatefulMetric]:
        """Further validation metrics that are not means over samples (AUROC, F1), by name: objects of torchmetrics,
        or with the same `update`, `merge_state`, `compute` and `reset`."""
        return {}

    def update_metric(self, name: str, metric: StatefulMetric, outputs: Any, batch: Any) -> None:
        """Count a batch in a stateful metric: with the outputs, and the batch's last or `batch["targets"]`."""
        metric.update(outputs, batch["targets"] if isinstance(batch, Mapping) else batch[-1])

    def finish_evaluation(self) -> Mapping[str, float]:
        """Called at the end of each evaluation, on every rank: further metrics, which are equal on all of them."""
        return {}

    def callbacks(self) -> Sequence[Callback]:
        """Objects whose methods are called as training goes on, on every rank: see `shoal.train.Callback`."""
        return ()

    def tensor_plan(self) -> dict[str, str] | None:
        """How tensor ranks split layers: {pattern of names: "column" | "row" | ...}; None: derived from their types."""
        return None

    def pipeline_cuts(self) -> list[str] | None:
        """The names of the modules that begin the stages after the first; None: chosen by measurement."""
        return None

    def signature(self) -> Signature | None:
        """The inputs and outputs at an endpoint, if they differ from those in training; None: found by running the
        model once. Its `forward` must accept these inputs too, in their order."""
        return None


TaskFactory = Callable[..., Task]


def find_task(reference: str) -> TaskFactory:
    """The Task class of a reference: `my_task.py:MyTask`, `package.module:MyTask`, or a file of ./jobs or a recipe.

    `lenet` is the only Task of jobs/lenet.py: in ./jobs, or else in Shoal's recipes. Raises ConfigError with the
    existing names, or with the cause when the file does not load.
    """
    location, _, name = reference.partition(":")
    module = _load_module(reference, location)
    if name:
        candidate = getattr(module, name, None)
        if not callable(candidate):
            remedy = _suggest_name(name, _find_tasks(module))
            raise ConfigError("task", reference, f"{location} has no Task {name!r}", remedy)
        factory: TaskFactory = candidate
        return factory
    tasks = _find_tasks(module)
    if len(tasks) != 1:
        if not tasks:
            remedy = f"name one of its classes, as in {location}:MyTask; a job is started by `shoal run {location}`"
            raise ConfigError("task", reference, f"{location} has no Task", remedy)
        remedy = f"name one of {', '.join(tasks)}: {location}:{next(iter(tasks))}"
        raise ConfigError("task", reference, f"{location} has {len(tasks)} Tasks", remedy)
    return next(iter(tasks.values()))


def make_task(reference: str, args: Mapping[str, Any]) -> Task:
    """Create the Task of `reference` with `args`. Raises ConfigError when it does not accept them."""
    factory = find_task(reference)
    accepted = inspect.signature(factory).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    for name, value in args.items():
        if name not in accepted and not takes_any:
            problem = f"{reference} takes no such argument"
            raise ConfigError(f"args.{name}", value, problem, _suggest_name(name, accepted))
    try:
        task = factory(**args)
    except TypeError as error:
        raise ConfigError("args", dict(args), f"{reference} refused them ({error})") from error
    if not isinstance(task, Task):
        raise ConfigError("task", reference, f"gives a {type(task).__name__}, not a shoal.train.Task")
    return task


def load_data(task: Task, reference: str) -> Data:
    """Call `task.data()`. Raises ConfigError when the result is not a Data, and DataError."""
    try:
        data: object = task.data()
    except OSError as error:
        problem = f"{type(task).__name__}.data could not read it: {type(error).__name__}: {error}"
        raise DataError("task", reference, problem, f"paths are looked up from {Path.cwd()}") from error
    if not isinstance(data, Data):
        problem = f"{type(task).__name__}.data gave a {type(data).__name__}"
        raise ConfigError("task", reference, problem, "return shoal.data.Data(train=...)")
    return data


def build_model(task: Task, reference: str) -> nn.Module:
    """Call `task.model()`. Raises ConfigError when the result is not a module."""
    model: object = task.model()
    if not isinstance(model, nn.Module):
        problem = f"{type(task).__name__}.model gave a {type(model).__name__}"
        raise ConfigError("task", reference, problem, "return a torch.nn.Module")
    return model


def find_source_file(reference: str) -> Path | None:
    """The file that `reference` names; None for an installed module."""
    location = reference.partition(":")[0]
    if location.endswith(".py"):
        return Path(location).resolve()
    recipe = JOBS / f"{location}.py"
    if recipe.is_file():
        return recipe.resolve()
    ours = find_recipe(location) if location.isidentifier() else None
    if ours is None:
        return None
    module = importlib.util.find_spec(location)
    is_the_users = module is not None and module.origin and Path(module.origin).resolve() != ours.resolve()
    return None if is_the_users else ours.resolve()


def require_source_file(reference: str) -> None:
    """Raises ConfigError for a reference to a file that is not there."""
    path = find_source_file(reference)
    if path is not None and not path.is_file():
        near = suggest(path.name, (each.name for each in path.parent.glob("*.py")))
        remedy = f"from {Path.cwd()}, give the path of a file{near and f'; {near}'}"
        raise ConfigError("task", reference, f"there is no file {reference.partition(':')[0]}", remedy)


def unload_if_changed(reference: str) -> None:
    """Unload the file of `reference` if it has changed since this process loaded it, so that it is loaded again.

    Called where a run begins, so that in a long-lived process (a notebook) it trains the present file, and the same
    text from beginning to end: what is registered is the code that was trained. If a module of the project that the
    file imports has changed, all of these modules are loaded again, too.
    """
    path = find_source_file(reference)
    loaded = None if path is None else sys.modules.get(_module_name(path))
    if loaded is not None and loaded.__file__ != str(path):
        loaded = None  # of another file of this name
    if loaded is not None and loaded.__name__ == MAIN:
        return
    if path is None or (loaded is None and not _texts) or (loaded is not None and _SOURCE not in vars(loaded)):
        return
    try:
        text = path.read_text()
    except (OSError, UnicodeError):
        text = ""  # loading it reports the error
    before: dict[str, bytes] = {} if loaded is None else vars(loaded)[_MODULES]
    now = read_modules(path, text)
    if now == before:
        return
    there = {**before, **{each: _texts[each] for each in _texts.keys() & {*now, *before}}}
    if any(now.get(each, there[each]) != there[each] for each in there if each != f"{path.stem}.py"):
        for each in {*now, *before}:
            # Unload the module of a file, also from a parent that stays: `from parent import
            # module` takes its attribute.
            _texts.pop(each, None)
            name = each.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            module, (parent, _, child) = sys.modules.pop(name, None), name.rpartition(".")
            if module is not None and parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
                delattr(sys.modules[parent], child)
    if loaded is not None:
        del sys.modules[loaded.__name__]


def get_source(reference: str) -> str | None:
    """The text of the file of `reference`, as this process loaded it; None for an installed module.

    Raises ConfigError as `find_task` does.
    """
    if find_source_file(reference) is None:
        return None
    source: str = vars(_load_module(reference, reference.partition(":")[0]))[_SOURCE]
    return source


def get_program_text() -> str | None:
    """The text of the running script, as it was where it defined its last Task; None of a notebook."""
    return getattr(sys.modules[MAIN], _SOURCE, None)


def adopt_program() -> str:
    """Take the running script for the module of its file, which is not loaded again; returns the word for it."""
    main = sys.modules[MAIN]
    path = Path(main.__file__ or "").resolve()
    module = _module_name(path) if main.__spec__ is None else main.__spec__.name  # of `python -m`
    sys.modules[module] = main
    return str(path) if main.__spec__ is None else module


def _load_module(reference: str, location: str) -> ModuleType:
    path = find_source_file(reference)
    if path is None:
        recipes = dict.fromkeys([*sorted(path.stem for path in JOBS.glob("*.py")), *recipe_names()])
        others = f"one of {', '.join(recipes)}" if recipes else "a recipe's name where its folder, jobs/, is"
        remedy = suggest(location, recipes) or f"give file.py:Class, package.module:Class, or {others}"
        if not all(part.isidentifier() for part in location.split(".")):
            raise ConfigError("task", reference, "is no file and no module", remedy)
        if location == MAIN:
            problem = "is of the program that runs now, from which nobody else could build the network"
            raise ConfigError("task", reference, problem, "write it into a file of its own, and give file.py:Class")
        try:
            return import_module(location)
        except ImportError as error:
            raise ConfigError("task", reference, f"cannot be found ({error})", remedy) from error
    require_source_file(reference)
    return load_task_file(path, reference)


def load_task_file(path: Path, reference: str) -> ModuleType:
    """The module of a file, loaded once per process. It is registered by name, so that its classes pickle."""
    name = _module_name(path)
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        if _SOURCE not in vars(loaded):
            remedy = 'put what starts the training under `if __name__ == "__main__":`'
            raise ConfigError("task", reference, "asks for itself while it is loaded", remedy)
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import modules from its own folder
    try:
        text = path.read_text()
        # Not by its loader: a cached bytecode may be of another text with the same second and length.
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
        setattr(module, _MODULES, modules := read_modules(path, text))
        own = f"{path.stem}.py"
        _texts.update(
            (each, modules[each]) for each in modules.keys() - _texts.keys() if each.endswith(".py") and each != own
        )
        setattr(module, _SOURCE, text)  # last, so that a module without it is still being loaded
    except Exception as error:  # user code may raise anything
        del sys.modules[name]
        raise ConfigError("task", reference, f"{path.name} does not load: {type(error).__name__}: {error}") from error
    return module


def _module_name(path: Path) -> str:
    return "shoal_task_" + re.sub(r"\W", "_", path.stem)


def _find_tasks(module: ModuleType) -> dict[str, type[Task]]:
    """The Task classes that the module itself defines."""
    tasks = {name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)}
    return {name: value for name, value in tasks.items() if value.__module__ == module.__name__ and name[0] != "_"}


def _suggest_name(name: str, known: Iterable[str]) -> str:
    names = list(known)
    return suggest(name, names, f"there is {', '.join(names) or 'none'}")
