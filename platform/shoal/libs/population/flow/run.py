"""A population run: from the words of a command to its record, its registered networks and its report.

    check ► record ► rounds (`PopulationTrainer`) ► register the best member, and the ensemble of the best ► report

Called by `jobs/population.py`, in a process connected to a Ray cluster, and by tests and scripts without one: nothing
here needs Ray but `population_main`. The population trains in this process; between rounds its members are scored
together, copied and changed in place.
Legend: K members, B samples of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.batch_tree import tensors_of
from shoal.config import last_override
from shoal.errors import ConfigError
from shoal.extend.cluster import is_connected, job_main
from shoal.extend.data import Data, Loader, make_loader
from shoal.extend.flows import recorded_run
from shoal.extend.parallel import ParallelSpec, SingleProcessModel, World, choose_device, get_value
from shoal.extend.registry import ModelFactory
from shoal.extend.runs import RunRecorder, format_metrics, print_line
from shoal.extend.train import (
    BatchStream,
    EventLog,
    RecordLog,
    Task,
    TrainSpec,
    ValidatedRun,
    build_model,
    evaluate,
    load_data,
    make_model_name,
    make_task,
    unload_if_changed,
    validate_run,
)
from shoal.libs.population.ensemble import Ensemble, make_ensemble_factory
from shoal.libs.population.evolution import build_evolution
from shoal.libs.population.flow.build import Values, build_network, build_population
from shoal.libs.population.flow.rounds import (
    PopulationRun,
    RoundLog,
    choose_spec,
    require_continuation,
)
from shoal.libs.population.lineage import rank_members
from shoal.libs.population.member_rows import RowLayout
from shoal.libs.population.objective import stack_trees
from shoal.libs.population.population import Population
from shoal.libs.population.row_optimizer import RowOptimizer
from shoal.libs.population.row_store import plan_resident
from shoal.libs.population.spec import PopulationSpec
from shoal.random_state import seed_everything
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from shoal.extend.cluster import RunAdmission
    from shoal.libs.population.flow.ray_members import RayMembers

STEPS_AT_ONCE = 50  # of each member, between two reports; their batches are in memory together


class PopulationTrainer(PopulationRun[PopulationSpec]):
    """Trains and evolves the members of a Task.

    folder:       of the run; it has the checkpoints, and training continues from the newest good one
    make_members: from the values of the space that each begins with; None: all of them in this process
    """

    def __init__(
        self,
        spec: PopulationSpec,
        task: Task,
        data: Data,
        device: torch.device,
        folder: Path,
        log: EventLog,
        make_members: Callable[[Values], RayMembers] | None = None,
    ) -> None:
        super().__init__(spec, folder, log)
        self.task = task
        self.data = data
        self.device = device
        seed_everything(spec.seed)
        self.population: Population | RayMembers = (
            build_population(spec, task, device, self.state.values)
            if make_members is None
            else make_members(self.state.values)
        )
        self._num_parameters = sum(each.numel() for each in build_network(spec, task).parameters())
        self._loaders = [
            make_loader(data, "train", batch_size=spec.batch_size, is_even=True, seed=spec.seed + index, device=device)
            for index in range(spec.members if spec.order == "own" else 1)
        ]
        self._streams = [BatchStream(loader) for loader in self._loaders]
        self._is_engine_reported = False

    def describe_members(self) -> dict[str, Any]:
        device = self.spec.device if self.spec.device != "auto" else str(self.device)  # the members'
        return {"device": device, "parameters": self._num_parameters, "order": self.spec.order}

    # -- a round --------------------------------------------------------------------------------------------------

    def train_round(self, step: int) -> tuple[list[float], dict[str, float]]:
        self._train(step)
        metrics = self._evaluate_members()
        measured = torch.where(metrics["loss"].isfinite(), metrics[self.spec.metric], torch.nan)
        measured[self.population.find_failed()] = torch.nan  # whatever they answer: NaNs still have an accuracy
        scores: list[float] = measured.tolist()
        best = rank_members(scores, self.spec.is_higher_better)[0]
        return scores, {name: float(each[best]) for name, each in metrics.items()}

    def _train(self, end: int) -> None:
        """The steps of one round."""
        step = end - self.spec.steps_per_round
        while step < end:
            began_s, count = time.monotonic(), min(STEPS_AT_ONCE, end - step)
            batches = [self._next_batch() for _ in range(count)]
            losses = torch.cat([each.losses.mean(0).cpu() for each in self.population.train(batches)])
            step += count
            finite = losses[losses.isfinite()]
            values = {
                "train/step": step,
                "train/loss": float(finite.mean()) if len(finite) else math.nan,
                "population/member_steps_per_s": len(losses) * count / (time.monotonic() - began_s),
            }
            self._log.log(step, values)
            if not self._is_engine_reported:  # what computes the members, and why nothing else does
                self._is_engine_reported = True
                if choice := self.population.choice:
                    trials = [[each.engine, each.chunk, each.ms] for each in choice.trials]
                    reasons = dict(choice.reasons)
                    self._log.record_event(
                        "engine", name=choice.engine, chunk=choice.chunk, reasons=reasons, trials=trials
                    )

    def _next_batch(self) -> Any:
        """[B, ...] for all members, or [K, B, ...] where the order is own."""
        batches = [stream.next() for stream in self._streams]
        return batches[0] if self.spec.order == "shared" else stack_trees(batches)

    def _evaluate_members(self) -> dict[str, Tensor]:
        """The loss and the metrics of each member over what scores them, {name: [K]}."""
        limit = self.spec.score_samples
        with self.make_validation_loader() as loader:
            batches = loader if limit is None else islice(loader, math.ceil(limit / self.spec.evaluation_batch_size))
            return self.population.evaluate(batches)

    # -- decisions ------------------------------------------------------------------------------------------------

    def begin_afresh(self, member: int) -> None:
        model = build_model(self.task, self.spec.task)
        self.population.load_member(member, model.to(self.device).state_dict())

    # -- state ----------------------------------------------------------------------------------------------------

    def save_members(self) -> dict[str, Any]:
        positions = [loader.state_dict() for loader in self._loaders]
        return {"population": self.population.state_dict(), "data": positions}

    def load_members(self, saved: dict[str, Any]) -> None:
        self.population.load_state_dict(saved["population"])
        for loader, position in zip(self._loaders, saved["data"], strict=True):
            loader.load_state_dict(position)

    def make_validation_loader(self) -> Loader:
        """Every validation sample once, in order."""
        return make_loader(self.data, "validation", batch_size=self.spec.evaluation_batch_size, device=self.device)

    def close(self) -> None:
        """End the loaders and the threads. Idempotent."""
        for loader in self._loaders:
            loader.close()
        self.population.close()


JOB = "population"
UNCHANGED = ("task", "args", "members", "space", "augmentation", "optimizer", "evolution", "order", "steps_per_round",
             "metric", "direction", "score_samples", "seed", "workers")  # fmt: skip


def population_main(recipe: PopulationSpec) -> None:
    """The main function of jobs/population.py and of a recipe's own file."""

    def choose(overrides: list[str]) -> PopulationSpec:
        """Take the recipe, or for another Task of the defaults."""
        task = last_override(overrides, "task")
        return choose_spec(recipe if task in ("", recipe.task) else PopulationSpec(task=task), overrides)

    job_main(choose, run_population, JOB, check_population)


