"""An ONNX file, run by onnxruntime, which the extra `onnx` installs and which is imported on the first load.

Called by the predictor, and by `shoal models add` for the signature. Its precision is that of the file.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError
from shoal.extend.registry import Signature, TensorSignature
from shoal.extend.serve import Forward, TemplateConfig
from shoal.libs.export.runtime.onnx_session import import_runtime, make_forward, open_session
from shoal.weights import WeightSnapshot

_DATATYPES = {
    **{"bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8"},
    **{"int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64"},
    "string": "BYTES",
}


class OnnxTemplate:
    """Files with one signature, one for each version."""

    def __init__(self, setting: TemplateConfig) -> None:
        self._setting = setting

    def load(self, snapshot: WeightSnapshot) -> Forward:
        setting = self._setting
        return make_forward(
            open_session(snapshot.payload, f"version {snapshot.version}", setting.device, setting.torch_threads)
        )


def has_cuda() -> bool:
    """Whether this onnxruntime runs on CUDA."""
    return "CUDAExecutionProvider" in import_runtime().get_available_providers()


def read_signature(payload: bytes, file: str) -> Signature:
    """Read the signature of the file's graph, by the graph's names. Raises ConfigError."""
    session = open_session(payload, file, "cpu", 1)
    return Signature(
        inputs=[_to_tensor_signature(file, each) for each in session.get_inputs()],
        outputs=[_to_tensor_signature(file, each) for each in session.get_outputs()],
    )


def _to_tensor_signature(file: str, found: Any) -> TensorSignature:
    datatype = _DATATYPES.get(found.type.removeprefix("tensor(").removesuffix(")"))
    if datatype is None:
        remedy = "export it with tensors for inputs and outputs"
        if found.type.startswith("seq(map("):  # the last operation of skl2onnx's classifiers, ZipMap
            remedy = "export it with convert_sklearn(model, ..., options={id(model): {'zipmap': False}})"
        raise ConfigError("file", file, f"{found.name!r} is a {found.type}, which cannot be served", remedy)
    shape = [size if isinstance(size, int) and size > 0 else -1 for size in found.shape]
    return TensorSignature(name=found.name, datatype=datatype, shape=shape)
