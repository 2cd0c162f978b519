"""The members of a population: their rows, their generators and the engine that computes them.

Owns which row belongs to which member, how rows are divided into chunks, and a chunk's steps. Called by Population,
from its threads: one thread a chunk. Decides nothing about members.
Legend: K members, k of a chunk, B samples of a batch.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.batch_tree import map_tensors
from shoal.errors import ConfigError
from shoal.libs.population.engines.engine import MemberChunk, MemberEngine
from shoal.libs.population.engines.select_engine import EngineChoice, clone_generator, make_engine, select_engine
from shoal.libs.population.member_rows import MemberRows, RowLayout
from shoal.libs.population.objective import MemberBatch, Objective
from shoal.libs.population.row_optimizer import RowOptimizer
from shoal.libs.population.row_store import Part, RowStore

BatchSource = Callable[[Sequence[int]], Iterable[MemberBatch]]  # the batches of some members, in their order
AugmentFunction = Callable[[Any, Mapping[str, Tensor], Sequence[torch.Generator]], Any]


@dataclass(frozen=True)
class GroupSetting:
    """How members are computed.

    augment:  (batch [k, B, ...], {name: [k]}, generators [k]) to such a batch; None: batches stay as they are
    engine:   a name, or auto; `chunk`: the most members of a chunk, None: by trial
    threads:  that compute chunks at once
    """

    objective: Objective
    optimizer: RowOptimizer
    device: torch.device
    augment: AugmentFunction | None = None
    engine: str = "auto"
    chunk: int | None = None
    threads: int = 1


class MemberGroup:
    """K members, named by their numbers.

    order:      the member of each row. The first `num_active` rows are trained, the others are retired
    generators: of every member
    values:     the hyper-parameters of every member, {name: [K]}
    resident:   the most members on the device; None: all
    """

    def __init__(
        self,
        model: nn.Module,
        num_members: int,
        setting: GroupSetting,
        generators: Sequence[torch.Generator],
        values: Mapping[str, Tensor],
        resident: int | None = None,
    ) -> None:
        self.setting = setting
        self.model = model
        self.layout = RowLayout(model, setting.device)
        self.order, self.num_active = list(range(num_members)), num_members
        self.generators, self.values = generators, values
        self.store = RowStore(
            self.layout, num_members, setting.optimizer.slots, setting.device,
            resident=resident, threads=setting.threads,
        )  # fmt: skip
        self.choice: EngineChoice | None = None
        self._restored: list[Any] | None = None  # the engine and the chunk of a saved group
        self._engines: queue.SimpleQueue[MemberEngine] = queue.SimpleQueue()

    @property
    def rows(self) -> MemberRows:
        """Of all members, where they live."""
        return self.store.rows

    def find_row(self, member: int) -> int:
        """The row of a member. Raises ConfigError where there is none."""
        if member not in self.order:
            raise ConfigError("member", member, "no such member", f"0 to {len(self.order) - 1}")
        return self.order.index(member)

    def members_of(self, part: Part) -> list[int]:
        """The members of a chunk, in its order."""
        return self.order[part[0] : part[0] + part[1]]

    def set_active(self, member: int, is_active: bool) -> None:
        """Retire a member, or bring it back: its row changes places with the last, or the first, of the others."""
        row = self.find_row(member)
        if (row < self.num_active) == is_active:
            return
        other = self.num_active if is_active else self.num_active - 1
        if row != other:
            self.rows.swap(row, other)
            self.order[row], self.order[other] = self.order[other], self.order[row]
        self.num_active += 1 if is_active else -1

    def parts(self) -> list[Part]:
        """Chunks of about equal size: as many as keep every thread busy, none larger than the engine's choice."""
        if not self.num_active:
            return []
        assert self.choice is not None, "choose_engine comes first"
        num_parts = math.ceil(self.num_active / min(self.choice.chunk, self.store.max_chunk))
        threads = self.setting.threads
        num_parts = min(self.num_active, math.ceil(num_parts / threads) * threads)
        bounds = [self.num_active * index // num_parts for index in range(num_parts + 1)]
        return [(start, end - start) for start, end in itertools.pairwise(bounds)]

    def choose_engine(self, find_batches: BatchSource) -> None:
        """Choose before the first step: what a saved group had, or by a short trial with the first batch."""
        if self.choice is not None or not self.num_active:
            return
        size = min(math.ceil(self.num_active / self.setting.threads), self.store.max_chunk, 64)
        members = self.members_of((0, size))
        rows = self.rows.narrow(0, size)
        if not self.store.is_resident:
            rows = rows.clone(self.setting.device)
        generators = [clone_generator(self.generators[member]) for member in members]
        first = next(iter(find_batches(members)), None)
        if first is None:
            raise ConfigError("batches", None, "has no batch", "give at least one")
        prepared = self._prepare(first, members, generators)
        chunk = MemberChunk(rows, generators)
        self.choice = self._select(chunk, prepared)
        for _ in range(self.setting.threads):  # what an engine does at its first batch, tracing, is for one thread
            engine = self._make_engine(self.choice)
            engine.compute_gradients(MemberChunk(rows.narrow(0, 1).clone(), generators[:1]), prepared.narrow(0, 1))
            self._engines.put(engine)

    def _select(self, chunk: MemberChunk, batch: MemberBatch) -> EngineChoice:
        setting, objective = self.setting, self.setting.objective
        share = self.num_active / setting.threads
        if self._restored is not None and setting.engine == "auto" and setting.chunk is None:
            engine, size = str(self._restored[0]), int(self._restored[1])
            try:
                return select_engine(self.model, objective, chunk, batch, share=share, engine=engine, max_chunk=size)
            except ConfigError:  # this machine has no such engine, such as no compiler
                self._restored = None
        return select_engine(
            self.model, objective, chunk, batch, share=share, engine=setting.engine, max_chunk=setting.chunk
        )

    def _make_engine(self, choice: EngineChoice) -> MemberEngine:
        objective, draws_randomly = self.setting.objective, choice.draws_randomly
        return make_engine(choice.engine, self.model, objective, draws_randomly=draws_randomly)

    def train(self, part: Part, find_batches: BatchSource) -> Tensor:
        """Make one update for each batch. Returns the losses before each, [steps, k]."""
        members = self.members_of(part)
        generators = [self.generators[member] for member in members]
        columns = {
            name.removeprefix("optimizer."): column[members].unsqueeze(1).to(self.setting.device)
            for name, column in self.values.items()
            if name.startswith("optimizer.")
        }
        losses = []
        with self.store.open(part) as rows, self._borrow_engine() as engine:
            chunk = MemberChunk(rows, generators)
            for batch in find_batches(members):
                losses.append(engine.compute_gradients(chunk, self._prepare(batch, members, generators)))
                self.setting.optimizer.update(rows, columns)
            return torch.stack(losses) if losses else torch.empty(0, len(members))

    def evaluate(self, part: Part, find_batches: BatchSource) -> dict[str, Tensor]:
        """The loss and metrics of each member, [k]: means over the samples."""
        totals = dict[str, Tensor]()  # [k, 2] each
        members = self.members_of(part)
        with self.store.open(part, is_changed=False) as rows, self._borrow_engine() as engine, torch.no_grad():
            chunk = MemberChunk(rows, [self.generators[member] for member in members])
            for batch in find_batches(members):
                chosen = batch.to(self.setting.device)
                for name, values in self.setting.objective.measure(engine.predict(chunk, chosen), chosen).items():
                    totals[name] = totals.get(name, 0.0) + values
        return {name: total[:, 0] / total[:, 1] for name, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Rows in their order, and the engine: another one would round otherwise. Rows share the group's memory."""
        return {
            "order": list(self.order),
            "num_active": self.num_active,
            "rows": self.rows.packed_state(),
            "engine": self._restored if self.choice is None else [self.choice.engine, self.choice.chunk],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved group would have. Raises SpecMismatch for rows of other shapes."""
        self.rows.load_packed_state(state["rows"])
        self.order, self.num_active = list(state["order"]), int(state["num_active"])
        self._engines, self.choice = queue.SimpleQueue(), None
        self._restored = None if state["engine"] is None else list(state["engine"])

    def _prepare(
        self, batch: MemberBatch, members: Sequence[int], generators: Sequence[torch.Generator]
    ) -> MemberBatch:
        """The batch of a chunk on the device, augmented."""
        chosen = batch.to(self.setting.device)
        if self.setting.augment is None:
            return chosen
        content = chosen.content
        if not chosen.is_own:
            content = map_tensors(content, lambda tensor: tensor.expand(len(members), *tensor.shape))
        values = {
            name.removeprefix("augmentation."): column[members].to(self.setting.device)
            for name, column in self.values.items()
            if name.startswith("augmentation.")
        }
        return MemberBatch(self.setting.augment(content, values, generators), True)

    @contextmanager
    def _borrow_engine(self) -> Iterator[MemberEngine]:
        """An engine that no other thread uses."""
        assert self.choice is not None, "choose_engine comes first"
        try:
            engine = self._engines.get_nowait()
        except queue.Empty:  # one was lost to an error
            engine = self._make_engine(self.choice)
        yield engine
        self._engines.put(engine)
