"""The model of an exported folder: what it is, and its answers to HTTP requests, equal to an endpoint's.

Read by the folder's server or handler, once. One request is one forward, in the calling thread. Requests do not share
batches; deadlines, tracks and sticky keys have no effect, as there is no queue and one version.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from shoal.errors import ConfigError, InferenceError
from shoal.libs.export.runtime.onnx_session import make_forward, open_session
from shoal.open_inference.messages import PLATFORM, ModelMetadata, ServerMetadata, TensorMetadata
from shoal.serve.http.codec import HttpCodec, RowCodec
from shoal.serve.http.response import RestResponse, build_error_response, build_json_response
from shoal.serve.http.routes import RouteAction, RouteTarget, match_route
from shoal.serve.messages.infer_call import Arrays, Outputs
from shoal.serve.messages.model_errors import failed_model, find_version, to_inference_error, unknown_model
from shoal.serve.model.output_check import OutputCheck
from shoal.serve.protocol.request_limits import RequestLimits, read_length

logger = logging.getLogger(__name__)

DESCRIPTION_FILE, MODEL_FILE = "model.json", "model.onnx"
FORMAT = 1
EXTENSIONS = ["binary_tensor_data"]


class ModelDescription(msgspec.Struct, frozen=True):
    """`model.json`.

    format:         the number of the file's format
    target:         of the folder: container or lambda
    source_format, source_sha256: of the registered model that was exported
    max_batch_size, batch_dim, finite: as in an endpoint's options
    tolerance:      how far an output may be from the registered model's, relative to its largest value, or to 1
    """

    format: int
    name: str
    version: int
    target: str
    source_format: str
    source_sha256: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    max_batch_size: int
    batch_dim: dict[str, int | None]
    finite: bool
    tolerance: float


class FolderModel:
    """Raises WeightsError when onnxruntime cannot load the model. For any number of threads."""

    def __init__(self, folder: Path) -> None:
        content = (folder / DESCRIPTION_FILE).read_bytes()
        self.description = description = msgspec.json.decode(content, type=ModelDescription)
        session = open_session((folder / MODEL_FILE).read_bytes(), MODEL_FILE, "cpu", read_number("NUM_THREADS", 1))
        self._forward = make_forward(session)
        self._input_names = [spec.name for spec in description.inputs]
        model = description.name, description.inputs, description.outputs
        shape = description.max_batch_size, description.batch_dim
        self._codec, self._row_codec = HttpCodec(*model, *shape), RowCodec(*model, *shape)
        dimensions = {
            spec.name: description.batch_dim.get(spec.name, 0) if description.max_batch_size else None
            for spec in description.outputs
        }
        self._check = OutputCheck(description.outputs, dimensions, finite=description.finite)
        self.limits = RequestLimits()

    def predict(self, inputs: Arrays, num_rows: int) -> Outputs:
        """Compute the outputs. Raises InferenceError (422, 500), and errors of onnxruntime."""
        return self._check.validate(self._forward({name: inputs[name] for name in self._input_names}), num_rows)

    def answer(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> RestResponse:
        """Answer a request, whose headers have lower-case names."""
        try:
            self.limits.check_head(path, headers)
            target = match_route(path)
            if target is None or target.action not in _ACTIONS:
                raise InferenceError(404, f"no such path: {path[:200]!r}")
            if method != target.method:
                error = InferenceError(405, f"{method} is not allowed here, {target.method} is")
                return build_error_response(error, allowed=target.method)
            if target.action in (RouteAction.INFER, RouteAction.ROWS):
                return self._infer(target, dict(headers), body)
            return self._describe(target)
        except Exception as error:  # noqa: BLE001 - a request's top: `to_inference_error` logs a bug
            return build_error_response(to_inference_error(error))

    def _require_version(self, target: RouteTarget) -> None:
        name, version = self.description.name, self.description.version
        if target.model != name:
            raise unknown_model(target.model or "", [name])
        if target.version:
            find_version(name, target.version, [version])

    def _describe(self, target: RouteTarget) -> RestResponse:
        description = self.description
        match target.action:
            case RouteAction.LIVE:
                return build_json_response({"live": True})
            case RouteAction.READY:
                return build_json_response({"ready": True})
            case RouteAction.SERVER:
                return build_json_response(ServerMetadata("shoal", "2", EXTENSIONS))
        self._require_version(target)
        if target.action is RouteAction.MODEL:
            metadata = ModelMetadata(
                description.name, [str(description.version)], PLATFORM, description.inputs, description.outputs
            )
            return build_json_response(metadata)
        headers = [(b"shoal-model-version", b"%d" % description.version)]
        return RestResponse(200, msgspec.json.encode({"name": description.name, "ready": True}), headers=headers)

    def _infer(self, target: RouteTarget, headers: dict[bytes, bytes], body: bytes) -> RestResponse:
        self._require_version(target)
        codec = self._row_codec if target.action is RouteAction.ROWS else self._codec
        header_length = read_length(headers, b"inference-header-content-length")
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.strip().lower() != b"identity":
            body = self.limits.decompress(body, encoding)
        request = codec.decode(body, header_length)
        try:
            outputs = self.predict(request.inputs, request.num_rows)
        except InferenceError:
            raise
        except Exception:  # onnxruntime's errors have no common base
            reference = secrets.token_hex(4)
            logger.exception("the model failed on a request (%s)", reference)
            raise failed_model(reference) from None
        return codec.encode(request, outputs, self.description.version)


_ACTIONS = frozenset(
    {
        *(RouteAction.LIVE, RouteAction.READY, RouteAction.SERVER),
        *(RouteAction.MODEL, RouteAction.MODEL_READY, RouteAction.INFER, RouteAction.ROWS),
    }
)


def read_number(name: str, default: int) -> int:
    """Read an environment variable. Raises ConfigError."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(name, text, "expected a whole number")
    return int(text)


def measure_difference(expected: Arrays, other: Arrays) -> float:
    """The largest difference of two answers' numbers, relative to an output's largest value, or to 1; infinite for
    outputs of other names, shapes, integers or texts."""
    if expected.keys() != other.keys():
        return math.inf
    return max(_measure_one(array, other[name]) for name, array in expected.items())


def _measure_one(expected: np.ndarray, other: np.ndarray) -> float:
    if expected.shape != other.shape or expected.dtype != other.dtype:
        return math.inf
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, other) else math.inf
    wanted, got = expected.astype(np.float64), other.astype(np.float64)
    is_equal = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    if is_equal.all():
        return 0.0
    apart = float(np.abs(wanted - got)[~is_equal].max())
    return (
        math.inf if math.isnan(apart) else apart / max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)))
    )
