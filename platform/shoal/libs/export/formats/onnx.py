"""An ONNX file, run by onnxruntime, which the extra `onnx` installs and which is imported on the first load.

Called by the predictor, and by `shoal models add` for the signature. Its precision is that of the file.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError
from shoal.extend.registry import Signature, TensorSignature
from shoal.extend.serve import Forward, TemplateConfig
from shoal.libs.export.runtime.onnx_session import import_runtime, make_forward, open_session
from shoal.open_inference.datatypes import BY_NUMPY_NAME
from shoal.weights import WeightSnapshot

_DATATYPES = BY_NUMPY_NAME | {"float": "FP32", "double": "FP64", "string": "BYTES"}


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


def _to_tensor_signature(file: str, tensor: Any) -> TensorSignature:
    datatype = _DATATYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"))
    if datatype is None:
        remedy = "export it with tensors for inputs and outputs"
        if tensor.type.startswith("seq(map("):  # the last operation of skl2onnx's classifiers, ZipMap
            remedy = "export it with convert_sklearn(model, ..., options={id(model): {'zipmap': False}})"
        raise ConfigError("file", file, f"{tensor.name!r} is a {tensor.type}, which cannot be served", remedy)
    shape = [size if isinstance(size, int) and size > 0 else -1 for size in tensor.shape]
    return TensorSignature(name=tensor.name, datatype=datatype, shape=shape)
