"""The memory of a replica's models: reserved before a load, released when a version is dropped.

Owned by the model manager, on its event loop. Knows bytes and names, and loads nothing. A version's bytes are those of
its payload until they were measured: by how much the process grew during a load that was alone, if the payload is large
enough for that to tell.

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
from dataclasses import dataclass

from shoal.serve.messages.desired_state import ModelPlan

MEASURED_FROM_BYTES = 16 << 20  # the interpreter, caches and other requests' tensors grow a process, too


@dataclass
class ModelLoads:
    """The loads of one model on this replica. version_bytes: of a version in memory"""

    version_bytes: int = 0
    num_loads: int = 0
    last_s: float = 0.0
    total_s: float = 0.0


class ModelMemory:
    """capacity_bytes: of the loaded versions of models on demand, and of pinned ones; process_bytes: of the process"""

    def __init__(self, capacity_bytes: int, process_bytes: Callable[[], int]) -> None:
        self._capacity_bytes, self._process_bytes = capacity_bytes, process_bytes
        self._loading: dict[Hashable, int] = {}
        self._loaded: dict[Hashable, dict[int, int]] = {}  # bytes of each version, by the served model
        self._loads: defaultdict[str, ModelLoads] = defaultdict(ModelLoads)
        self._num_loads = 0
        self._changed = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """The bytes of all versions that are loaded or being loaded."""
        return sum(self._loading.values()) + sum(sum(versions.values()) for versions in self._loaded.values())

    def get_resident_bytes(self, served: Hashable) -> int:
        """The bytes of a served model's versions."""
        return sum(self._loaded.get(served, {}).values())

    def get_loads(self, name: str) -> ModelLoads:
        """The loads of a model."""
        return self._loads[name]

    @asynccontextmanager
    async def reserve(self, plan: ModelPlan, key: int, is_wanted: Callable[[], bool]) -> AsyncIterator[bool]:
        """Reserve a version's bytes for the time of its load, once they are there; False if it is not wanted any more.

        A model that every replica has does not wait.
        """
        loads = self._loads[plan.name]
        loads.version_bytes = max(loads.version_bytes, plan.size_bytes)
        while plan.replicas is not None and self.used_bytes + loads.version_bytes > self._capacity_bytes:
            if not is_wanted():
                break
            await self._changed.wait()
        if not is_wanted():
            yield False
            return
        self._loading[plan.name, key] = loads.version_bytes
        self._num_loads += 1
        number, is_alone = self._num_loads, len(self._loading) == 1
        before_bytes = self._process_bytes()
        try:
            yield True
            is_alone = is_alone and 1 < number == self._num_loads  # the first one imports the model's code
            if is_alone and plan.size_bytes >= MEASURED_FROM_BYTES:
                loads.version_bytes = max(plan.size_bytes, self._process_bytes() - before_bytes)
        finally:
            del self._loading[plan.name, key]
            self.notify()

    def add(self, served: Hashable, plan: ModelPlan, version: int, load_s: float) -> None:
        """Account for a version that was loaded, in so many seconds."""
        loads = self._loads[plan.name]
        loads.num_loads += 1
        loads.last_s = load_s
        loads.total_s += load_s
        self._loaded.setdefault(served, {})[version] = loads.version_bytes

    def retain(self, served: Hashable, versions: Iterable[int]) -> None:
        """Release the versions of a served model other than these."""
        before = self._loaded.get(served, {})
        remaining = {version: before[version] for version in versions if version in before}
        if remaining != before:
            self._loaded[served] = remaining
            if not remaining:
                del self._loaded[served]
            self.notify()

    def notify(self) -> None:
        """Let waiting loads see whether they fit, or are still wanted."""
        self._changed.set()
        self._changed = asyncio.Event()
