"""Noise at a living gateway: whatever arrives, it answers or ignores it, and whoever behaves is served as ever."""

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgpack
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from rl_setting import TOKEN, Parts, segment, serving
from shoal.actor import ActorClient
from shoal.rl.experience.queue import BatchRequest
from shoal.wire import Bye, Credit, Hello, Ping, Pull, encode
from shoal.wire.messages import ActionMessage, ActMessage, ActsMessage
from waiting import wait_for
from wire_cases import damaged_messages, frames_of

PATIENCE_MS = 60_000
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


class Player(threading.Thread):
    """An actor that behaves: it sends one segment after another, and each must be accepted."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(name="player")
        self.client = ActorClient(parts.address, TOKEN, "player", incarnation=1)
        self.stopping = threading.Event()
        self.num_sent = 0
        self.drained = False

    def run(self) -> None:
        with self.client:
            while not self.stopping.is_set():
                self.client.send(segment(2))
                self.num_sent += 1
            self.drained = self.client.drain(60)


def consume(parts: Parts, stopping: threading.Event) -> None:
    """A learner that takes and settles, and learns nothing."""
    while not stopping.is_set():
        batch = parts.queue.take("learner", BatchRequest(16, 16, 8, 0.05))
        if batch is not None:
            parts.queue.acknowledge(batch.lease_id, [None] * len(batch.lengths))


def plays_on(parts: Parts) -> None:
    account = parts.ledger.get_account(("player", 1))
    before = account.consumed
    wait_for(lambda: account.consumed > before + 20, what="a player that is served")


@contextmanager
def disturbed(**spec: object) -> Iterator[Parts]:
    """A gateway, a learner and a player; disturb them inside the block. After it, the player's book must be clean."""
    with serving(**spec) as parts:
        player = Player(parts)
        learner = threading.Thread(target=consume, args=(parts, player.stopping))
        player.start()
        learner.start()
        try:
            plays_on(parts)
            yield parts
            plays_on(parts)
        finally:
            player.stopping.set()
            player.join(timeout=60)
            learner.join(timeout=60)
        account = parts.ledger.get_account(("player", 1))
        assert player.drained
        assert player.client.reconnects == 0
        assert player.client.acknowledged == {"accepted": player.num_sent, "dropped": 0, "duplicate": 0}
        assert account.received == player.num_sent
        assert account.is_balanced
        assert not account.dropped
        assert all(account.is_balanced for account in parts.ledger.get_accounts().values())


class RawDealer:
    """A DEALER that sends whatever it is given and reads what comes back."""

    def __init__(self, parts: Parts) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(parts.address)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> dict[str, object]:
        assert self.socket.poll(PATIENCE_MS), "the gateway does not answer"
        header: dict[str, object] = msgpack.unpackb(self.socket.recv_multipart()[0])
        return header

    def hello(self, actor_id: str, inference: str = "local") -> None:
        self.send([encode(Hello(1, TOKEN, actor_id, 1, inference=inference))])
        while self.receive()["kind"] != "welcome":
            pass

    def until_pong(self, nonce: int) -> list[dict[str, object]]:
        """Everything up to the answer to a ping: what was sent before has been handled by then."""
        self.send([encode(Ping(nonce))])
        answers = []
        while (answer := self.receive()).get("nonce") != nonce or answer["kind"] != "pong":
            answers.append(answer)
        return answers


def test_remote_inference_answers_noise_and_its_own_book_stays_balanced() -> None:
    """3,000 damaged observations: each message gets one answer, and segments come of valid steps alone."""
    frame = np.linspace(-1, 1, 4, dtype=np.float32).tobytes()
    with disturbed() as parts, closing(RawDealer(parts)) as noisy:
        noisy.hello("noisy", "remote")
        reasons: Counter[str] = Counter()
        for burst in range(60):
            first = 4 * burst
            valid = [[encode(ActMessage(first + offset, 0, 1.0)), frame] for offset in range(4)]
            valid += [[encode(ActMessage(first + offset, 1, 1.0, offset == 1)), frame] for offset in range(3)]
            rows = first + 2, first + 3
            valid += [[encode(ActsMessage(rows, (at, at))), 2 * frame, bytes(8), bytes([at, 0])] for at in (0, 1)]
            valid += [[encode(Pull(1))], [encode(ActionMessage(1, 1, [1.5]))]]
            for frames in damaged_messages(valid, 50, seed=burst):
                noisy.send(frames or [b""])
            answers = noisy.until_pong(10**9 + burst)
            reasons.update(str(answer["reason"]) for answer in answers if answer["kind"] == "action")
            refused = [each for answer in answers if answer["kind"] == "actions" for each in answer["refused"]]
            reasons.update(f"row {each['reason']}" for each in refused)
        account = parts.ledger.get_account(("noisy", 1))
        assert {"invalid", "unknown_episode", "ended_episode", "row invalid", "row ended_episode"} <= reasons.keys()
        assert not {"failed", "row failed"} & reasons.keys()
        assert not account.dropped


