"""Values other than tensors, as JSON and back without loss; and a nested state flattened to dotted names.

Called by `checkpointer`. Supports only numbers, strings, bytes, None, lists, tuples, dicts and small tensors, so that
reading a checkpoint never runs code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shoal.errors import CheckpointError, ConfigError
from shoal.weights.tensor_files import DTYPE_NAMES, DTYPES


class Leaf(NamedTuple):
    """A value and its container, so that it can be replaced."""

    container: Any  # dict or list
    key: Any
    value: Any


def flatten(state: dict[str, Any]) -> dict[str, Leaf]:
    """Every leaf under its path, the names of dicts and indices of lists joined by dots.

    A list is traversed when it directly contains a tensor or a dict. Raises ConfigError when two leaves have one name.
    """
    leaves: dict[str, Leaf] = {}
    for name, leaf in _walk(state, ""):
        if name in leaves:
            raise ConfigError(name, leaf.value, "two parts of the state have this name", "rename one of them")
        leaves[name] = leaf
    return leaves


def _walk(container: Any, prefix: str) -> Iterator[tuple[str, Leaf]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(one, dict | torch.Tensor) for one in value)
        ):
            yield from _walk(value, name)
        else:
            yield name, Leaf(container, key, value)


def encode(value: Any, name: str) -> Any:
    """As JSON. Raises ConfigError naming the first unsupported value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list):
        return [encode(one, f"{name}.{index}") for index, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), name)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(one, f"{name}.{key}") for key, one in value.items()}
        return {"$items": [[encode(key, name), encode(one, f"{name}.{key}")] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dtype in DTYPE_NAMES
    if is_tensor and value.layout is torch.strided and not value.is_nested and not value.is_meta:
        flat = value.detach().cpu().contiguous().reshape(-1)
        text = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
        return {"$tensor": [DTYPE_NAMES[value.dtype], list(value.shape), text]}
    remedy = "give plain numbers, strings, lists, dicts or whole tensors"
    raise ConfigError(name, value, f"a checkpoint does not hold a {type(value).__name__}", remedy)


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises CheckpointError for invalid input."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(one) for key, one in value.items()}
    content = value[tag]
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(decode(one) for one in content)
    if tag == "$items":
        return {decode(key): decode(one) for key, one in content}
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$tensor":
        dtype, shape, text = content
        payload = bytearray(base64.b64decode(text))
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        return flat.view(DTYPES[dtype]).reshape(shape)
    raise CheckpointError(f"a value of the unknown kind {tag!r}")
