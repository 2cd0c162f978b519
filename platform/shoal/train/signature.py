"""The tensors that a network takes and gives, found by running it once on one batch.

Called before a run ends, so that an endpoint knows what it may be asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
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
    """Names, datatypes and shapes; dimension 0 is the batch.

    Raises ConfigError for what is not made of tensors, and for a `postprocess` of the Task whose answers they are not.
    """
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
    given = _named_outputs(outputs)
    signature = Signature(inputs=_tensors(task, taken), outputs=_tensors(task, given))
    _require_same(task, dict(given))
    return signature


def _require_same(task: Task, outputs: Mapping[str, Tensor]) -> None:
    """An endpoint would refuse what `postprocess` makes of them, for every request."""
    if task.postprocess is None or any(value.dtype is torch.bfloat16 for value in outputs.values()):
        return  # NumPy has no bfloat16: an endpoint hands over its bits
    arrays = {name: value.numpy(force=True) for name, value in outputs.items()}
    who, remedy = f"{type(task).__name__}.postprocess", "it may change values, but no names, datatypes and shapes"
    try:
        answers: object = task.postprocess({name: array.copy() for name, array in arrays.items()})
    except Exception as error:  # whatever a user's hook raises, it would raise it for every request
        problem = f"{who} raised {type(error).__name__}: {error}"
        raise ConfigError("task", type(task).__name__, problem, "it is given the outputs as arrays by name") from error
    if not isinstance(answers, Mapping):
        problem = f"{who} gave a {type(answers).__name__}"
        raise ConfigError("task", type(task).__name__, problem, "return a dict of arrays by name")
    for name, array in arrays.items():
        answer = answers.get(name)
        if answer is None:
            problem = f"{who} gave no {name!r}, but {', '.join(map(repr, answers)) or 'nothing'}"
            raise ConfigError("task", type(task).__name__, problem, remedy)
        if not isinstance(answer, np.ndarray) or (answer.dtype, answer.shape) != (array.dtype, array.shape):
            problem = f"{who} gave {name!r} as {_kind(answer)}, and the network as {_kind(array)}"
            raise ConfigError("task", type(task).__name__, problem, remedy)


def _kind(value: object) -> str:
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


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
