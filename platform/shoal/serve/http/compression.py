"""Bodies that travel compressed: requests that say so, and answers to clients that ask for it.

Called by the REST application, and for gRPC in HTTP/1.1. Compression of tensors costs more than it brings on most
networks, so an answer is compressed only for a client that accepts one coding and no other, as tritonclient does when
it is told to; those that list everything they know by default (curl, httpx, browsers) get plain answers. Works in a
thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import zlib

from shoal.serve.http.messages import RestResponse
from shoal.serve.protocol.limits import WINDOW_BITS, RequestLimits

MIN_BYTES = 1024  # a smaller answer is not worth it
LEVEL = 1


async def decompress_body(body: bytes, encoding: bytes, limits: RequestLimits) -> bytes:
    """The body behind `Content-Encoding`, at most `limits.max_body_bytes`. Raises InferenceError (400, 413, 415)."""
    if encoding.strip().lower() == b"identity":
        return body
    return await asyncio.to_thread(limits.decompress, body, encoding)


async def compress_response(answer: RestResponse, accepted: bytes) -> RestResponse:
    """The answer as the client wants it. `accepted`: the value of Accept-Encoding."""
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
