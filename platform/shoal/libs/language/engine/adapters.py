"""Adapters of low rank (arXiv:2106.09685) of one base, side by side in a forward.

A hook on each linear layer adds, to the rows of each adapter, its own low-rank product; the base product is computed
once for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.libs.language.engine.cells import ACTIVE
from shoal.libs.language.engine.models import CausalModel

_PREFIX = "base_model.model."  # of peft's names


class Adapter:
    """Pairs of matrices [rank, in] and [out, rank] by the name of a linear layer; their product is scaled."""

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
