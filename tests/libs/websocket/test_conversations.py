"""What clients of every dialect say to a gateway, its answers, byte for byte as they were recorded, and the segments
that come of it: of one agent and of many, of users, with mistakes and with connections that break."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace
from websockets.sync.client import ClientConnection, connect

from rl_setting import EXPERIENCE, Parts
from shoal.open_inference.episodes import EpisodeRequest
from shoal.rl.gateway import sessions
from shoal.rl.gateway.listener import format_websocket_address
from shoal.weights import WeightSnapshot
from shoal.wire import TensorSpec
from shoal.wire.action_masks import describe_masks

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("conversations.json").read_text())
PAIR = TensorSpec("int64", (2,), 0, 1)
POLICIES = {
    "plain": replace(EXPERIENCE, segment_length=4),
    "masked": replace(
        EXPERIENCE,
        segment_length=4,
        action=PAIR,
        policy=replace(EXPERIENCE.policy, kind="mlp_multi_categorical", action_sizes=(2, 2)),
        extras=(describe_masks(PAIR, (2, 2)),),
    ),
}


class ZmqClient:
    """A DEALER socket; a message is its frames in hex."""

    def __init__(self, parts: Parts) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(parts.address)

    def send(self, frames: Any) -> None:
        self._socket.send_multipart([bytes.fromhex(each) for each in frames])

    def receive(self) -> Any:
        assert self._socket.poll(60_000), "no answer"
        return [frame.hex() for frame in self._socket.recv_multipart()]

    def close(self) -> None:
        self._context.destroy(linger=0)


class WebSocketClient:
    """A message is its text, or the bytes of a binary one in hex, in a list."""

    def __init__(self, parts: Parts) -> None:
        address = format_websocket_address(parts.gateway.listener, parts.spec.host)
        self._connecting = connect(address, compression=None, proxy=None)
        self._socket: ClientConnection = self._connecting.__enter__()

    def send(self, message: Any) -> None:
        self._socket.send(message if isinstance(message, str) else bytes.fromhex(message[0]))

    def receive(self) -> Any:
        message = self._socket.recv(60.0)
        return message if isinstance(message, str) else [message.hex()]

    def close(self) -> None:
        self._connecting.__exit__(None, None, None)


class UserClient:
    """Users of the endpoint; handles, which are drawn, are known by their numbers."""

    def __init__(self, parts: Parts) -> None:
        self._gateway = parts.gateway
        self._handles = list[str]()
        self._answer = {}

    def send(self, request: Any) -> None:
        number = request.get("episode")
        handle = "" if number is None else self._handles[number]
        answer = self._gateway.answer_user(EpisodeRequest(**{**request, "model": "m", "episode": handle}), 60.0)
        self._answer = {**answer._asdict()} if isinstance(answer, tuple) else {"action": answer.action}
        if number is None and not isinstance(answer, tuple):
            self._handles.append(answer.episode)

    def receive(self) -> Any:
        return self._answer

    def close(self) -> None:
        pass


CLIENTS = {"zmq": ZmqClient, "ws": WebSocketClient, "user": UserClient}


@contextmanager
def open_gateway(policy: str) -> Iterator[Parts]:
    """Its policy takes action 0 where the first number of an observation is above 0, as good as certainly."""
    parts = Parts(experience=POLICIES[policy], setting={"learns_from_users": policy == "plain"}, websocket=0)
    weight = np.zeros((4 if policy == "masked" else 2, 4), np.float32)
    weight[::2, 0], weight[1::2, 0] = 1000, -1000
    arrays = {"policy.0.weight": weight, "policy.0.bias": np.zeros(len(weight), np.float32)}
    parts.store.publish(WeightSnapshot.of(2, arrays))
    parts.gateway.start()
    try:
        yield parts
    finally:
        parts.store.close()
        parts.gateway.close()
        parts.ledger.close()


def summarize(parts: Parts) -> dict[str, Any]:
    """The accounts, the actor's own counts, and a hash of all that the learner gets."""
    stats = parts.gateway.stats()
    totals = parts.ledger.get_totals()
    digest = hashlib.sha256()
    if len(parts.queue):
        batch = parts.take()
        arrays = (batch.observations, batch.actions, batch.rewards, batch.log_probabilities, batch.versions)
        for each in (*arrays, batch.lengths, batch.terminated, *batch.extras.values()):
            digest.update(f"{each.dtype.str}{each.shape}".encode() + each.tobytes())
    return {
        "segments": digest.hexdigest(),
        "received": totals.received,
        "dropped": dict(totals.dropped),
        "episodes": stats["episodes"],
        "mean_return": repr(stats["mean_return"]),
        "open": (stats["remote_inference"] or {}).get("open_episodes"),
        "invalid": {each["actor_id"]: each["invalid"] for each in stats["actors"] if each["invalid"]},
        "errors": stats["protocol_errors"],
    }


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_conversation_is_repeated_byte_for_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "NEW_LAPSE_S", 600.0)  # on a busy machine credit would lapse, and come anew
    monkeypatch.setattr(sessions, "LAPSE_S", 600.0)
    recorded = RECORDED[name]
    clients: dict[str, Any] = {}
    with open_gateway(recorded["policy"]) as parts:
        for number, (client, what, message) in enumerate(recorded["lines"]):
            if what == "open":
                clients[client] = CLIENTS[message](parts)
            elif what == "close":
                clients.pop(client).close()
            elif what == ">":
                clients[client].send(message)
            else:
                assert clients[client].receive() == message, f"line {number} of {name}"
        assert summarize(parts) == recorded["summary"]
        for each in clients.values():
            each.close()
