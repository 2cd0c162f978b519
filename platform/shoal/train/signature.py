"""The tensors that a network takes and gives, found by running it once on one batch.

Called before a run ends, so that an endpoint knows what it may be asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.registry import Signature, TensorSignature
from shoal.train.task import Task

DATATYPES = {
    **{torch.bool: "BOOL", torch.uint8: "UINT8", torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32"},
    **{torch.int64: "INT64", torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"},
    torch.float64: "FP64",
}


def signature_of(task: Task, model: nn.Module, batch: Any) -> Signature:
    """Names, datatypes and shapes; dimension 0 is the batch. Raises ConfigError for what is not made of tensors."""
    inputs = task.inputs(batch)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(*inputs)
    finally:
        model.train(was_training)
    names = [*inspect.signature(model.forward).parameters]
    taken = [(names[index] if index < len(names) else f"input_{index}", value) for index, value in enumerate(inputs)]
    return Signature(inputs=_tensors(task, taken), outputs=_tensors(task, _named_outputs(outputs)))


def _named_outputs(outputs: Any) -> list[tuple[str, Any]]:
    if isinstance(outputs, Tensor):
        return [("output", outputs)]
    if isinstance(outputs, Mapping):
        return [(str(name), value) for name, value in outputs.items() if isinstance(value, Tensor)]
    if isinstance(outputs, tuple | list):
        return [(f"output_{index}", value) for index, value in enumerate(outputs)]
    return [("output", outputs)]


def _tensors(task: Task, named: list[tuple[str, Any]]) -> list[TensorSignature]:
    for name, value in named:
        if not isinstance(value, Tensor) or value.dtype not in DATATYPES:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            remedy = "a network that is to be registered takes and gives tensors"
            raise ConfigError("task", type(task).__name__, f"{name!r} of its network is a {kind}", remedy)
    return [
        TensorSignature(name=name, datatype=DATATYPES[value.dtype], shape=[-1, *value.shape[1:]])
        for name, value in named
    ]
