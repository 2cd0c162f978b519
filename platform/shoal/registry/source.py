"""A registered model as a WeightSource: an endpoint that follows an alias gets each version the alias moves to.

Called by endpoints and by whoever starts from registered weights. Never writes to the registry.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from shoal.registry.registry import ModelVersion, Registry, split_ref
from shoal.weights import WeightSnapshot

POLL_INTERVAL_S = 0.2


class RegistrySource:
    """What `ref` means in `registry`, now and as it changes; snapshots carry the version of the registry.

    An alias can move back, so newer means: what the alias moved to since. After a rollback from 3 to 2,
    `wait_newer(3)` gives version 2; a consumer applies what it is given, and does not compare numbers.
    """

    def __init__(self, registry: Registry, ref: str, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._registry, self._ref = registry, ref
        self._name, self._word = split_ref(ref)
        self._poll_interval_s = poll_interval_s
        self._closed = threading.Event()
        self._loaded: WeightSnapshot | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Travels to replicas as what it refers to; they must see the same folder."""
        return (_source_of, (self._registry.root, self._ref, self._poll_interval_s))

    def latest(self) -> WeightSnapshot | None:
        """The weights that the reference means; None when nothing has been registered for it yet.

        Raises WeightsError when they are damaged.
        """
        return self._load(self._registry.get(self._ref)) if self._registry.has(self._ref) else None

    def wait_newer(self, than: int, timeout_s: float) -> WeightSnapshot | None:
        """The weights that the reference means, once that is something newer than version `than`; None in the end."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._registry.has(self._ref):
                # In this order: an alias that moves in between must not make what it meant before look newer.
                has_left = self._registry.aliases(self._name).has_left(self._word, than)
                found = self._registry.get(self._ref)
                if has_left or found.version > than:
                    return self._load(found)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or self._closed.wait(min(self._poll_interval_s, remaining_s)):
                return None

    def close(self) -> None:
        """Wake every waiter with None. Idempotent."""
        self._closed.set()

    def _load(self, found: ModelVersion) -> WeightSnapshot:
        loaded = self._loaded
        if loaded is None or loaded.version != found.version:
            loaded = self._loaded = found.snapshot()
        return loaded


def _source_of(root: Path, ref: str, poll_interval_s: float) -> RegistrySource:
    return RegistrySource(Registry(root), ref, poll_interval_s)
