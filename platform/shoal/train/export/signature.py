"""The tensors of a network's inputs and outputs: as its Task gives them, or found by running it once on one batch.

Called before a run ends, so that an endpoint knows the format of requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from shoal.errors import ConfigError
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.registry import Signature, TensorSignature
from shoal.train.task import Hook, Task

DATATYPES = {
    **{torch.bool: "BOOL", torch.uint8: "UINT8", torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32"},
    **{torch.int64: "INT64", torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"},
    torch.float64: "FP64",
}


def infer_signature(task: Task, model: nn.Module, batch: Any) -> Signature:
    """Names, datatypes and shapes; dimension 0 is the batch. A Task's `postprocess` is applied to the outputs.

    If the Task has a `signature`, that is the result, and nothing is run.

    Raises ConfigError for values that are not tensors, and for a `postprocess` that fails or returns no arrays.
    """
    given: object = task.signature()
    if isinstance(given, Signature):
        return given
    if given is not None:
        problem = f"{type(task).__name__}.signature gave a {type(given).__name__}"
        raise ConfigError("task", type(task).__name__, problem, "return a shoal.registry.Signature, or None")
    inputs = task.inputs(batch)
    with eval_mode(model), torch.no_grad():
        outputs = model(*inputs)
    names = [*inspect.signature(model.forward).parameters]
    taken = [(names[index] if index < len(names) else f"input_{index}", value) for index, value in enumerate(inputs)]
    named: list[tuple[str, Any]] = [("output", outputs)]
    if isinstance(outputs, Mapping):
        named = [(str(name), value) for name, value in outputs.items() if isinstance(value, Tensor)]
    elif isinstance(outputs, tuple | list):
        named = [(f"output_{index}", value) for index, value in enumerate(outputs)]
    described = _describe_tensors(task, named)
    if task.postprocess is not None:
        described = _describe_postprocessed(task, task.postprocess, dict(named))
    return Signature(inputs=_describe_tensors(task, taken), outputs=described)


def _describe_postprocessed(task: Task, postprocess: Hook, outputs: Mapping[str, Tensor]) -> list[TensorSignature]:
    """Apply `postprocess` to the outputs as an endpoint does: as arrays, bfloat16 as float32."""
    arrays = {name: _make_array(value) for name, value in outputs.items()}
    num_rows = len(next(iter(outputs.values())))
    remedy = "return a dict of arrays by name, with a row for each sample"

    def refused(problem: str) -> ConfigError:
        return ConfigError("task", type(task).__name__, f"{type(task).__name__}.postprocess {problem}", remedy)

    try:
        answers: object = postprocess(arrays)
    except Exception as error:  # a user's hook may raise anything, and would for every request
        raise refused(f"raised {type(error).__name__}: {error}") from error
    if not isinstance(answers, Mapping) or not answers:
        raise refused(f"gave a {type(answers).__name__}" if not isinstance(answers, Mapping) else "gave nothing")
    described = []
    for name, answer in answers.items():
        datatype = None
        if isinstance(answer, np.ndarray):
            is_text, types = answer.dtype.kind in "OSU", NUMPY_DTYPES.items()
            named = (name for name, dtype in types if dtype == answer.dtype and name != "BF16")
            datatype = "BYTES" if is_text else next(named, None)
        if datatype is None:
            kind = answer.dtype if isinstance(answer, np.ndarray) else type(answer).__name__
            raise refused(f"gave {name!r} as a {kind}")
        if answer.shape[:1] != (num_rows,):
            raise refused(f"gave {name!r} with the shape {[*answer.shape]} for {num_rows} samples")
        described.append(TensorSignature(name=str(name), datatype=datatype, shape=[-1, *answer.shape[1:]]))
    return described


def _make_array(value: Tensor) -> np.ndarray:
    """The values, bfloat16 as float32; zeros for those of a fake tensor."""
    with unset_fake_temporarily():
        if isinstance(value, FakeTensor):
            value = torch.zeros(value.shape, dtype=value.dtype)
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True).copy()


def _describe_tensors(task: Task, named: list[tuple[str, Any]]) -> list[TensorSignature]:
    for name, value in named:
        if not isinstance(value, Tensor) or value.dtype not in DATATYPES:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            remedy = "an endpoint gives tensors and takes tensors: describe them in the Task's `signature`"
            raise ConfigError("task", type(task).__name__, f"{name!r} of its network is a {kind}", remedy)
    return [
        TensorSignature(name=name, datatype=DATATYPES[value.dtype], shape=[-1, *value.shape[1:]])
        for name, value in named
    ]
