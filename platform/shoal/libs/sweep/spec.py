"""The configuration of a sweep, and the checks before any of its trials starts.

A sweep trains one Task several times; each trial is a `TrainSpec` with values from the search space, or a run of the
loop (`loop_spec`). Called by `flow` and `shoal sweep`. Imports no Ray.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

import shoal.runs
from shoal.config import Spec, last_override
from shoal.errors import ConfigError, MissingExtra
from shoal.extend.flows import MEAN_RETURN
from shoal.extend.runs import LogFormat, RunKind, TrackerNames, infer_direction
from shoal.extend.train import (
    Direction,
    TrainSpec,
    ValidatedRun,
    check_once,
    choose_metric,
    resolve_total_steps,
    spec_from_overrides,
)
from shoal.libs.sweep.loop_spec import (
    LoopTrialSpec,
    check_loop,
    load_loop_recipe,
    make_own_space,
    require_loop_fields,
    require_loop_search,
)
from shoal.search.space import Options, SearchSpace, nest

Search = Literal["random", "optuna", "bohb", "pbt"]
Scheduler = Literal["auto", "none", "asha"]

_LOOP = "loop."
# Where a trial runs, and what it leaves.
_SAME = (
    "task",
    "resume",
    "name",
    "aliases",
    "device",
    "workers",
    "min_workers",
    "threads",
    "wait",
    "priority",
    "track",
)
# What a population-based trial may change while it goes on: these need no other network and no other plan.
_CHANGEABLE = ("optimizer.", "schedule.", "args.", "batch_size", "clip_norm")
_FIXED = ("optimizer.name", "optimizer.fused", "schedule.name", "schedule.total_steps")


class AshaSpec(Spec):
    """Asynchronous successive halving (arXiv:1810.05934): a trial that is not among the best at a rung ends there.

    first_rung: the share of a full trial after which the first trials end
    factor:     one of so many trials goes on from a rung to the next, which is so many times as far
    """

    first_rung: float = Field(default=1 / 9, gt=0, lt=1)
    factor: float = Field(default=3.0, gt=1)


class PbtSpec(Spec):
    """Population-based training (arXiv:1711.09846): the worst copy the best, and change their hyper-parameters.

    every_steps: how often; None: at each evaluation
    quantile:    the share of the trials that copies, and the share that is copied
    resample:    the probability that a hyper-parameter is drawn anew instead of perturbed
    """

    every_steps: int | None = Field(default=None, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    resample: float = Field(default=0.25, ge=0, le=1)


class SweepSpec(Spec):
    """One sweep.

    train:          every trial, but for the fields of `space`
    loop:           the same, where each trial is a run of the loop; None: each trains a Task
    space:          a path of a field of `train` or `loop`, and the word of its distribution: `log(1e-4,1e-1)`; with
                    `loop` by default that of its algorithm, but for the fields that are given
    first:          values of the first trial, one for each path of `space`; {}: the search chooses them. Where `space`
                    is the algorithm's, by default those of `loop`
    metric:         of an evaluation, which the sweep optimises; "": `stop.target`'s, or the first that is not the loss
    scheduler:      which trials end early; auto: asha with search=bohb, else none
    cpus_per_trial: of a trial of one worker; a trial of several takes one for each of them
    gpus_per_trial: may be a fraction, as 0.25: then a trial may use this share of the device's memory
    concurrent:     trials at a time; None: as many as the cluster has room for
    registers:      register the best trial's network at the end
    logs:           json: each line of the driver's output, and of the workers' logs, is an object
    track:          where the sweep's own record is mirrored to; that of each trial with `train.track`, `loop.track`
    retry_failed:   with `resume`: run the failed trials again, from their last checkpoints
    """

    main_fields = (
        "train.task",
        "train.stop.epochs",
        "space",
        "trials",
        "search",
        "scheduler",
        "metric",
        "direction",
        "concurrent",
        "registers",
        "resume",
    )
    page = "sweeps.md"

    train: TrainSpec = TrainSpec()
    loop: LoopTrialSpec | None = None
    space: dict[str, Any] = Field(default_factory=dict)
    first: dict[str, Any] = Field(default_factory=dict)
    trials: int = Field(default=10, ge=1)
    search: Search = "random"
    scheduler: Scheduler = "auto"
    metric: str = ""
    direction: Direction = "auto"
    seed: int = Field(default=0, ge=0, lt=2**31)
    cpus_per_trial: float = Field(default=1.0, gt=0)
    gpus_per_trial: float = Field(default=0.0, ge=0)
    concurrent: int | None = Field(default=None, ge=1)
    asha: AshaSpec = AshaSpec()
    pbt: PbtSpec = PbtSpec()
    registers: bool = True
    retry_failed: bool = False
    track: TrackerNames = ()
    logs: LogFormat = "text"
    resume: str = ""

    @property
    def search_space(self) -> SearchSpace:
        return SearchSpace.parse(self.space)

    @property
    def uses_asha(self) -> bool:
        return self.scheduler == "asha" or (self.scheduler == "auto" and self.search == "bohb")

    @property
    def starts_workers(self) -> bool:
        """Whether a trial trains in workers of its own; otherwise it trains in its own process."""
        return self.train.workers > 1 or self.train.has_replicas

    @property
    def queued(self) -> TrainSpec | LoopTrialSpec:
        """What says how long the first trial may wait, and the priority."""
        return self.train if self.loop is None else self.loop

    @property
    def source(self) -> str:
        """The Task of the trials, or the job that they begin with."""
        return self.train.task if self.loop is None else self.loop.recipe

    def make_trial_spec(self, parameters: Mapping[str, object]) -> TrainSpec:
        """The spec of a trial. Raises ConfigError for a value that does not fit, or a field that does not exist."""
        named = {self.train.qualify(f"{path}=").removesuffix("="): value for path, value in parameters.items()}
        return self.train.update(nest(named))

    def make_loop_spec(self, parameters: Mapping[str, object]) -> LoopTrialSpec:
        """The spec of a trial that is a run of the loop. Raises ConfigError as `make_trial_spec`."""
        assert self.loop is not None
        return self.loop.update(nest(parameters))

    def validate_values(self, parameters: Mapping[str, object]) -> None:
        """Raises ConfigError for a value that does not fit, or a field that no trial has."""
        if self.loop is None:
            self.make_trial_spec(parameters)
        else:
            self.make_loop_spec(parameters)


@dataclass(frozen=True)
class CheckedSweep:
    """The facts about a sweep before it starts.

    run:         of a trial with values from the middle of the space; None for runs of the loop
    total_steps: of that trial; None where its end is no number of steps
    is_higher:   whether a higher value of `metric` is better
    """

    run: ValidatedRun | None
    metric: str
    is_higher: bool
    total_steps: int | None


def sweep_from_overrides(overrides: list[str]) -> SweepSpec:
    """The spec of `resume=RUN`, or of the recipe of `train.task=NAME` or `loop.recipe=NAME`; with the overrides. Raises
    ConfigError.

    A recipe's `stop.target` is left out: trials are compared after as many steps. A word sets it again.
    """
    if resumed := last_override(overrides, "resume"):
        record = shoal.runs.load(resumed)
        if record.kind is not RunKind.SWEEP:
            raise ConfigError("resume", resumed, f"is no sweep, but a run of the kind {record.kind.value}")
        return SweepSpec.from_record(record.spec).model_copy(update={"retry_failed": False}).override(overrides)
    if recipe := last_override(overrides, f"{_LOOP}recipe"):
        others = [override for override in overrides if not override.startswith(_LOOP)]
        of_loop = [override.removeprefix(_LOOP) for override in overrides if override.startswith(_LOOP)]
        loop = load_loop_recipe(recipe).override(of_loop)
        spec = SweepSpec(loop=loop).override(others)
        return spec if spec.space else spec.update(make_own_space(loop, {each.partition("=")[0] for each in of_loop}))
    start = "train."
    of_train = [override.removeprefix(start) for override in overrides if override.startswith(start)]
    train = spec_from_overrides(of_train)
    if not any(override.startswith("stop.target=") for override in of_train):
        train = remove_target(train)
    return SweepSpec(train=train).override(override for override in overrides if not override.startswith(start))


def remove_target(train: TrainSpec) -> TrainSpec:
    """Without `stop.target`: trials are compared after equal work."""
    return train.update({"stop": {"target": None}})


def check_sweep(spec: SweepSpec) -> CheckedSweep:
    """Raises ConfigError, PlanError or DataError with field, value and remedy, or MissingExtra, before any work."""
    space = spec.search_space
    device = spec.train.device if spec.loop is None else spec.loop.learner.device
    if device == "cuda" and not spec.gpus_per_trial and not spec.starts_workers:
        problem = "is what a trial reserves and sees, and it is to train on a GPU"
        raise ConfigError("gpus_per_trial", spec.gpus_per_trial, problem, "use --gpus-per-trial 1, or a fraction")
    if (loop := spec.loop) is not None:
        require_loop_fields(loop, space)
        require_loop_search(spec.search, spec.metric, spec.direction, loop.reports, uses_asha=spec.uses_asha)
    _require_fields(spec, space)
    _require_search(spec, space)
    if loop is not None:
        check_loop(spec.make_loop_spec(space.from_unit([0.5] * len(space))))
        return CheckedSweep(None, MEAN_RETURN, True, loop.stop.steps)
    train = spec.make_trial_spec(space.from_unit([0.5] * len(space)))
    if train.optimizer == TrainSpec().optimizer:  # a Task with an optimizer of its own refuses other values alone
        train = spec.make_trial_spec(space.from_unit([0.0 if path.startswith("optimizer.") else 0.5 for path in space]))
    run = check_once(train)
    try:
        metric = choose_metric(run.metric_names, spec.train, spec.metric or None)
    except ConfigError as error:
        raise ConfigError(error.field.removeprefix("--"), error.value, error.problem, error.remedy) from None
    better = infer_direction(metric) if spec.direction == "auto" else spec.direction == "max"
    if better is None:
        problem = "does not tell by its name whether more is better"
        raise ConfigError("metric", metric, problem, "say --direction max or min")
    checked = CheckedSweep(run, metric, better, resolve_total_steps(train, run.steps_per_epoch))
    if spec.uses_asha or spec.search == "pbt":
        _require_evaluations(spec, train, checked)
    return checked


def _require_fields(spec: SweepSpec, space: SearchSpace) -> None:
    """Each field exists, is not fixed by the sweep, and takes the ends of its interval, or all of its options."""
    for path, distribution in space.items():
        if spec.loop is None and (path.split(".")[0] in _SAME or path in ("sync", "sync.kind")):
            raise ConfigError(path, str(distribution), "is the same in all trials of a sweep", "fix its value instead")
        if isinstance(distribution, Options):
            values: list[object] = list(distribution.options)
        else:
            values = [distribution.from_unit(0.0), distribution.from_unit(1.0)]
        for value in values:
            spec.validate_values({path: value})
    spec.validate_values(first := spec.first)
    has_all = first.keys() == space.keys()
    if first and not (has_all and all(each.include(first[path]) == each for path, each in space.items())):
        raise ConfigError("first", str(first), "is no value of each field of the space", "give one of each, or none")


def _require_search(spec: SweepSpec, space: SearchSpace) -> None:
    """What the search and the scheduler need, and what they exclude."""
    if spec.train.resume:
        raise ConfigError("train.resume", spec.train.resume, "is of one run", "a sweep begins each of its trials anew")
    if spec.search in ("optuna", "bohb") and importlib.util.find_spec("optuna") is None:
        raise MissingExtra(f"--search {spec.search} needs Optuna: pip install 'optuna>=4'", name="optuna")
    if spec.search == "bohb" and spec.scheduler == "none":
        problem = "learns from trials that end early, and without a scheduler none does"
        raise ConfigError("search", "bohb", problem, "use --scheduler asha, or --search optuna")
    if spec.search != "pbt":
        return
    if spec.uses_asha:
        problem = "ends trials, while population-based training goes on with all of them"
        raise ConfigError("scheduler", "asha", problem, "leave it out with --search pbt")
    if spec.concurrent is not None:
        problem = "does not go with --search pbt, whose trials all go on together and take turns where room is scarce"
        raise ConfigError("concurrent", spec.concurrent, problem, "leave it out, or give --cpus-per-trial")
    if spec.trials < 2:
        raise ConfigError("trials", spec.trials, "leaves no trial to copy", "use 2 at least with --search pbt")
    for path in space:
        if not spec.train.qualify(f"{path}=").startswith(_CHANGEABLE) or path in _FIXED:
            problem = "cannot change while a trial goes on, as population-based training does"
            raise ConfigError(path, str(space[path]), problem, "fix its value, or use another --search")


def _require_evaluations(spec: SweepSpec, train: TrainSpec, checked: CheckedSweep) -> None:
    """There is an evaluation before the end of a trial: by it trials end or are copied."""
    word = "--search pbt" if spec.search == "pbt" else "--scheduler asha"
    if checked.total_steps is None:
        raise ConfigError("stop", None, f"has no number of steps or epochs, which {word} needs", "give stop.steps=1000")
    assert checked.run is not None
    every, per_epoch = train.evaluate.every_steps, checked.run.steps_per_epoch
    if every is None and per_epoch is not None:
        every = max(1, round(train.evaluate.every_epochs * per_epoch))
    if spec.search == "pbt" and train.evaluate.every_steps is None:
        problem = "is not given: the trials of a population are compared, and copied, after the same steps"
        remedy = f"give evaluate.every_steps={max(1, checked.total_steps // 10)}"
        raise ConfigError("evaluate.every_steps", None, problem, remedy)
    if every is None or every >= checked.total_steps:
        problem = f"evaluates a trial of {checked.total_steps} steps at its end alone, too late for {word}"
        remedy = f"give evaluate.every_steps={max(1, checked.total_steps // 10)}"
        raise ConfigError("evaluate.every_steps", train.evaluate.every_steps, problem, remedy)
