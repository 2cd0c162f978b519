"""An inference over HTTP, from its head to the answer: clients' requests, and those that replicas pass to each other.

Called by `app` with the caller that it has admitted. `protocol.infer_call` has what gRPC shares, `codec` the tensors.
Every answer names the version in the body and in the header `shoal-model-version`.

Compressing tensors costs more than it saves on most networks. So an answer is compressed, in a thread, only for a
client that accepts exactly one coding, as tritonclient does on request. Clients that list every coding by default
(curl, httpx, browsers) get plain answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from collections.abc import Mapping
from functools import partial
from urllib.parse import unquote

from shoal.serve.http.codec import HttpCodec, RowCodec
from shoal.serve.http.response import RestResponse, read_length
from shoal.serve.http.routes import RouteAction, RouteTarget
from shoal.serve.messages.inference import Caller, ModelManagerProtocol, TracerProtocol
from shoal.serve.protocol.infer_call import (
    BATCH_HEADER,
    GENERATION_HEADER,
    PEER_HEADER,
    TENANT_HEADER,
    ModelCodecs,
    decode_sized,
    read_head,
    start_trace,
)
from shoal.serve.protocol.request_lifecycle import Receive, RequestLifecycle, RequestsInProgress, decompress_in_thread
from shoal.serve.protocol.request_limits import WINDOW_BITS

MIN_COMPRESSED_BYTES = 1024  # smaller answers are not compressed
COMPRESSION_LEVEL = 1
TRACE_NAME, ROWS_TRACE_NAME = "POST /v2/models/{model}/infer", "POST /v2/models/{model}/rows"


class InferenceHandler:
    """Answers inferences of the models of `host`. `in_progress`: the requests of clients."""

    def __init__(
        self, host: ModelManagerProtocol, in_progress: RequestsInProgress, tracer: TracerProtocol | None
    ) -> None:
        self._manager = host
        self._tracer = tracer
        self._in_progress = in_progress
        # A JSON number of two bytes takes eight in the form that replicas send each other.
        limits = in_progress.limits
        peer_limits = dataclasses.replace(limits, max_body_bytes=8 * limits.max_body_bytes)
        self._peers_in_progress = RequestsInProgress(peer_limits)
        self._codecs, self._row_codecs = ModelCodecs(HttpCodec), ModelCodecs(RowCodec)

    async def answer(
        self, target: RouteTarget, headers: dict[bytes, bytes], caller: Caller, receive: Receive
    ) -> RestResponse:
        """Answer a request. Raises InferenceError, Disconnected."""
        name, is_from_peer = target.model or "", target.action is RouteAction.PEER_INFER
        in_progress = self._peers_in_progress if is_from_peer else self._in_progress
        has_rows = target.action is RouteAction.ROWS
        with (
            start_trace(self._tracer, ROWS_TRACE_NAME if has_rows else TRACE_NAME, name, headers) as trace,
            RequestLifecycle(in_progress, receive) as progress,
        ):
            arrived_s = time.monotonic()
            if is_from_peer:
                token, generation = headers.get(PEER_HEADER, b""), headers.get(GENERATION_HEADER, b"")
                model = self._manager.get_peer_model(name, token, generation)
                caller = Caller(unquote(headers.get(TENANT_HEADER, b"").decode("latin-1")))
            else:
                model = self._manager.get_model(name)
            head = read_head(model, target.version, headers, caller, trace, arrived_s)
            header_length = read_length(headers, b"inference-header-content-length")
            codec: HttpCodec | RowCodec = self._row_codecs.get(model) if has_rows else self._codecs.get(model)
            body = await read_body(progress, headers)
            read_bytes = len(body) if header_length is None or codec.has_bytes_inputs else header_length
            request = await decode_sized(read_bytes, codec.decode, body, header_length)
            raw = all(request.binary_of.values()) if request.binary_of else request.binary
            answer, prediction = await head.answer(request, partial(codec.encode, request), raw=raw)
            if is_from_peer:
                batch = prediction.queued_s, prediction.computed_s, prediction.batch_rows
                answer.headers.append((BATCH_HEADER, b"%.9g %.9g %d" % batch))
            accepted = headers.get(b"accept-encoding")
            return answer if accepted is None else await _compress(answer, accepted)


async def read_body(progress: RequestLifecycle, headers: Mapping[bytes, bytes]) -> bytes:
    """Read a request's body, decompressed. Raises InferenceError (400, 408, 413, 415), Disconnected."""
    body = await progress.read_body(read_length(headers, b"content-length"))
    encoding = headers.get(b"content-encoding")
    return body if encoding is None else await decompress_in_thread(progress.limits, body, encoding)


async def _compress(answer: RestResponse, accepted: bytes) -> RestResponse:
    """Compress the answer if the client asks for it. `accepted`: the value of Accept-Encoding."""
    coding = accepted.strip().lower()
    window_bits = WINDOW_BITS.get(coding)
    if window_bits is None or len(answer.body) + sum(map(len, answer.parts)) < MIN_COMPRESSED_BYTES:
        return answer

    def compress() -> bytes:
        compressor = zlib.compressobj(COMPRESSION_LEVEL, wbits=window_bits)
        pieces = [compressor.compress(piece) for piece in (answer.body, *answer.parts)]
        return b"".join((*pieces, compressor.flush()))

    headers = [*answer.headers, (b"content-encoding", coding)]
    return RestResponse(answer.status, await asyncio.to_thread(compress), answer.content_type, headers)
