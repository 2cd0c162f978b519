"""One HTTP request as the REST application sees it, and how its answer is compressed and sent over ASGI.

Called by `app` and `admin`; knows no model. `routes` has the paths, `response` the answers.

Compressing tensors costs more than it saves on most networks. So an answer is compressed, in a thread, only for a
client that accepts exactly one coding, as tritonclient does on request. Clients that list every coding by default
(curl, httpx, browsers) get plain answers.
"""

from __future__ import annotations

import asyncio
import zlib

import msgspec

from shoal.serve.http.response import RestResponse
from shoal.serve.http.routes import RouteTarget
from shoal.serve.messages.inference import Caller, format_origin
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER
from shoal.serve.protocol.request_lifecycle import Send
from shoal.serve.protocol.request_limits import WINDOW_BITS

MAX_JOINED_BYTES = 1 << 16  # smaller parts are joined: another message costs more than the copy
MIN_COMPRESSED_BYTES = 1024  # smaller answers are not compressed
COMPRESSION_LEVEL = 1


class RestRequest(msgspec.Struct, frozen=True, gc=False):
    """A request other than an inference, without its body."""

    target: RouteTarget
    headers: dict[bytes, bytes]
    caller: Caller

    @property
    def caller_origin(self) -> str:
        """The caller and its address as known to the ingress, for the record of changes."""
        return format_origin(self.caller.name, self.headers.get(FORWARDED_FROM_HEADER, b"").decode("latin-1"))


async def send_response(answer: RestResponse, send: Send) -> None:
    body: memoryview | bytes = answer.body
    parts, length = answer.parts, len(answer.body)
    if parts:
        length += sum(map(len, parts))
        if length <= MAX_JOINED_BYTES:
            body, parts = b"".join((body, *parts)), []
    headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % length), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = part
    await send({"type": "http.response.body", "body": body})


async def compress_response(answer: RestResponse, accepted: bytes) -> RestResponse:
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
