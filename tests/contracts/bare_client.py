"""An actor written from docs/protocol.md alone: ZeroMQ, msgpack and the standard library, nothing of the platform.

Called by test_protocol_page.py, which proves with it that the page is enough. It raises AssertionError when the gateway
says something that the page does not allow.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import time
from collections import deque
from typing import Any

import msgpack
import zmq

ELEMENTS = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "bool": "?",
}
SAFETENSORS = {"F16": "e", "F32": "f", "F64": "d", "I64": "q", "I32": "i", "U8": "B", "BOOL": "?"}


class Refused(Exception):
    """The gateway answered with an error after which there is no point in going on."""


class Silence(Exception):
    """Nothing came in time."""


def pack_tensor(name: str, dtype: str, shape: list[int], values: list[Any]) -> tuple[dict[str, Any], bytes]:
    """A tensor header and its frame; `values` are flat, in C order."""
    assert len(values) == math.prod(shape)
    return {"name": name, "dtype": dtype, "shape": shape}, struct.pack(f"<{len(values)}{ELEMENTS[dtype]}", *values)


def parse_safetensors(payload: bytes) -> dict[str, tuple[list[int], list[Any]]]:
    """Name -> (shape, flat values)."""
    (size,) = struct.unpack_from("<Q", payload)
    index = json.loads(payload[8 : 8 + size])
    data = payload[8 + size :]
    tensors = {}
    for name, entry in index.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = struct.unpack(f"<{math.prod(entry['shape'])}{SAFETENSORS[entry['dtype']]}", data[begin:end])
        tensors[name] = (entry["shape"], list(values))
    return tensors


def log_probabilities(policy: dict[str, Any], tensors: dict[str, Any], observation: list[float]) -> list[float]:
    """log p of every action: the maths of `mlp_categorical`."""
    assert policy["kind"] == "mlp_categorical"
    hidden = observation
    for index, (weight_name, bias_name) in enumerate(policy["layers"]):
        (num_outputs, num_inputs), weight = tensors[weight_name]
        _, bias = tensors[bias_name]
        rows = [weight[row * num_inputs : (row + 1) * num_inputs] for row in range(num_outputs)]
        hidden = [sum(w * h for w, h in zip(row, hidden, strict=True)) + b for row, b in zip(rows, bias, strict=True)]
        if index < len(policy["layers"]) - 1:
            hidden = [math.tanh(h) if policy["activation"] == "tanh" else max(0.0, h) for h in hidden]
    highest = max(hidden)
    total = math.log(sum(math.exp(h - highest) for h in hidden))
    return [h - highest - total for h in hidden]


class BareClient:
    """One actor. Single-threaded: whoever waits also reads."""

    def __init__(
        self,
        address: str,
        token: str,
        actor_id: str,
        incarnation: int,
        server_key: bytes = b"",
        patience_s: float = 10.0,
    ) -> None:
        self.address, self.token, self.actor_id, self.incarnation = address, token, actor_id, incarnation
        self.server_key, self.patience_s = server_key, patience_s
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] | None = None
        self.welcome: dict[str, Any] = {}
        self.kept: deque[tuple[int, dict[str, Any], list[bytes]]] = deque()  # seq, header, frames: not acknowledged
        self.num_sent = 0  # of `kept`, from the left, in this session
        self.next_seq = 0
        self.send_limit = 0
        self.version = 0
        self.tensors: dict[str, Any] = {}
        self.acks: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.pongs: list[int] = []
        self.num_byes = 0
        self.num_attempts = 0  # to connect, since the last ack
        self.finished = False

    # -- session ------------------------------------------------------------------------------------------------

    def connect(self) -> dict[str, Any]:
        """The reconnect rule, which is also how to begin."""
        deadline_s = time.monotonic() + self.patience_s
        while True:
            if self.num_attempts:
                time.sleep(min(1.0, 0.05 * 2 ** (self.num_attempts - 1)))  # as the reconnect rule asks
            self.num_attempts += 1
            if self._hello(min(2.0, deadline_s - time.monotonic())):
                return self.welcome
            if time.monotonic() > deadline_s:
                raise Silence(f"no welcome from {self.address}")

    def _hello(self, timeout_s: float) -> bool:
        self._open()
        hello = {"kind": "hello", "protocol": 1, "token": self.token, "actor_id": self.actor_id}
        self.post({**hello, "incarnation": self.incarnation, "client": "bare"})
        deadline_s = time.monotonic() + timeout_s
        while (message := self._receive(deadline_s - time.monotonic())) is not None:
            header = message[0]
            if header["kind"] == "welcome":
                self._begin(header)
                return True
            if header["kind"] == "error" and header["code"] != "hello_required":
                raise Refused(header["code"])
        return False

    def _open(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        if self.server_key:
            self.socket.curve_serverkey = self.server_key
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.connect(self.address)

    def _begin(self, welcome: dict[str, Any]) -> None:
        if self.welcome and welcome["run_id"] != self.welcome["run_id"]:
            self.kept.clear()
            self.version, self.tensors = 0, {}
        self.welcome, self.send_limit = welcome, welcome["send_limit"]
        while self.kept and self.kept[0][0] < welcome["next_seq"]:
            self.kept.popleft()
        first = welcome["next_seq"]
        self.kept = deque((first + index, header, frames) for index, (_, header, frames) in enumerate(self.kept))
        self.next_seq = first + len(self.kept)
        self.num_sent = 0
        self.post({"kind": "pull", "newer_than": self.version})
        self._send_kept()

    def close(self, reason: str = "done") -> None:
        if self.socket is not None:
            self.post({"kind": "bye", "reason": reason})
        self.context.destroy(linger=500)

    def drop_connection(self) -> None:
        """As a network would: no bye."""
        assert self.socket is not None
        self.socket.close(linger=0)
        self.socket = None

    # -- what an actor does -------------------------------------------------------------------------------------

    def send_segment(self, header: dict[str, Any], tensors: list[tuple[dict[str, Any], bytes]]) -> int:
        """Keep a segment, and send it as soon as there is credit; returns its number."""
        header = {**header, "kind": "segment", "tensors": [description for description, _ in tensors]}
        frames = [frame for _, frame in tensors]
        size = len(msgpack.packb({**header, "seq": 2**63})) + sum(map(len, frames))
        assert size <= self.welcome["max_message_bytes"]
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.kept.append((seq, header, frames))
        self._send_kept()
        return seq

    def _send_kept(self) -> None:
        while self.num_sent < len(self.kept) and self.kept[self.num_sent][0] < self.send_limit:
            seq, header, frames = self.kept[self.num_sent]
            self.post({**header, "seq": seq}, *frames)
            self.num_sent += 1

    def act(self, observation: list[float], noise: random.Random) -> tuple[int, float]:
        logs = log_probabilities(self.welcome["spec"]["policy"], self.tensors, observation)
        (action,) = noise.choices(range(len(logs)), [math.exp(log) for log in logs])
        return action, logs[action]

    def wait_for_weights(self, newer_than: int) -> None:
        self._until(lambda: self.version > newer_than, f"weights above {newer_than}")

    def wait_for_acks(self) -> None:
        self._until(lambda: not self.kept, "acks")

    def wait_for_acks_of(self, num_acks: int) -> None:
        self._until(lambda: len(self.acks) >= num_acks, f"{num_acks} acks")

    def wait_for_error(self) -> dict[str, Any]:
        self._until(lambda: bool(self.errors), "an error")
        return self.errors.pop(0)

    def wait_for_pong(self, nonce: int) -> None:
        self._until(lambda: nonce in self.pongs, f"pong {nonce}")

    def wait_for_bye(self) -> None:
        seen = self.num_byes
        self._until(lambda: self.num_byes > seen, "bye")

    def _until(self, done: Any, what: str) -> None:
        deadline_s = time.monotonic() + self.patience_s
        while not done():
            message = self._receive(deadline_s - time.monotonic())
            if message is None:
                raise Silence(f"no {what} within {self.patience_s} s")
            self._on(*message)

    # -- messages -----------------------------------------------------------------------------------------------

    def post(self, header: dict[str, Any], *frames: bytes) -> None:
        assert self.socket is not None
        self.socket.send_multipart([msgpack.packb(header), *frames])

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[bytes]] | None:
        assert self.socket is not None
        if timeout_s <= 0 or not self.socket.poll(timeout_s * 1000):
            return None
        header, *frames = self.socket.recv_multipart()
        assert len(header) <= 65536
        assert len(frames) < 32
        return msgpack.unpackb(header), frames

    def _on(self, header: dict[str, Any], frames: list[bytes]) -> None:
        match header["kind"]:
            case "ack":
                self._on_ack(header)
            case "credit":
                self.send_limit = max(self.send_limit, header["send_limit"])
                self._send_kept()
            case "weights":
                (payload,) = frames
                assert hashlib.sha256(payload).hexdigest() == header["sha256"]
                assert header["version"] > self.version
                self.version, self.tensors = header["version"], parse_safetensors(payload)
                self.post({"kind": "pull", "newer_than": self.version})
            case "ping":
                self.post({"kind": "pong", "nonce": header["nonce"]})
            case "pong":
                self.pongs.append(header["nonce"])
            case "bye":
                self.num_byes += 1
                self.finished = header["finished"]
                if not self.finished:
                    self.connect()
            case "error":
                self._on_error(header)

    def _on_ack(self, ack: dict[str, Any]) -> None:
        assert ack["status"] in ("accepted", "dropped", "duplicate")
        assert bool(ack["reason"]) == (ack["status"] == "dropped")
        self.acks.append(ack)
        self.num_attempts = 0
        while self.kept and self.kept[0][0] <= ack["seq"]:
            self.kept.popleft()
            self.num_sent = max(0, self.num_sent - 1)
        self.send_limit = max(self.send_limit, ack["send_limit"])
        self._send_kept()

    def _on_error(self, error: dict[str, Any]) -> None:
        self.errors.append(error)
        if error["fatal"]:
            raise Refused(error["code"])
        position = next((at for at, (seq, _, _) in enumerate(self.kept) if seq == error["seq"]), None)
        if error["code"] in ("malformed", "too_large") and position is not None:
            del self.kept[position]
            self.connect()
        elif error["code"] in ("hello_required", "sequence_gap"):
            self.connect()