def to_train_spec(spec: PopulationSpec) -> TrainSpec:
    """A member as a training of its own, as far as a TrainSpec can say it."""
    return TrainSpec.parse(
        {
            **{name: getattr(spec, name) for name in ("task", "args", "batch_size", "seed", "device", "init", "name")},
            "optimizer": spec.optimizer.model_dump(),
            "stop": {"steps": spec.steps_per_member},
            "evaluate": {"batch_size": spec.evaluation_batch_size},
        }
    )


def check_population(spec: PopulationSpec) -> ValidatedRun:
    """Raises ConfigError or DataError with field, value and remedy, for a run that could not work: also for a network
    that is no row of numbers, or where `memory_bytes` has no room for one."""
    if spec.resume:
        require_continuation(spec, UNCHANGED)
    build_evolution(spec.evolution, spec.search_space, spec.members, num_rounds=spec.rounds)
    checked = validate_run(to_train_spec(spec))
    task = make_task(spec.task, spec.args)
    layout = RowLayout(build_network(spec, task))
    if spec.memory_bytes is not None:
        members = math.ceil(spec.members / spec.workers)  # in one worker
        slots = RowOptimizer(spec.optimizer.name).slots
        plan_resident(layout, members, len(slots), torch.device("cpu"), spec.memory_bytes)
    if task.train_step is not None or type(task).optimizer is not Task.optimizer:
        name = "train_step" if task.train_step is not None else "optimizer"
        problem = f"{type(task).__name__} has its own {name}, and members share one update"
        raise ConfigError("task", spec.task, problem, "use `shoal sweep`, whose trials are ordinary trainings")
    if not checked.metric_names:
        problem = f"{type(task).__name__}.data has no validation data, by which members are scored"
        raise ConfigError("task", spec.task, problem, "give Data(validation=...)")
    measured = [name for name in checked.metric_names if name not in task.stateful_metrics()]
    if spec.metric not in measured:
        raise ConfigError("metric", spec.metric, "is not measured of each member", f"there is {', '.join(measured)}")
    known = task.augmentations()
    for name in spec.augmentations:
        if name not in known:
            problem = f"{type(task).__name__}.augmentations has no {name!r}"
            remedy = f"there is {', '.join(known)}" if known else "write augmentations: see shoal.train.Task"
            raise ConfigError(f"space.augmentation.{name}", name, problem, remedy)
    return checked


