"""Sends an inference to another replica of the endpoint, over its HTTP port, in the protocol's binary form.

Called by `requests` alone, on the event loop. Tenant, deadline, version, track, request id and trace go along; the
answer and its times, or the peer's error, come back. A peer answers by itself or not at all: what it receives here it
sends to no other. Connections stay open; a peer that closed an idle one is called once more over a new one.
One whose host is silent for LOST_HOST_S is lost.

| capacity              | what blocks                   | who unblocks         | close()                          |
|-----------------------|-------------------------------|----------------------|----------------------------------|
| MAX_IDLE connections  | nothing: a call beyond opens  | the end of a call    | closes idle ones; others end     |
| of a peer are kept    | its own                       |                      | with their call                  |
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from shoal.batching.batcher import Prediction
from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.network_address import watch_host
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.messages import Error, InferRequest, InferResponse, InputTensor, Parameters, RequestedOutput
from shoal.serve.http.routes import PEERS_PATH
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.protocol.pipeline import BATCH_HEADER, GENERATION_HEADER, PEER_HEADER, TENANT_HEADER
from shoal.serve.protocol.request_lifecycle import Send

MAX_IDLE = 64
CONNECT_TIMEOUT_S = 2.0
LOST_HOST_S = 5
# Of a request, those that another replica gets anew.
HOP_HEADERS = ("host", "origin", "connection", "expect", "content-length", "content-encoding", "transfer-encoding")
_RELAYED = (b"content-type", b"content-length", b"cache-control", b"retry-after")  # of an answer's headers
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(InferResponse).decode


class HttpRequest(NamedTuple):
    """A client's request, which another replica may answer as it is. `body`: decompressed."""

    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    deadline_s: float | None

    def list_headers(self) -> dict[str, str]:
        """Those for another replica."""
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers.items()}
        return {name: given[name] for name in given if name not in HOP_HEADERS} | _describe_deadline(self.deadline_s)


