"""A run that takes its spaces from the first game that joins, over both transports, and keeps them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from rl_setting import TOKEN
from shoal.actor import ActorClient
from shoal.errors import ConfigError, Refused
from shoal.rl.first_game import FirstGame
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec
from shoal.wire import MessageLimits, decode, encode
from shoal.wire.messages import ErrorMessage, Hello, Ping
from waiting import start_thread, wait_for

SPEC = RLSpec(env="ask", hidden=(8,), gateway={"websocket": 0})
OFFERS = {"name": "catch", "observation": [4], "action": 3}
WAIT_S = 60.0


@contextmanager
def waiting(folder: Path) -> Iterator[tuple[list[str], list[LocalLoop]]]:
    """A loop that another thread opens: where it waits for a game, and the loop once it has begun."""
    said, loops = list[str](), list[LocalLoop]()

    def run() -> None:
        loop = LocalLoop.open(SPEC, folder, TOKEN, say=said.append)
        loop.start()
        loops.append(loop)

    thread = start_thread(run)
    try:
        wait_for(lambda: said, WAIT_S)
        assert "waiting for a game that brings its spaces, at\n    tcp://127.0.0.1:" in said[0]
        yield [word for word in said[0].split() if "://" in word], loops
    finally:
        thread.join(WAIT_S)
        loops[0].close()


def ask(socket: Any, **message: Any) -> dict[str, Any]:
    socket.send(json.dumps(message))
    answer: dict[str, Any] = json.loads(socket.recv(WAIT_S))
    return answer


def join(socket: Any, token: str = TOKEN, **fields: Any) -> dict[str, Any]:
    return ask(
        socket, kind="hello", protocol=1, token=token, actor_id="me", incarnation=1, inference="remote", **fields
    )


def test_a_game_that_is_typed_by_hand_brings_the_spaces_of_the_run(tmp_path: Path) -> None:
    with waiting(tmp_path / "run") as ((_, address), loops):
        with connect(address) as game:
            assert ask(game, kind="ping")["code"] == "hello_required"
            assert join(game, "x", offers=OFFERS)["code"] == "bad_token"
            refused = join(game)
            assert (refused["code"], refused["fatal"]) == ("no_spaces", False)
            assert '"offers": {"observation": [4], "action": 3}' in refused["message"]
            for offers, problem in (
                ({"observation": [4]}, "action = None: is missing"),
                ({"observation": [2, 2], "action": 3}, "observes float32 [2, 2]"),
                ({"observation": [4], "action": {"dtype": "int32", "high": 2}}, "action.dtype: this game has int32"),
            ):
                refused = join(game, offers=offers)
                assert (refused["code"], refused["fatal"]) == ("wrong_spaces", True)
                assert problem in refused["message"]
            answer = join(game, offers=OFFERS)
            assert (answer["kind"], answer["finished"]) == ("bye", False)
            with pytest.raises(ConnectionClosed):
                game.recv(WAIT_S)
        wait_for(lambda: loops, WAIT_S)
        assert loops[0].websocket_address == address
        with connect(address) as game:
            assert join(game, offers={"observation": [5], "action": 3})["code"] == "wrong_spaces"
            assert join(game, offers=OFFERS)["spec"]["observation"]["shape"] == [4]
            assert ask(game, kind="act", episode=0, step=0, observation=[0, 0, 0, 0])["action"] in (0, 1, 2)
    with LocalLoop.open(SPEC, tmp_path / "run", TOKEN, say=pytest.fail) as loop:
        assert (loop.websocket_address, loop.gateway.experience.action.high) == (address, 2)


def test_a_client_of_zeromq_brings_them_and_is_welcomed_by_the_same_call(tmp_path: Path) -> None:
    with waiting(tmp_path / "run") as ((address, _), _):
        with ActorClient(address, TOKEN, "brings", offers=OFFERS) as client:
            assert client.spec.action.high == 2
        other = ActorClient(address, TOKEN, "other", offers={"observation": [5], "action": 3})
        with pytest.raises(Refused, match=r"wrong_spaces.*observation.shape: this game has \[5\], and the run \[4\]"):
            other.connect()
        other.close()


def test_what_comes_without_spaces_is_answered_and_a_gateway_that_cannot_listen_is_refused(tmp_path: Path) -> None:
    game = FirstGame(SPEC.update({"gateway": {"websocket": None}}), tmp_path / "run", TOKEN)
    with zmq.Context() as context:
        for number, message in enumerate((Hello(1, TOKEN, "a", 1), Ping(), Hello(2, TOKEN, "b", 1))):
            with context.socket(zmq.DEALER) as socket:
                socket.connect(game.format_addresses()[0])
                socket.send(encode(message))
                assert game.wait(0.1) == ("", "")
                answer = decode(socket.recv_multipart(), MessageLimits())
                assert isinstance(answer, ErrorMessage)
                assert answer.code == ("no_spaces", "hello_required", "bad_version")[number]
        game.close()
    elsewhere = SPEC.update({"gateway": {"host": "192.0.2.1", "curve": True, "websocket": None}})
    with pytest.raises(ConfigError, match=r"gateway.host"):
        FirstGame(elsewhere, tmp_path, TOKEN, zmq.curve_keypair())