@dataclass(frozen=True)
class PopulationResult:
    """How a run ended.

    scores:  of each member, by the spec's metric, after the last round
    best:    the best member of any round
    metrics: of that member then, over all validation data; `ensemble` has those of the ensemble, if there is one
    """

    run_id: str
    scores: list[float]
    best: int
    metrics: dict[str, float]
    ensemble: dict[str, float]


def run_population(spec: PopulationSpec, job: str = JOB, *, registers: bool = True) -> PopulationResult:
    """Train and evolve to the end in this process. Raises a ShoalError on failure, which the record has too.

    registers: register the best member and the ensemble
    """
    unload_if_changed(spec.task)
    checked = check_population(spec)
    torch.set_num_threads(1)  # members, not the operations of one, are computed in parallel
    with recorded_run(spec, job, "population") as recorder:
        task = make_task(spec.task, spec.args)
        data = load_data(task, spec.task)
        print_line(f"run {recorder.id}: {spec.members} members of {spec.task}")
        with ExitStack() as stack:
            admission = None
            if is_connected():
                from shoal.extend.cluster import RunAdmission

                admission = stack.enter_context(RunAdmission(recorder.id))
            log = RoundLog(RecordLog(recorder, admission.mark_running if admission else None))
            spec, device, make = _choose_workers(spec, admission, log.record_event)
            trainer = PopulationTrainer(spec, task, data, device, recorder.folder, log, make)
            stack.callback(trainer.close)
            trainer.run()
            return _finish(trainer, checked, recorder, registers=registers)


def _choose_workers(
    spec: PopulationSpec, admission: RunAdmission | None, record: Callable[..., None]
) -> tuple[PopulationSpec, torch.device, Callable[[Values], RayMembers] | None]:
    """The spec with the members' device, the device of this process, and what starts workers, unless members are here.

    On a cluster the workers reserve GPUs, and this process has none. Raises PlanError when the cluster has no room for
    them, NoCapacity when it has none now.

    admission: in the queue of the cluster's runs; None without a cluster
    """
    if admission is None:
        return spec, choose_device(spec.device, 0), None
    from shoal.extend.train import require_capacity, resolve_device
    from shoal.libs.population.flow.ray_members import RayMembers

    train = resolve_device(to_train_spec(spec).model_copy(update={"workers": spec.workers}))
    spec, here = spec.model_copy(update={"device": train.device}), torch.device("cpu")
    if spec.workers == 1 and spec.device == "cpu":
        return spec, here, None
    require_capacity(train, record, admission)
    return spec, here, partial(RayMembers, spec)


