"""A session of onnxruntime, and its forward from arrays to arrays. Called by `formats.onnx` and `model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.errors import ConfigError, InferenceError, WeightsError, format_install
from shoal.serve.messages.infer_call import Arrays

_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


def make_forward(session: Any) -> Callable[[Arrays], Arrays]:
    """Make the forward of a session, whose inputs come in the order of its graph."""
    taken = [each.name for each in session.get_inputs()]
    texts = [each.name for each in session.get_inputs() if each.type == "tensor(string)"]
    given = [each.name for each in session.get_outputs()]

    def forward(inputs: Arrays) -> Arrays:
        fed = dict(zip(taken, inputs.values(), strict=False))
        for name in texts:
            fed[name] = _decode_texts(name, fed[name])
        return dict(zip(given, session.run(None, fed), strict=True))

    return forward


def import_runtime() -> Any:
    """Import onnxruntime. Raises ConfigError where it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError("format", "onnx", f"needs onnxruntime ({error})", format_install("onnx")) from error
    return onnxruntime


def open_session(payload: bytes, what: str, device: str, threads: int) -> Any:
    """Open a session of a file. Raises WeightsError."""
    runtime = import_runtime()
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


def _decode_texts(name: str, texts: np.ndarray) -> np.ndarray:
    """Decode bytes to text, since onnxruntime would take the bytes' repr."""
    try:
        decoded = [each.decode() for each in texts.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InferenceError(422, f"input {name!r}: expected text in UTF-8: {error}") from None
    return np.array(decoded, object).reshape(texts.shape)