class PeerTransport:
    """HTTP/1.1 between replicas, whose answers have a length. Raises RequestLost when the connection breaks after the
    request was sent, and ConnectionLost when it cannot be made."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = defaultdict(list)

    async def post(
        self, address: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        content = _make_request(address, path, headers, body)
        is_sent = False
        try:
            if (connection := self._take_idle(address)) is not None:
                is_sent = True
                with suppress(OSError, asyncio.IncompleteReadError):  # perhaps closed while it was idle
                    return await self._exchange(address, connection, content)
            connection = await _connect(address)
            is_sent = True
            return await self._exchange(address, connection, content)
        except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is one
            kind = RequestLost if is_sent else ConnectionLost
            raise kind(f"the replica at {address} did not answer: {error!r}") from None

    async def relay(self, address: str, path: str, headers: Mapping[str, str], body: bytes, send: Send) -> None:
        """Post a request, and send the answer on as it comes, by ASGI's `send`. Raises as `post` before the answer's
        head was sent on, InferenceError 503 where the replica says so, and 500 where it is lost later."""
        has_begun, writer = False, None
        try:
            reader, writer = await _connect(address)
            writer.write(_make_request(address, path, {**headers, "connection": "close"}, body))
            status, named = await _read_head(reader)
            if status == 503:
                raise InferenceError(503, f"the replica at {address} cannot answer now", retry_after_s=1.0)
            has_begun = True
            given = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
            relayed = [each for each in given if each[0] in _RELAYED or each[0].startswith(b"shoal-")]
            await send({"type": "http.response.start", "status": status, "headers": relayed})
            if "content-length" in named:
                part = await reader.readexactly(int(named["content-length"]))
                await send({"type": "http.response.body", "body": part})
                return
            while size := int(await reader.readuntil(b"\r\n"), 16):
                part = (await reader.readexactly(size + 2))[:-2]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (OSError, asyncio.IncompleteReadError) as error:
            if has_begun:
                raise InferenceError(500, f"the replica at {address} was lost before the answer's end") from None
            kind = ConnectionLost if writer is None else RequestLost
            raise kind(f"the replica at {address} did not answer: {error!r}") from None
        finally:
            if writer is not None:
                writer.close()

    def _take_idle(self, address: str) -> Connection | None:
        idle = self._idle[address]
        while idle:
            reader, writer = idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return None

    def retain(self, addresses: Collection[str]) -> None:
        """Close the connections to other addresses."""
        for address in [address for address in self._idle if address not in addresses]:
            for _, writer in self._idle.pop(address):
                writer.close()

    def close(self) -> None:
        self.retain(())

    async def _exchange(
        self, address: str, connection: Connection, content: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        reader, writer = connection
        is_reusable = False
        try:
            writer.write(content)
            status, headers = await _read_head(reader)
            body = await reader.readexactly(int(headers["content-length"]))
            is_closed = headers.get("connection") == "close" or reader.at_eof()
            is_reusable = not is_closed and len(self._idle[address]) < MAX_IDLE
            return status, headers, body
        finally:
            if is_reusable:
                self._idle[address].append(connection)
            else:
                writer.close()


def _make_request(address: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {address}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def _connect(address: str) -> Connection:
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        host, _, port = address.rpartition(":")
        connection = await asyncio.open_connection(host.strip("[]"), int(port))
    watch_host(connection[1].get_extra_info("socket"), LOST_HOST_S)
    return connection


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status_line.split(" ", 2)[1]), headers


def encode_call(
    name: str, call: InferCall, datatypes: Mapping[str, str], token: str, generation: int
) -> tuple[str, dict[str, str], bytes]:
    """The path, headers and body of a call for another replica.

    datatypes:  of the model's inputs
    generation: of the plan by which that replica has the model
    """
    version = "" if call.version is None else f"/versions/{call.version}"
    buffers = {each: to_binary(datatypes[each], array) for each, array in call.inputs.items()}
    tensors = [
        InputTensor(each, list(array.shape), datatypes[each], {"binary_data_size": len(buffers[each])})
        for each, array in call.inputs.items()
    ]
    outputs = None if call.outputs is None else [RequestedOutput(each) for each in call.outputs]
    parameters: Parameters = {"binary_data_output": True}
    parameters |= {name: each for name in ("action", "seed") if (each := getattr(call, name)) is not None}
    head = _encode(InferRequest(tensors, call.id, parameters, outputs))
    headers = {
        "inference-header-content-length": str(len(head)),
        PEER_HEADER.decode(): token,
        GENERATION_HEADER.decode(): str(generation),
        TENANT_HEADER.decode(): quote(call.tenant),
    } | _describe_deadline(call.deadline_s)
    if call.track:
        headers["shoal-track"] = call.track
    if call.sticky:
        headers["shoal-sticky"] = quote(call.sticky)
    if call.trace is not None:
        context = call.trace.context
        headers["traceparent"] = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    return f"{PEERS_PATH}{name}{version}/infer", headers, b"".join((head, *buffers.values()))


def _describe_deadline(deadline_s: float | None) -> dict[str, str]:
    if deadline_s is None:
        return {}
    return {"shoal-deadline-ms": f"{max(1e-3, (deadline_s - time.monotonic()) * 1e3):.3f}"}


def decode_answer(status: int, headers: Mapping[str, str], body: bytes) -> Prediction[Outputs]:
    """The prediction of another replica. Raises its InferenceError as it is, and ConnectionLost for no answer of it."""
    try:
        if status == 401:
            raise ConnectionLost("the replica does not take this replica's token: their plans differ for now")
        if status != 200:
            retry_after = headers.get("retry-after")
            error = msgspec.json.decode(body, type=Error)
            wait_s = None if retry_after is None else float(retry_after)
            raise InferenceError(status, error.error, wait_s, error.field)
        length = int(headers["inference-header-content-length"])
        head, rest = _decode(body[:length]), memoryview(body)[length:]
        outputs: Outputs = {}
        for tensor in head.outputs:
            size = int((tensor.parameters or {})["binary_data_size"])
            outputs[tensor.name] = from_binary(tensor.name, tensor.datatype, tensor.shape, rest[:size], role="output")
            rest = rest[size:]
        queued_s, computed_s, rows = headers[BATCH_HEADER.decode()].split()
        return Prediction(outputs, int(head.model_version), float(queued_s), float(computed_s), int(rows))
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ConnectionLost(f"the replica's answer is not understood: {error!r}") from None
