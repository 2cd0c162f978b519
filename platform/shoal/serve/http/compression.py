"""Decompresses requests by their Content-Encoding, and compresses answers for clients that ask for it.

Called by the REST application, and for gRPC in HTTP/1.1. Compressing tensors costs more than it saves on most networks.
So an answer is compressed only for a client that accepts exactly one coding, as tritonclient does on request; clients
that list every coding by default (curl, httpx, browsers) get plain answers. Runs in a thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import zlib

from shoal.serve.http.messages import RestResponse
from shoal.serve.protocol.limits import WINDOW_BITS, RequestLimits

MIN_BYTES = 1024  # smaller answers are not compressed
LEVEL = 1


async def decompress_body(body: bytes, encoding: bytes, limits: RequestLimits) -> bytes:
    """Decompress a body by its `Content-Encoding`, to at most `limits.max_body_bytes`. Raises InferenceError (400, 413,
    415)."""
    if encoding.strip().lower() == b"identity":
        return body
    return await asyncio.to_thread(limits.decompress, body, encoding)


async def compress_response(answer: RestResponse, accepted: bytes) -> RestResponse:
    """Compress the answer if the client asks for it. `accepted`: the value of Accept-Encoding."""
    coding = accepted.strip().lower()
    window_bits = WINDOW_BITS.get(coding)
    if window_bits is None or len(answer.body) + sum(map(len, answer.parts)) < MIN_BYTES:
        return answer

    def compress() -> bytes:
        compressor = zlib.compressobj(LEVEL, wbits=window_bits)
        pieces = [compressor.compress(piece) for piece in (answer.body, *answer.parts)]
        return b"".join((*pieces, compressor.flush()))

    headers = [*answer.headers, (b"content-encoding", coding)]
    return RestResponse(answer.status, await asyncio.to_thread(compress), answer.content_type, headers)
