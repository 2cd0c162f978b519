"""Whether a checkpoint's index and a state have the same entries. Called by `checkpointer`; does not communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.json_state import Leaf
from shoal.weights.tensor_files import DTYPE_NAMES

Misfit = tuple[str, object, str, str]  # the arguments of SpecMismatch


def find_misfit(
    index: Mapping[str, Any], leaves: Mapping[str, Leaf], tensors: Mapping[str, torch.Tensor], here: str
) -> Misfit | None:
    """The first entry of this rank's state that the checkpoint `here` cannot fill."""
    for name in leaves:
        tensor = tensors.get(name)
        other = "tensors" if tensor is None else "values"
        if tensor is None and name in index["values"]:
            continue
        saved = index["tensors"].get(name)
        if name in index[other]:
            kind = "a tensor" if tensor is None else "not a tensor"
            return name, str(type(leaves[name].value).__name__), f"is {kind} in {here}", "load it into the same model"
        if tensor is None or saved is None:
            return name, "", f"is not in {here}", "load it into the same model and optimiser"
        held = (DTYPE_NAMES.get(tensor.dtype), list(tensor.shape), tensor.is_meta)
        if held != (saved["dtype"], saved["shape"], False):
            what = f"{'meta ' * tensor.is_meta}{tensor.dtype} {list(tensor.shape)}"
            return name, what, f"is {saved['dtype']} {saved['shape']} in {here}", "load it into the same model"
    return None


def find_leftovers(
    index: Mapping[str, Any], stored: Sequence[tuple[list[str], list[str], Misfit | None]], here: str
) -> Misfit | None:
    """The first entry of the checkpoint without a place in the state, which has places for others of its kind."""
    tops = tuple({f"{top}." for tops, _, _ in stored for top in tops})
    names = {name for _, names, _ in stored for name in names}
    for name in [*index["tensors"], *index["values"]]:
        if name not in names and name.startswith(tops):
            remedy = "load it into the same model and optimiser, whose state torch makes at its first step"
            return name, "", f"is in {here}, but the state has no place for it", remedy
    return None
