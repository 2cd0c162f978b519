"""Many networks trained at once on one device, each with its own weights, optimizer state and hyper-parameters.

    population = Population(LeNet, lambda outputs, batch: F.cross_entropy(outputs, batch[1]), members=30,
                            hyper_parameters={"optimizer.learning_rate": rates, "optimizer.momentum": 0.9})
    losses = population.step((images, labels))              # [30]
    for result in population.train(batches):                # as chunks of members are ready
        print(result.members, result.losses)
    population.exploit([(loser, winner)])                   # a copy of rows
    torch.save(population.member_state_dict(3), "best.pt")  # an ordinary state dict

Owns the members. Called by flows and by users. Never opens data, decides who copies whom, or writes files.
Legend: K members, k of a chunk, B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from shoal.batch_tree import tensors_of
from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, SpecMismatch
from shoal.libs.population.engines.select_engine import EngineChoice, require_engine
from shoal.libs.population.member_group import AugmentFunction, BatchSource, GroupSetting, MemberGroup
from shoal.libs.population.member_rows import RowLayout
from shoal.libs.population.objective import (
    InputsFunction,
    LossFunction,
    MemberBatch,
    MetricsFunction,
    Objective,
    default_inputs,
)
from shoal.libs.population.row_optimizer import OptimizerName, RowOptimizer
from shoal.libs.population.row_store import Part, plan_resident
from shoal.random_state import preserve_rng

HyperParameters = Mapping[str, float | Sequence[float] | Tensor]
ModelFactory = Callable[[], nn.Module]
Order = Literal["shared", "own"]
T = TypeVar("T")
_DEFAULTS = {"optimizer.learning_rate": 1e-3, "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0}
_MOST = {"optimizer.momentum": 1.0}


@dataclass(frozen=True)
class ChunkResult:
    """What some members did in a call of `train`.

    losses: before each update, [steps, k]
    """

    members: tuple[int, ...]
    losses: Tensor


class Population:
    """K members. Use as a context manager, or call `close`: it has threads.

    make_model:       a member's model, called with the seed of the member set; or one function a member: members whose
                      models have the same structure are computed together
    loss:             (outputs, batch) of one member to a scalar, the mean over the samples
    inputs, metrics:  as those of a Task: the model's arguments of a batch; further metrics of an evaluation
    augment:          (batch [k, B, ...], {name: [k]}, generators [k]) to such a batch, for training. It must not write
                      into the batch. The values are hyper-parameters named `augmentation.NAME`
    hyper_parameters: {name: one number, or one a member}: `optimizer.learning_rate`, `.momentum` (SGD),
                      `.weight_decay`, and `augmentation.NAME`
    order:            shared: all members see a batch [B, ...]; own: its tensors are [K, B, ...]
    seed:             of member 0; member k has seed + k, for its weights and for its generator
    engine, chunk:    how members are computed, and how many at once; left open, a short trial chooses
    threads:          that train chunks at once, each with one thread of torch; None: the cores of a CPU, 1 on a GPU
    memory_bytes:     of the device, for rows; more members than fit wait in host memory

    Raises ConfigError before any work: for values out of range, a model that is no row of numbers, and members that do
    not fit into the memory. A chosen engine that does not fit the model raises it at the first batch.
    """

    def __init__(
        self,
        make_model: ModelFactory | Sequence[ModelFactory],
        loss: LossFunction,
        *,
        members: int,
        optimizer: OptimizerName | RowOptimizer = "sgd",
        hyper_parameters: HyperParameters | None = None,
        inputs: InputsFunction = default_inputs,
        metrics: MetricsFunction | None = None,
        augment: AugmentFunction | None = None,
        order: Order = "shared",
        seed: int = 0,
        engine: str = "auto",
        chunk: int | None = None,
        threads: int | None = None,
        device: torch.device | str = "cpu",
        memory_bytes: int | None = None,
    ) -> None:
        for name, value in (("members", members), ("chunk", chunk), ("threads", threads)):
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if order not in get_args(Order):
            raise ConfigError("order", order, "no such order", f"one of {', '.join(get_args(Order))}")
        require_engine(engine)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", str(device), "there is no CUDA device", "device=cpu")
        self.num_members, self.order, self.device = members, order, torch.device(device)
        self.hyper_parameters = _read_columns(hyper_parameters or {}, members)
        unused = [name for name in self.hyper_parameters if name.startswith("augmentation.")]
        if unused and augment is None:
            raise ConfigError("augment", None, f"nothing applies {', '.join(unused)}", "give augment=a function")
        self.generators = [torch.Generator(self.device).manual_seed(seed + member) for member in range(members)]
        rows = optimizer if isinstance(optimizer, RowOptimizer) else RowOptimizer(optimizer)
        threads = threads or (count_usable_cores() if self.device.type == "cpu" else 1)
        threads = min(threads, members)
        objective = Objective(loss, inputs, metrics)
        self.setting = GroupSetting(objective, rows, self.device, augment, engine, chunk, threads)
        self.groups = self._make_groups(make_model, seed, memory_bytes)
        self._group_of = {member: group for group in self.groups for member in group.order}
        self._pool = ThreadPoolExecutor(threads, "population", torch.set_num_threads, (1,)) if threads > 1 else None

    def _make_groups(
        self, make_model: ModelFactory | Sequence[ModelFactory], seed: int, memory_bytes: int | None
    ) -> list[MemberGroup]:
        factories = list(make_model) if isinstance(make_model, Sequence) else [make_model] * self.num_members
        if len(factories) != self.num_members:
            problem = f"are {len(factories)} functions for {self.num_members} members"
            raise ConfigError("make_model", len(factories), problem, "give one for all, or one a member")

        def make(member: int) -> nn.Module:
            with preserve_rng(seed + member, has_cuda=self.device.type == "cuda"):
                return factories[member]().to(self.device)

        models: dict[object, nn.Module] = {}
        groups: dict[object, list[int]] = {}
        for member in range(self.num_members):
            model = make(member)
            structure = _find_structure(model)
            models.setdefault(structure, model)
            groups.setdefault(structure, []).append(member)
        layouts = [(RowLayout(models[structure], self.device), len(each)) for structure, each in groups.items()]
        resident = plan_resident(layouts, len(self.setting.optimizer.slots), self.device, memory_bytes)
        member_groups = [
            MemberGroup(models[structure], each, self.setting, self.generators, self.hyper_parameters, most)
            for (structure, each), most in zip(groups.items(), resident, strict=True)
        ]
        for group in member_groups:
            for row, member in enumerate(group.order):
                group.rows.load_model(row, make(member))
        return member_groups

    def step(self, batch: Any) -> Tensor:
        """Update every member that is not retired once. Returns the losses before it, [K]; NaN for retired ones."""
        losses = torch.full((self.num_members,), torch.nan, device=self.device)
        for result in self.train([batch]):
            losses[list(result.members)] = result.losses[0].to(losses.dtype)
        return losses

    def train(self, batches: Iterable[Any] | Callable[[Sequence[int]], Iterable[Any]]) -> Iterator[ChunkResult]:
        """Make one update for each batch, of every member that is not retired. Yields each chunk as it is ready.

        batches: of all members, [B, ...], or [K, B, ...] where the order is own; or a function of members which yields
                 their batches, [B, ...] or [k, B, ...]: called once a chunk, from the chunk's thread
        A chunk takes all its steps before another one takes its place: no thread waits for another. An iterator that is
        closed early leaves the chunks that it has not yielded trained or not; others are as they were.
        """
        source = self._make_source(batches)
        self._choose_engines(source)
        for members, losses in self._run(lambda group, part: group.train(part, source)):
            yield ChunkResult(members, losses)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """The loss and the metrics of each member, {name: [K]}: means over the samples of all batches [B, ...].

        Members are computed together, as in training. NaN for retired members.
        """
        source = _share(list(batches))
        self._choose_engines(source)
        measured: dict[str, Tensor] = {}
        for members, values in self._run(lambda group, part: group.evaluate(part, source)):
            for name, value in values.items():
                column = measured.setdefault(name, torch.full((self.num_members,), torch.nan, dtype=torch.float64))
                column[list(members)] = value.cpu()
        return measured

    def exploit(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let the loser of each (loser, winner) continue from a copy of the winner's weights, state and buffers.

        Its hyper-parameters and its generator stay. A retired loser is trained again. The pairs happen at once: a
        winner that also loses is copied as it was. Raises ConfigError for members of different structure.
        """
        pairs = list(pairs)
        for loser, winner in pairs:
            if self._find_group(loser) is not self._find_group(winner):
                problem = f"member {loser} has another architecture than member {winner}"
                raise ConfigError("exploit", (loser, winner), problem, "copy within a group")
        losers = {loser for loser, _ in pairs}
        for loser, _ in pairs:
            self._group_of[loser].set_active(loser, True)
        copies = [(self._group_of[loser], self._group_of[loser].find_row(loser), winner) for loser, winner in pairs]
        saved = {
            winner: self._group_of[winner].rows.narrow(self._group_of[winner].find_row(winner), 1).clone()
            for _, winner in pairs
            if winner in losers
        }
        for group, row, winner in copies:
            if winner in saved:
                group.rows.narrow(row, 1).copy_from(saved[winner])
            else:
                group.rows.copy(group.find_row(winner), row)

    def retire(self, member: int) -> None:
        """Train a member no longer, until it is the loser of an exploit. Others are untouched."""
        self._find_group(member).set_active(member, False)

    def find_failed(self) -> list[int]:
        """The members, not retired, that have a weight that is not finite."""
        failed = []
        for group in self.groups:
            is_finite = group.rows.weights[: group.num_active].isfinite().all(1).tolist()
            failed += [group.order[row] for row, each in enumerate(is_finite) if not each]
        return sorted(failed)

    @property
    def retired(self) -> list[int]:
        """The members that are not trained."""
        return sorted(member for group in self.groups for member in group.order[group.num_active :])

    @property
    def choices(self) -> list[EngineChoice | None]:
        """Of each group, the engine with what the trial measured, and why others do not fit; None before a batch."""
        return [group.choice for group in self.groups]

    def set_hyper_parameters(self, member: int, values: Mapping[str, float]) -> None:
        """Change some of a member's values. Raises ConfigError for unknown names and values out of range."""
        self._find_group(member)
        for name, value in values.items():
            if name not in self.hyper_parameters:
                problem = "the population has no such hyper-parameter"
                raise ConfigError(name, value, problem, f"one of {', '.join(self.hyper_parameters)}")
            _check_value(name, value)
            self.hyper_parameters[name][member] = value

    def member_state_dict(self, member: int) -> dict[str, Tensor]:
        """A member as an ordinary state dict of its model."""
        group = self._find_group(member)
        return group.rows.state_dict(group.find_row(member))

    def load_member(self, member: int, state: Mapping[str, Tensor]) -> None:
        """A member from a state dict of its model; its optimizer starts afresh. Raises SpecMismatch."""
        group = self._find_group(member)
        group.rows.load_state_dict(group.find_row(member), state)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs: tensors, numbers and lists. Rows share the population's memory."""
        return {
            "hyper_parameters": dict(self.hyper_parameters),
            "device": self.device.type,
            "generators": [generator.get_state() for generator in self.generators],
            "groups": [group.state_dict() for group in self.groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved population would have. Raises SpecMismatch when it has other members."""
        members = [sorted(group["order"]) for group in state["groups"]]
        if members != [sorted(group.order) for group in self.groups]:
            raise SpecMismatch("population", members, "the saved population has other members or architectures")
        if state["hyper_parameters"].keys() != self.hyper_parameters.keys():
            problem = f"the population has {sorted(self.hyper_parameters)}"
            raise SpecMismatch("hyper_parameters", sorted(state["hyper_parameters"]), problem)
        for group, saved in zip(self.groups, state["groups"], strict=True):
            group.load_state_dict(saved)
        if state["device"] == self.device.type:  # a generator's state is of no use on another kind of device
            for generator, saved in zip(self.generators, state["generators"], strict=True):
                generator.set_state(saved)
        for name, column in state["hyper_parameters"].items():
            self.hyper_parameters[name].copy_(column)

    def _find_group(self, member: int) -> MemberGroup:
        if member not in self._group_of:
            raise ConfigError("member", member, "no such member", f"0 to {self.num_members - 1}")
        return self._group_of[member]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
        for group in self.groups:
            group.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_source(self, batches: Iterable[Any] | Callable[[Sequence[int]], Iterable[Any]]) -> BatchSource:
        is_own = self.order == "own"
        if callable(batches):
            find_batches = batches
            return lambda members: (MemberBatch(content, is_own) for content in find_batches(members))
        contents = list(batches)
        if not is_own:
            return _share(contents)
        for content in contents:
            if any(len(tensor) != self.num_members for tensor in tensors_of(content)):
                problem = f"a batch is not [{self.num_members}, B, ...]"
                raise ConfigError("order", "own", problem, "give each member its samples, or order=shared")
        return lambda members: (MemberBatch(content, True).select(members) for content in contents)

    def _choose_engines(self, source: BatchSource) -> None:
        for group in self.groups:
            if self._pool is None:
                group.choose_engine(source)
            else:  # where it will compute: with one thread of torch
                self._pool.submit(group.choose_engine, source).result()

    def _run(self, function: Callable[[MemberGroup, Part], T]) -> Iterator[tuple[tuple[int, ...], T]]:
        """The function for every chunk, in the threads. Yields (members, result) as they are ready."""
        work = [(group, part) for group in self.groups for part in group.parts()]
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.store.loading(group.parts()))
            if self._pool is None or len(work) == 1:
                for group, part in work:
                    yield tuple(group.members_of(part)), function(group, part)
                return
            futures = {self._pool.submit(function, group, part): (group, part) for group, part in work}
            try:
                for future in as_completed(futures):
                    group, part = futures[future]
                    yield tuple(group.members_of(part)), future.result()
            finally:
                for future in futures:
                    future.cancel()
                wait(futures)


def _share(contents: Sequence[Any]) -> BatchSource:
    return lambda members: (MemberBatch(content) for content in contents)


def _find_structure(model: nn.Module) -> object:
    """What models that are computed together have in common: layers with their settings, and shapes."""
    layers = []
    for name, module in model.named_modules():
        settings = [each for each in sorted(vars(module).items()) if isinstance(each[1], int | float | str | bool)]
        layers.append((name, type(module), module.extra_repr(), tuple(settings)))
    return tuple(layers), tuple((name, tensor.shape) for name, tensor in model.state_dict().items())


def _read_columns(given: HyperParameters, num_members: int) -> dict[str, Tensor]:
    """Columns [K], the defaults included. Raises ConfigError for unknown names, counts and values out of range."""
    columns = {}
    for name, value in {**_DEFAULTS, **given}.items():
        if name not in _DEFAULTS and not name.startswith("augmentation."):
            remedy = f"one of {', '.join(_DEFAULTS)}, or augmentation.NAME"
            raise ConfigError(f"hyper_parameters.{name}", value, "no such hyper-parameter", remedy)
        column = torch.as_tensor(value, dtype=torch.float32)
        if column.ndim > 1 or (column.ndim == 1 and len(column) != num_members):
            problem = f"has {list(column.shape)} numbers for {num_members} members"
            raise ConfigError(f"hyper_parameters.{name}", value, problem, "give one number, or one a member")
        for each in column.reshape(-1).tolist():
            _check_value(name, each)
        columns[name] = column.expand(num_members).clone()
    return columns


def _check_value(name: str, value: float) -> None:
    """Raise ConfigError for a value out of range."""
    if not math.isfinite(value):
        raise ConfigError(f"hyper_parameters.{name}", value, "is not finite")
    if name in _DEFAULTS and not 0 <= value <= _MOST.get(name, math.inf):
        raise ConfigError(f"hyper_parameters.{name}", value, "is out of range", f"0 to {_MOST.get(name, math.inf):g}")
