"""The weights that new answers get: those of the base model and of its adapters, and those that wait for memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.libs.language.engine.adapters import Adapter
from shoal.libs.language.engine.models import CausalModel

MAX_VERSIONS = 2  # of the base model's weights in memory
BASE = ""  # the base model's name among its adapters


@dataclass(frozen=True, eq=False)
class Weights:
    """What computes a token. CacheCells belong to one such object, and to no other with the same numbers."""

    model: CausalModel
    version: int | str
    adapter: Adapter | None = None


class CurrentWeights:
    """`current`: by the name of the adapter. Any thread may set and remove; `apply` is the engine's."""

    def __init__(self, model: CausalModel, version: int | str) -> None:
        self.current: dict[str, Weights] = {BASE: Weights(model, version)}
        self._lock = threading.Lock()  # of what the next step applies:
        self._incoming: dict[str, Weights] = {}
        self._removed: set[str] = set()

    @property
    def base(self) -> Weights:
        return self.current[BASE]

    @property
    def has_incoming(self) -> bool:
        return bool(self._incoming)

    @property
    def names(self) -> Set[str]:
        """All of them, those that wait as well."""
        with self._lock:
            return self.current.keys() | self._incoming.keys()

    @property
    def pending(self) -> int | str | None:
        """The base's version that waits."""
        with self._lock:
            return self._incoming[BASE].version if BASE in self._incoming else None

    def set(self, version: int | str, weights: nn.Module | Mapping[str, Tensor], adapter: str, scale: float) -> None:
        """See `SlotEngine.set_weights`."""
        with self._lock:
            base = self._incoming.get(BASE, self.base)
        if adapter:
            state = weights if isinstance(weights, Mapping) else weights.state_dict()
            incoming = Weights(base.model, version, Adapter(state, scale, base.model))
        else:
            incoming = Weights(base.model.replace_weights(weights), version)
        with self._lock:
            self._incoming[adapter] = incoming
            self._removed.discard(adapter)

    def remove(self, adapter: str) -> None:
        """See `SlotEngine.remove_adapter`."""
        with self._lock:
            self._incoming.pop(adapter, None)
            self._removed.add(adapter)

    def apply(self, models: Set[CausalModel]) -> None:
        """Make what came the current ones, where memory allows.

        models: those that running answers need
        """
        with self._lock:
            base = self._incoming.get(BASE)
            if base is not None and len(models | {base.model}) <= MAX_VERSIONS:
                self.current = {BASE: self._incoming.pop(BASE)}
                base = None
            for name, weights in list(self._incoming.items()):
                if name and (base is None or weights.model is not base.model):
                    del self._incoming[name]
                    if weights.model is self.base.model:
                        self.current = self.current | {name: weights}
            if self._removed:
                self.current = {name: each for name, each in self.current.items() if name not in self._removed}
                self._removed.clear()
