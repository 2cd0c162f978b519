"""What readers of inputs know of a model's tensors: name, datatype, shape and columns.

Called by `table` and by `shoal predict`, which reads words, JSON and pictures without Arrow.
"""

from __future__ import annotations

from typing import Protocol


class TensorDescription(Protocol):
    """An input or output, as in the registry and the protocol. `shape[0]` is the batch; -1 is any size."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def columns(self) -> list[str]: ...


def format_tensor_spec(spec: TensorDescription) -> str:
    """`FP32 [any, 64]`."""
    sizes = ", ".join("any" if size == -1 else str(size) for size in spec.shape)
    return f"{spec.datatype} [{sizes}]"