def test_an_actor_that_sends_noise_gets_an_answer_to_everything_and_disturbs_nobody() -> None:
    """6,000 damaged messages with a session: the errors read are those counted, the acks are those in the book."""
    answers: list[dict[str, object]] = []
    with disturbed() as parts, closing(RawDealer(parts)) as noisy:
        noisy.hello("noisy")
        for burst in range(120):
            expected = parts.ledger.get_account(("noisy", 1)).next_seq
            valid = [frames_of(segment(3), expected + offset) for offset in range(4)]
            valid += [[encode(message)] for message in (Ping(burst), Pull(1), Credit(5))]
            for frames in damaged_messages(valid, 50, seed=burst):
                noisy.send(frames or [b""])
            answers += noisy.until_pong(10**9 + burst)
        errors = Counter(answer["code"] for answer in answers if answer["kind"] == "error")
        acks = Counter(answer["status"] for answer in answers if answer["kind"] == "ack")
        account = parts.ledger.get_account(("noisy", 1))
        assert errors == parts.gateway.stats()["protocol_errors"]
        assert {"malformed", "unknown_kind", "sequence_gap"} <= errors.keys()
        assert acks["accepted"] + acks["dropped"] == account.received
        assert acks["duplicate"] == account.duplicates
        assert acks["dropped"] == account.dropped.total()
        assert {"invalid_frames", "invalid_dtype", "invalid_shape"} <= account.dropped.keys()
        assert {answer["kind"] for answer in answers} <= {"error", "ack", "credit", "pong", "weights"}


def test_a_stranger_that_sends_noise_gets_errors_and_nothing_else() -> None:
    with disturbed() as parts, closing(RawDealer(parts)) as stranger:
        valid = [frames_of(segment(3), 0), [encode(Pull(0))], [encode(Bye())], [encode(Hello(1, "guess", "player", 2))]]
        errors: Counter[str] = Counter()
        for frames in damaged_messages(valid, 2000, seed=1):
            stranger.send(frames or [b""])
            answer = stranger.receive()
            assert answer["kind"] == "error"
            errors[str(answer["code"])] += 1
        assert errors == parts.gateway.stats()["protocol_errors"]
        assert {"bad_token", "hello_required", "malformed", "unknown_kind"} <= errors.keys()
        assert parts.ledger.get_accounts().keys() == {("player", 1)}, "a stranger opens no account"


def test_noise_that_nobody_reads_the_answers_to() -> None:
    with disturbed() as parts, ExitStack() as stack:
        deaf = [stack.enter_context(closing(RawDealer(parts))) for _ in range(5)]
        for number, dealer in enumerate(deaf):
            for frames in damaged_messages([frames_of(segment(3), 0), [encode(Ping())]], 1000, seed=number):
                dealer.send(frames or [b""])
        wait_for(lambda: sum(parts.gateway.stats()["protocol_errors"].values()) == 5000, what="5,000 errors")


# -- below ZeroMQ -----------------------------------------------------------------------------------------------------


def raw_connection(parts: Parts) -> socket.socket:
    return socket.create_connection(("127.0.0.1", parts.gateway.port), timeout=60)


def garbage() -> list[bytes]:
    noise = random.Random(2)
    begun = [GREETING[:1], GREETING[:9], GREETING[:11], GREETING[:40], GREETING, b"\x01\x00", b"\xff" * 10]
    return [
        *begun,  # then silence
        b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        GREETING.replace(b"NULL", b"CURV") + bytes(100),
        GREETING + b"\x04\x05\x05READY" * 3,
        *[beginning + noise.randbytes(500) for beginning in begun for _ in range(5)],
        *[noise.randbytes(noise.randint(1, 2000)) for _ in range(100)],
    ]


def test_garbage_on_the_bare_tcp_port_disturbs_nobody() -> None:
    with disturbed() as parts, ExitStack() as connections:
        for data in garbage():
            connection = connections.enter_context(raw_connection(parts))
            connection.sendall(data)  # and stay
        plays_on(parts)


def joined_by_hand(parts: Parts) -> socket.socket:
    """A connection after the ZMTP handshake (RFC 23), made of bytes."""
    connection = raw_connection(parts)
    connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
    received = b""
    while b"READY" not in received:
        received += connection.recv(4096)
    return connection


def ended(connection: socket.socket) -> bool:
    """Whether the peer closes the connection, in one way or the other."""
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


def frame(data: bytes, more: bool = False) -> bytes:
    return bytes([2 + more]) + struct.pack(">Q", len(data)) + data


def test_a_frame_that_is_announced_as_too_large_ends_the_connection_at_once() -> None:
    with disturbed(max_message_bytes=64 * 1024) as parts:
        for size_bytes in (64 * 1024 + 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1):
            with joined_by_hand(parts) as connection:
                connection.sendall(frame(encode(Ping())))
                assert b"hello_required" in connection.recv(4096)
                connection.sendall(b"\x02" + struct.pack(">Q", size_bytes))
                assert ended(connection), size_bytes


def test_a_message_that_never_ends_and_a_connection_that_breaks_inside_one() -> None:
    with disturbed() as parts:
        with joined_by_hand(parts) as endless, joined_by_hand(parts) as broken:
            for _ in range(200):
                endless.sendall(frame(b"x" * 1000, more=True))
            broken.sendall(frame(encode(Ping()), more=True) + frame(b"x" * 1000)[:500])
            plays_on(parts)
        assert not parts.gateway.stats()["protocol_errors"]


def test_an_oversized_frame_ends_only_the_connection_it_came_on() -> None:
    with disturbed(max_message_bytes=64 * 1024) as parts, closing(RawDealer(parts)) as big:
        monitor = big.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        big.hello("big")
        half = bytes(40 * 1024)
        big.send([encode(Ping()), half, half])  # too large together: an answer
        assert big.receive() == {
            "kind": "error",
            "code": "too_large",
            "message": f"a message of {len(encode(Ping())) + 2 * len(half)} bytes, at most 65536",
            "fatal": False,
            "seq": None,
        }
        assert big.until_pong(5) == [], "the session went on"
        big.send([encode(Ping()), bytes(64 * 1024 + 1)])  # too large in one frame: ZeroMQ ends the connection
        assert monitor.poll(PATIENCE_MS), "still connected"
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        big.socket.disable_monitor()
        big.send([encode(Ping())])  # over the new connection that ZeroMQ has made
        assert big.receive()["code"] == "hello_required"
        big.hello("big")
        assert big.until_pong(6) == []
