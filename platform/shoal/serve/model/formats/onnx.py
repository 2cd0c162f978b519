"""An ONNX file, run by onnxruntime, which the extra `onnx` installs and which is imported on the first load.

Called by the predictor, and by `shoal models add` for the signature. Its precision is that of the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig
from shoal.weights import WeightSnapshot

_DATATYPES = {
    **{"bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8"},
    **{"int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64"},
    "string": "BYTES",
}
_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class OnnxTemplate:
    """Files with one signature, one for each version."""

    def __init__(self, setting: TemplateConfig) -> None:
        self._setting = setting

    def load(self, snapshot: WeightSnapshot) -> Forward:
        session = _open_session(
            snapshot.payload, f"version {snapshot.version}", self._setting.device, self._setting.torch_threads
        )
        taken = [each.name for each in session.get_inputs()]
        texts = [each.name for each in session.get_inputs() if each.type == "tensor(string)"]
        given = [each.name for each in session.get_outputs()]

        def forward(inputs: Arrays) -> Arrays:
            fed = dict(zip(taken, inputs.values(), strict=False))
            for name in texts:
                fed[name] = _decode_texts(name, fed[name])
            return dict(zip(given, session.run(None, fed), strict=True))

        return forward


def _decode_texts(name: str, texts: np.ndarray) -> np.ndarray:
    """Decode bytes to text, since onnxruntime would take the bytes' repr."""
    try:
        decoded = [each.decode() for each in texts.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InferenceError(422, f"input {name!r}: expected text in UTF-8: {error}") from None
    return np.array(decoded, object).reshape(texts.shape)


def has_cuda() -> bool:
    """Whether this onnxruntime runs on CUDA."""
    return "CUDAExecutionProvider" in _runtime().get_available_providers()


def read_signature(payload: bytes, file: str) -> Signature:
    """Read the signature of the file's graph, by the graph's names. Raises ConfigError."""
    session = _open_session(payload, file, "cpu", 1)
    return Signature(
        inputs=[_to_tensor_signature(file, each) for each in session.get_inputs()],
        outputs=[_to_tensor_signature(file, each) for each in session.get_outputs()],
    )


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            "format",
            "onnx",
            f"needs onnxruntime ({error})",
            "pip install 'CHECKOUT[onnx]', with the folder of Shoal's sources",
        ) from error
    return onnxruntime


def _open_session(payload: bytes, what: str, device: str, threads: int) -> Any:
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads do not spin
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(payload, options, providers=_PROVIDERS[device])
    except Exception as error:  # its errors have no common base
        is_apart = "external" in str(error).lower()
        remedy = (
            "save it as one file, with its weights" if is_apart else "write it with torch.onnx.export, or onnx.save"
        )
        raise WeightsError(f"{what} is not an ONNX model that this onnxruntime can load ({error}): {remedy}") from error


def _to_tensor_signature(file: str, found: Any) -> TensorSignature:
    datatype = _DATATYPES.get(found.type.removeprefix("tensor(").removesuffix(")"))
    if datatype is None:
        remedy = "export it with tensors for inputs and outputs"
        if found.type.startswith("seq(map("):  # the last operation of skl2onnx's classifiers, ZipMap
            remedy = "export it with convert_sklearn(model, ..., options={id(model): {'zipmap': False}})"
        raise ConfigError("file", file, f"{found.name!r} is a {found.type}, which cannot be served", remedy)
    shape = [size if isinstance(size, int) and size > 0 else -1 for size in found.shape]
    return TensorSignature(name=found.name, datatype=datatype, shape=shape)
