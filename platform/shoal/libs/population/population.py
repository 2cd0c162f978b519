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

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
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

    make_model:       a member's model, called with the seed of the member set; all have the same structure
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
        make_model: ModelFactory,
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
        self.num_members = members
        self.order = order
        self.device = torch.device(device)
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
        self.group = self._make_group(make_model, seed, memory_bytes)
        self._pool = ThreadPoolExecutor(threads, "population", torch.set_num_threads, (1,)) if threads > 1 else None

    def _make_group(self, make_model: ModelFactory, seed: int, memory_bytes: int | None) -> MemberGroup:
        def make(member: int) -> nn.Module:
            with preserve_rng(seed + member, has_cuda=self.device.type == "cuda"):
                return make_model().to(self.device)

        model = make(0)
        num_slots = len(self.setting.optimizer.slots)
        resident = plan_resident(RowLayout(model, self.device), self.num_members, num_slots, self.device, memory_bytes)
        group = MemberGroup(
            model, self.num_members, self.setting, self.generators, self.hyper_parameters, resident=resident
        )
        for member in range(self.num_members):
            group.rows.load_model(member, make(member))
        return group

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
        self._choose_engine(source)
        for members, losses in self._run(lambda part: self.group.train(part, source)):
            yield ChunkResult(members, losses)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """The loss and the metrics of each member, {name: [K]}: means over the samples of all batches [B, ...].

        Members are computed together, as in training. NaN for retired members.
        """
        source = _share(list(batches))
        self._choose_engine(source)
        measured: dict[str, Tensor] = {}
        for members, values in self._run(lambda part: self.group.evaluate(part, source)):
            for name, value in values.items():
                column = measured.setdefault(name, torch.full((self.num_members,), torch.nan, dtype=torch.float64))
                column[list(members)] = value.cpu()
        return measured

    def exploit(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let the loser of each (loser, winner) continue from a copy of the winner's weights, state and buffers.

        Its hyper-parameters and its generator stay. A retired loser is trained again. The pairs happen at once: a
        winner that also loses is copied as it was.
        """
        pairs = list(pairs)
        group = self.group
        for member in itertools.chain.from_iterable(pairs):
            group.find_row(member)  # an unknown one is refused before anything changes
        for loser, _ in pairs:
            group.set_active(loser, True)
        rows = group.rows
        copies = [(group.find_row(winner), group.find_row(loser)) for loser, winner in pairs]
        written = {target for _, target in copies}
        saved = {source: rows.narrow(source, 1).clone() for source, _ in copies if source in written}
        for source, target in copies:
            if source in saved:
                rows.narrow(target, 1).copy_from(saved[source])
            else:
                rows.copy(source, target)

    def retire(self, member: int) -> None:
        """Train a member no longer, until it is the loser of an exploit. Others are untouched."""
        self.group.set_active(member, False)

    def find_failed(self) -> list[int]:
        """The members, not retired, that have a weight that is not finite."""
        is_finite = self.group.rows.weights[: self.group.num_active].isfinite().all(1).tolist()
        return sorted(self.group.order[row] for row, each in enumerate(is_finite) if not each)

    @property
    def retired(self) -> list[int]:
        """The members that are not trained."""
        return sorted(self.group.order[self.group.num_active :])

    @property
    def choice(self) -> EngineChoice | None:
        """The engine with what the trial measured, and why others do not fit; None before a batch."""
        return self.group.choice

    def set_hyper_parameters(self, member: int, values: Mapping[str, float]) -> None:
        """Change some of a member's values. Raises ConfigError for unknown names and values out of range."""
        self.group.find_row(member)
        for name, value in values.items():
            if name not in self.hyper_parameters:
                problem = "the population has no such hyper-parameter"
                raise ConfigError(name, value, problem, f"one of {', '.join(self.hyper_parameters)}")
            _check_value(name, value)
            self.hyper_parameters[name][member] = value

    def member_state_dict(self, member: int) -> dict[str, Tensor]:
        """A member as an ordinary state dict of its model."""
        return self.group.rows.state_dict(self.group.find_row(member))

    def load_member(self, member: int, state: Mapping[str, Tensor]) -> None:
        """A member from a state dict of its model; its optimizer starts afresh. Raises SpecMismatch."""
        self.group.rows.load_state_dict(self.group.find_row(member), state)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs: tensors, numbers and lists. Rows share the population's memory."""
        return {
            "hyper_parameters": dict(self.hyper_parameters),
            "device": self.device.type,
            "generators": [generator.get_state() for generator in self.generators],
            "groups": [self.group.state_dict()],  # a list, for saved populations have one
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved population would have. Raises SpecMismatch when it has other members."""
        members = [len(group["order"]) for group in state["groups"]]
        if members != [self.num_members]:
            raise SpecMismatch("population", members, "the saved population has other members")
        if state["hyper_parameters"].keys() != self.hyper_parameters.keys():
            problem = f"the population has {sorted(self.hyper_parameters)}"
            raise SpecMismatch("hyper_parameters", sorted(state["hyper_parameters"]), problem)
        self.group.load_state_dict(state["groups"][0])
        if state["device"] == self.device.type:  # a generator's state is of no use on another kind of device
            for generator, saved in zip(self.generators, state["generators"], strict=True):
                generator.set_state(saved)
        for name, column in state["hyper_parameters"].items():
            self.hyper_parameters[name].copy_(column)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
        self.group.store.close()

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

    def _choose_engine(self, source: BatchSource) -> None:
        if self._pool is None:
            self.group.choose_engine(source)
        else:  # where it will compute: with one thread of torch
            self._pool.submit(self.group.choose_engine, source).result()

    def _run(self, function: Callable[[Part], T]) -> Iterator[tuple[tuple[int, ...], T]]:
        """The function for every chunk, in the threads. Yields (members, result) as they are ready."""
        parts = self.group.parts()
        with self.group.store.loading(parts):
            if self._pool is None or len(parts) == 1:
                for part in parts:
                    yield tuple(self.group.members_of(part)), function(part)
                return
            futures = {self._pool.submit(function, part): part for part in parts}
            try:
                for future in as_completed(futures):
                    yield tuple(self.group.members_of(futures[future])), future.result()
            finally:
                for future in futures:
                    future.cancel()
                wait(futures)


def _share(contents: Sequence[Any]) -> BatchSource:
    return lambda members: (MemberBatch(content) for content in contents)


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
