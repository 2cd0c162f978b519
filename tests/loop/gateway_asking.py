"""What asks a gateway in the tests: an actor's client, a socket that says what it is told to, and who is there."""

from __future__ import annotations

from typing import TypeVar

import zmq

from rl_setting import TOKEN, Parts
from shoal.actor import ActorClient
from shoal.wire import MessageLimits, Segment, decode, encode, pack_segment
from shoal.wire.messages import Ack, Hello, Message, Welcome

M = TypeVar("M", bound=Message)


class Raw:
    """A DEALER socket that says what it is told to."""

    def __init__(self, parts: Parts) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(parts.address)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def hear(self, kind: type[M], timeout_s: float = 60.0) -> M:
        """The next message of this kind; others are passed over."""
        while self.socket.poll(int(timeout_s * 1000)):
            message = decode(self.socket.recv_multipart(), MessageLimits())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def rest(self, quiet_s: float = 1.0) -> list[Message]:
        """What else has been said, until nothing is for a while."""
        heard = []
        while self.socket.poll(int(quiet_s * 1000)):
            heard.append(decode(self.socket.recv_multipart(), MessageLimits()))
        return heard

    def enter(self, actor_id: str = "raw", incarnation: int = 1, inference: str = "local") -> Welcome:
        self.say(Hello(1, TOKEN, actor_id, incarnation, inference=inference))
        return self.hear(Welcome)

    def send(self, seq: int, value: Segment) -> Ack:
        self.socket.send_multipart(pack_segment(value, seq))
        return self.hear(Ack)


def client(parts: Parts, actor_id: str = "one", **options: object) -> ActorClient:
    return ActorClient(parts.address, TOKEN, actor_id, timeout_s=60.0, **options)  # type: ignore[arg-type]


def connected(parts: Parts) -> set[str]:
    return {actor["actor_id"] for actor in parts.gateway.stats()["actors"] if actor["connected"]}
