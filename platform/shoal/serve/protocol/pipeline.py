"""The pipeline of an inference, whatever its protocol: trace, head, tensors, deadline, answer; what is large off the
loop. A protocol reads a call before it, and writes an answer or an error after it.

Called by both applications, on the event loop, with headers or metadata, which have the same names. Knows the models
only through `ServedModelProtocol`. Errors are InferenceErrors: 400 for an invalid value, 404 for an unknown version.

Large tensors in JSON or of BYTES are decoded and encoded in a thread, so that other requests do not wait. Such elements
are read one by one, which takes a second and more for the largest body. Numbers in bytes are views of the body and cost
nothing.

| capacity            | what blocks                      | who unblocks    | close()                           |
|---------------------|----------------------------------|-----------------|-----------------------------------|
| `MAX_WAITING_BYTES` | nothing: beyond, the next one is | the one thread, | none: the thread is the process's |
| to be read          | refused (429)                    | turn by turn    | and ends with it                  |

One thread, since decoding needs a multiple of a body's bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

import numpy as np

from shoal.batching.batcher import Prediction
from shoal.errors import InferenceError
from shoal.open_inference.messages import TensorMetadata
from shoal.registry.manifest import Signature
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.messages.inference import (
    Caller,
    RequestTraceProtocol,
    ServedModelProtocol,
    TracerProtocol,
)
from shoal.serve.messages.model_errors import find_version
from shoal.serve.protocol.model_metadata import to_tensor_metadata
from shoal.serve.spec.model_options import ModelOptions

T = TypeVar("T")
CallT = TypeVar("CallT", bound=InferCall)
CodecT = TypeVar("CodecT")
MakeCodec = Callable[[str, list[TensorMetadata], list[TensorMetadata], int, Mapping[str, int | None]], CodecT]

# Between replicas: the token, the plan's generation, the key's name, and of the answer the times of its batch.
PEER_HEADER = b"shoal-peer"
GENERATION_HEADER = b"shoal-generation"
TENANT_HEADER = b"shoal-tenant"
BATCH_HEADER = b"shoal-batch"
TRACKS = ("", "stable", "candidate")
MAX_DEADLINE_MS = 1e12
MAX_STICKY_CHARS = 256
LARGE_BYTES = 1 << 18  # below it, decoding takes less time than waiting for a busy thread
LARGE_ELEMENTS = 1 << 16
MAX_WAITING_BYTES = 1 << 28

_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-large")
_NO_TRACE = nullcontext()
_waiting_bytes = 0  # written on the event loop


class ModelCodecs(Generic[CodecT]):
    """One protocol's codec of each model, rebuilt when a load has changed the model's signature or options."""

    def __init__(self, make: MakeCodec[CodecT]) -> None:
        self._make = make
        self._codecs: dict[str, tuple[Signature, ModelOptions, CodecT]] = {}

    def get(self, model: ServedModelProtocol) -> CodecT:
        signature, options = model.signature, model.options
        known = self._codecs.get(model.name)
        if known is not None and known[0] is signature and known[1] is options:
            return known[2]
        inputs, outputs = to_tensor_metadata(signature.inputs), to_tensor_metadata(signature.outputs)
        codec = self._make(model.name, inputs, outputs, options.max_batch_size, options.batch_dim)
        self._codecs[model.name] = signature, options, codec
        return codec


def start_trace(
    tracer: TracerProtocol | None, name: str, model: str, headers: Mapping[bytes, bytes]
) -> AbstractContextManager[RequestTraceProtocol | None]:
    """The span of a new request as a context, by its headers or metadata; None when it is not traced."""
    if tracer is None:
        return _NO_TRACE
    parent = [headers.get(name, b"").decode("latin-1") for name in (b"traceparent", b"tracestate")]
    return tracer.start_request(name, model, *parent) or _NO_TRACE


async def answer_inference(
    model: ServedModelProtocol,
    version: str | None,
    headers: Mapping[bytes, bytes],
    caller: Caller,
    trace: RequestTraceProtocol | None,
    decode: Callable[[], Awaitable[CallT]],
    arrived_s: float,
    called_s: float | None = None,
) -> tuple[CallT, Prediction[Outputs]]:
    """Have the model answer a request, whose tensors are read once its head is checked.

    version:   as requested; None or "" leaves it to the rollout
    decode:    reads the tensors
    arrived_s: by `time.monotonic()`
    called_s:  the deadline of the call that carries the request; None without one
    Raises InferenceError: 400 for an invalid value, 404 for an unknown version, and the model's.
    """
    number = resolve_version(model, version)
    track, sticky = read_side(headers)
    call = await decode()
    call.deadline_s = compute_deadline(arrived_s, call.timeout_us, headers, model.options.deadline_s, called_s)
    call.version = number
    call.tenant = caller.name
    call.sticky = sticky
    call.track = track
    call.trace = trace
    prediction = await model.infer(call)
    if trace is not None:
        trace.record_prediction(prediction, call.num_rows)
    return call, prediction


async def encode_sized(encode: Callable[[Outputs, int], T], prediction: Prediction[Outputs], *, raw: bool) -> T:
    """Encode the outputs and their version: at once, or in the thread. `raw`: whether numbers are sent as bytes."""
    work = encode, prediction.outputs, prediction.version
    return await run_in_thread(*work) if has_large_arrays(prediction.outputs, raw=raw) else encode(*work[1:])


def read_side(headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    """The track and the sticky key of a request, "" for none. Raises InferenceError (400)."""
    track = sticky = ""
    if text := headers.get(b"shoal-track"):
        track = text.decode("latin-1")
        if track not in TRACKS:
            raise InferenceError(400, f"shoal-track = {track[:40]!r}: expected stable or candidate")
    if text := headers.get(b"shoal-sticky"):
        sticky = parse_sticky(text.decode("latin-1"))
    return track, sticky


def resolve_version(model: ServedModelProtocol, text: str | None) -> int | None:
    """The requested version; None, without a text, leaves the choice to the server. Raises InferenceError (404)."""
    return find_version(model.name, text, model.versions) if text else None


def parse_sticky(text: str) -> str:
    """The key whose calls stay on one side of a canary; "" draws for each. Raises InferenceError (400).

    text: a header's value, UTF-8 that may be percent-encoded
    """
    if "%" in text or not text.isascii():
        text = unquote_to_bytes(text.encode("latin-1")).decode(errors="backslashreplace")
    if len(text) > MAX_STICKY_CHARS:
        raise InferenceError(400, f"shoal-sticky has {len(text)} characters, the limit is {MAX_STICKY_CHARS}")
    return text


def compute_deadline(
    now_s: float,
    timeout_us: object,
    headers: Mapping[bytes, bytes],
    default_s: float | None,
    called_s: float | None = None,
) -> float | None:
    """The time at which the request expires; None for never. Raises InferenceError (400).

    timeout_us: the protocol's parameter `timeout`; None or 0 for none
    headers:    `shoal-deadline-ms` counts, from now
    default_s:  the model's own, from now; a client's deadline replaces it
    called_s:   the deadline of the call that carries the request; None without one
    """
    wait_s = math.inf
    if timeout_us is not None:
        if type(timeout_us) is not int or not 0 <= timeout_us < MAX_DEADLINE_MS * 1e3:
            raise InferenceError(400, f"timeout = {str(timeout_us)[:40]!r}: expected microseconds")
        wait_s = timeout_us / 1e6 or math.inf
    if deadline := headers.get(b"shoal-deadline-ms"):
        text = deadline.decode("latin-1")
        try:
            value = float(text.replace("_", "?"))  # which Python would accept
        except ValueError:
            value = -1.0
        if not 0 < value < MAX_DEADLINE_MS:
            raise InferenceError(400, f"shoal-deadline-ms = {text[:40]!r}: expected milliseconds from now")
        wait_s = min(wait_s, value / 1e3)
    if wait_s == math.inf:
        if called_s is not None or default_s is None:
            return called_s
        wait_s = default_s
    return now_s + wait_s if called_s is None else min(now_s + wait_s, called_s)


async def decode_sized(
    size_bytes: int, read: Callable[..., T], *arguments: object, large_bytes: int = LARGE_BYTES
) -> T:
    """Run `read(*arguments)`, which reads so many bytes: at once, or in the thread. Raises InferenceError (429)."""
    global _waiting_bytes
    if size_bytes <= large_bytes:
        return read(*arguments)
    if _waiting_bytes and _waiting_bytes + size_bytes > MAX_WAITING_BYTES:
        raise InferenceError(429, "too many large requests wait to be read; try again later", retry_after_s=1.0)
    _waiting_bytes += size_bytes
    try:
        return await run_in_thread(read, *arguments)
    finally:
        _waiting_bytes -= size_bytes


async def run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run `work(*arguments)` in its turn."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *arguments)


def has_large_arrays(arrays: Mapping[str, np.ndarray], *, raw: bool) -> bool:
    """Whether one of these takes long to encode, element by element. `raw`: numbers are sent as bytes, at no cost."""
    return any(array.size > LARGE_ELEMENTS and not (raw and array.dtype.kind != "O") for array in arrays.values())