def _finish(
    trainer: PopulationTrainer, checked: ValidatedRun, recorder: RunRecorder, *, registers: bool
) -> PopulationResult:
    """Measure the best member over all validation data, register, and record how the run ended."""
    spec, best = trainer.spec, trainer.state.best
    recorder.record_event("data", **checked.fingerprint)
    name = make_model_name(to_train_spec(spec))

    def register(name: str, network: nn.Module, factory: ModelFactory, **entry: Any) -> None:
        tensors = {key: tensor.numpy(force=True) for key, tensor in network.state_dict().items()}
        snapshot, described = (
            WeightSnapshot.of(spec.steps_per_member, tensors),
            {"signature": checked.signature, **entry},
        )
        trainer.register(recorder, name, snapshot, model=factory, data=checked.fingerprint, **described)

    factory = checked.factory
    network: Any = factory.build()
    network.load_state_dict(best["weights"])
    metrics = evaluate_network(network, trainer)
    trainer.record_best(metrics)
    if registers:
        register(name, network, factory, metrics=metrics, lineage=trainer.trace_best())
    combined: dict[str, float] = {}
    if members := choose_ensemble(trainer):
        ensemble = build_ensemble(trainer, members, factory)
        combined = evaluate_network(ensemble, trainer)
        recorder.record_event("ensemble", members=members, metrics=combined, **ensemble.describe())
        if registers:
            factory = make_ensemble_factory(factory, len(members), is_classifier=ensemble.is_classifier)
            lineage = {"members": members, **ensemble.describe()}
            register(f"{name}-ensemble", ensemble, factory, metrics=combined, lineage=lineage)
    detail = trainer.record_end("members", metrics | {f"ensemble {key}": value for key, value in combined.items()})
    print_line(f"run {recorder.id}: {detail}; {format_metrics(metrics)}")
    return PopulationResult(recorder.id, trainer.get_scores(), best["member"], metrics, combined)


def choose_ensemble(trainer: PopulationTrainer) -> list[int]:
    """The best members of the last round; none if the spec wants none, or fewer than two have a score."""
    scores = trainer.get_scores()
    ranked = [member for member in rank_members(scores, trainer.spec.is_higher_better) if math.isfinite(scores[member])]
    members = ranked[: trainer.spec.ensemble_size]
    return members if len(members) > 1 else []


@torch.no_grad()
def build_ensemble(trainer: PopulationTrainer, members: list[int], factory: ModelFactory) -> Ensemble:
    """The network that averages these members, calibrated on the validation data if they are classifiers."""
    networks = []
    for member in members:
        network: Any = factory.build()
        network.load_state_dict(trainer.population.member_state_dict(member))
        networks.append(network.to(trainer.device))
    logits, targets = [], []
    with trainer.make_validation_loader() as loader:
        for batch in loader:
            outputs = [network.eval()(*trainer.task.inputs(batch)) for network in networks]
            classes = _find_classes(trainer.task, outputs[0], batch)
            if classes is None:
                return Ensemble(networks, is_classifier=False).eval()
            logits.append(torch.stack(outputs))
            targets.append(classes)
    ensemble = Ensemble(networks, is_classifier=True).to(trainer.device).eval()
    ensemble.calibrate(torch.cat(logits, 1), torch.cat(targets))
    return ensemble


def _find_classes(task: Task, outputs: Any, batch: Any) -> Tensor | None:
    """The target classes [B], if the Task's loss is the cross entropy of the outputs as logits [B, C]; else None."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return None
    for targets in tensors_of(batch):
        is_integer = targets.dtype == torch.int64 and targets.shape == outputs.shape[:1]
        if is_integer and targets.min() >= 0 and targets.max() < outputs.shape[1]:
            expected = nn.functional.cross_entropy(outputs, targets)
            if torch.allclose(get_value(task.loss(outputs, batch)), expected, rtol=1e-4):
                return targets
    return None


def evaluate_network(network: nn.Module, trainer: PopulationTrainer) -> dict[str, float]:
    """The loss and the metrics of a network over all validation data: means over the samples."""
    world, spec = World(0, 1, trainer.device), ParallelSpec()
    with trainer.make_validation_loader() as loader:
        return evaluate(SingleProcessModel(network, trainer.task, spec, world, 0), loader)
