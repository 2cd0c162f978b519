"""The weights that new answers get: those of the base model and of its adapters, and those that wait for memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.libs.language.engine.cells import ACTIVE
from shoal.libs.language.engine.models import CausalModel

MAX_VERSIONS = 2  # of the base model's weights in memory
BASE = ""  # the base model's name among its adapters
_PREFIX = "base_model.model."  # of peft's names


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


class Adapter:
    """One of low rank (arXiv:2106.09685): pairs of matrices [rank, in] and [out, rank] by the name of a linear layer;
    their product is scaled. A hook on the layer adds it to the rows of each adapter, after one product of the base."""

    def __init__(self, state: Mapping[str, Tensor], scale: float, model: CausalModel) -> None:
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            layer, _, rest = name.removeprefix(_PREFIX).partition(".lora_")
            if rest[:1] not in ("A", "B"):
                raise ConfigError(
                    "adapter", name, "is no tensor of LoRA", "expected NAME.lora_A.weight, NAME.lora_B.weight"
                )
            halves.setdefault(layer, {})[rest[0]] = tensor.detach()
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, pair in halves.items():
            try:
                linear = model.module.get_submodule(layer)
            except AttributeError:
                linear = None
            if not isinstance(linear, nn.Linear) or linear is model.head:
                raise ConfigError("adapter", layer, "is no linear layer inside of the base model")
            weight = linear.weight
            if pair.keys() != {"A", "B"} or (pair["B"].shape[0], pair["A"].shape[1]) != weight.shape:
                raise ConfigError("adapter", layer, f"does not fit a layer of shape {tuple(weight.shape)}")
            down, up = (pair[half].to(weight.device, weight.dtype) for half in "AB")
            self.layers[layer] = down.t(), up.t() * scale
            _install(linear, layer)

    def add_to(self, name: str, x: Tensor, output: Tensor, rows: Tensor, fixed: bool) -> None:
        """Add the adapter's share of `rows` to a layer's output [T, out]; `fixed`: by products over all T."""
        if pair := self.layers.get(name):
            share = (x @ pair[0] @ pair[1])[rows] if fixed else x[rows] @ pair[0] @ pair[1]
            output.index_add_(0, rows, share)


def _install(linear: nn.Linear, name: str) -> None:
    """Let a layer of the base ask for the adapters of a forward, once."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if (work := ACTIVE.work) is not None and work.adapters:
            x, out = args[0].flatten(0, -2), output.view(-1, output.shape[-1])
            for adapter, rows in work.adapters:
                adapter.add_to(name, x, out, rows, work.is_fixed)

    if not hasattr(linear, "_takes_adapters"):
        linear._takes_adapters = True  # type: ignore[assignment]
        linear.register_forward_hook(hook)
