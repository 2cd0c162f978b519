"""The memory of a replica's models: reserved before a load, released when a version is dropped.

Owned by the model manager, on its event loop. Knows bytes and names, and loads nothing. A version's bytes are those of
the plan, since the controller decides what fits by the same. What is measured goes to the controller: by how much the
process grew during a load that was alone, if the version is large enough for that to tell.

| capacity         | what blocks                    | who unblocks              | close()                    |
|------------------|--------------------------------|---------------------------|----------------------------|
| `capacity_bytes` | `reserve`, while it is wanted  | a version that is dropped | none: the waiting task is  |
|                  | and does not fit               | (`notify`)                | cancelled with its manager |
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager

from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.replica_report import Residency

MEASURED_FROM_BYTES = 16 << 20  # the interpreter, caches and other requests' tensors grow a process, too


class ModelMemory:
    """capacity_bytes: of the loaded versions of models on demand, and of pinned ones; process_bytes: of the process"""

    def __init__(self, capacity_bytes: int, process_bytes: Callable[[], int]) -> None:
        self._capacity_bytes, self._process_bytes = capacity_bytes, process_bytes
        self._loading: dict[object, int] = {}
        self.resident_bytes: dict[Hashable, int] = {}  # by the served model
        self.loads: defaultdict[str, Residency] = defaultdict(Residency)  # what is counted of them
        self._num_loads = 0
        self._changed = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """The bytes of all versions that are loaded or being loaded."""
        return sum(self._loading.values()) + sum(self.resident_bytes.values())

    @asynccontextmanager
    async def reserve(self, version: int, find_plan: Callable[[], ModelPlan | None]) -> AsyncIterator[bool]:
        """Reserve a version's bytes for the time of its load, once they are there; False if it is not wanted any more.

        A model that every replica has does not wait.

        find_plan: the model's present plan; None if this replica has none any more
        """
        while (
            (plan := find_plan()) is not None
            and plan.replicas is not None
            and self.used_bytes + plan.size_bytes > self._capacity_bytes
        ):
            await self._changed.wait()
        if plan is None:
            yield False
            return
        load = object()
        self._loading[load] = plan.size_bytes
        self._num_loads += 1
        number, is_alone = self._num_loads, len(self._loading) == 1
        before_bytes = self._process_bytes()
        try:
            yield True
            is_alone = is_alone and 1 < number == self._num_loads  # the first one imports the model's code
            if is_alone and plan.size_bytes >= MEASURED_FROM_BYTES:
                self.loads[plan.name].measured_bytes[version] = self._process_bytes() - before_bytes
        finally:
            del self._loading[load]
            self.notify()

    def add(self, served: Hashable, plan: ModelPlan, load_s: float) -> None:
        """Account for a version that was loaded, in so many seconds."""
        loads = self.loads[plan.name]
        loads.loads += 1
        loads.load_s = load_s
        loads.total_load_s += load_s
        self.resident_bytes[served] = self.resident_bytes.get(served, 0) + plan.size_bytes

    def account(self, served: Hashable, resident_bytes: int) -> None:
        """Replace the bytes of a served model's versions; 0 releases it."""
        if resident_bytes != self.resident_bytes.pop(served, 0):
            self.notify()
        if resident_bytes:
            self.resident_bytes[served] = resident_bytes

    def retain_models(self, names: Iterable[str]) -> None:
        """Forget the loads of all models but these, and let waiting loads see what has changed."""
        self.loads = defaultdict(Residency, {name: self.loads[name] for name in names if name in self.loads})
        self.notify()

    def notify(self) -> None:
        """Let waiting loads see whether they fit, or are still wanted."""
        self._changed.set()
        self._changed = asyncio.Event()
