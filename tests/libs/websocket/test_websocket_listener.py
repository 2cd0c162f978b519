"""A gateway that speaks WebSocket, with clients of another library: sessions, limits, hostile and silent ones."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from certificates import Authority
from rl_setting import TOKEN, Parts, serving
from shoal.errors import ConfigError
from shoal.libs.websocket import connection, listener, relay
from shoal.libs.websocket.listener import WebSocketListener
from shoal.rl.gateway.listener import format_websocket_address
from waiting import start_thread, wait_for

OBSERVATION = [0.25, -0.5, 0.125, 1.0]
WAIT_S = 60.0


def find_address(parts: Parts) -> str:
    return format_websocket_address(parts.gateway.listener, parts.spec.host)


class Game:
    """A client that says what it is told to, as text."""

    socket: ClientConnection

    def __init__(self, parts: Parts, path: str = "", **options: Any) -> None:
        options = {"compression": None, "proxy": None, "open_timeout": WAIT_S, **options}
        self._connecting = connect(find_address(parts) + path, **options)

    def __enter__(self) -> Game:
        self.socket = self._connecting.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._connecting.__exit__(*error)

    def say(self, kind: str, **header: Any) -> None:
        self.socket.send(json.dumps({"kind": kind, **header}))

    def hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self.socket.recv(WAIT_S))
        return heard

    def ask(self, kind: str, **header: Any) -> dict[str, Any]:
        self.say(kind, **header)
        return self.hear()

    def enter(self, actor_id: str = "game", incarnation: int = 1, inference: str = "remote") -> dict[str, Any]:
        hello = {"actor_id": actor_id, "incarnation": incarnation, "inference": inference}
        return self.ask("hello", protocol=1, token=TOKEN, **hello)

    def act(self, episode: int, step: int, **header: Any) -> dict[str, Any]:
        return self.ask("act", episode=episode, step=step, observation=OBSERVATION, **header)

    def wait_for_end(self) -> tuple[int, str]:
        """Code and reason, after messages that are passed over."""
        try:
            while True:
                self.socket.recv(WAIT_S)
        except ConnectionClosed as closed:
            received = closed.rcvd
        return (received.code, received.reason) if received else (1006, "")


def open_socket(parts: Parts) -> socket.socket:
    return socket.create_connection(("127.0.0.1", parts.gateway.listener.port), WAIT_S)  # type: ignore[union-attr]


def trust(authority: Authority) -> ssl.SSLContext:
    """Of TLS 1.2: with 1.3 the client's thread that reads, and handles tickets, may lose what another one writes."""
    context = ssl.create_default_context(cafile=authority.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


REQUEST = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@contextmanager
def raw_session(parts: Parts) -> Iterator[socket.socket]:
    """A socket behind its handshake: it writes frames itself."""
    with open_socket(parts) as raw:
        raw.sendall(REQUEST)
        assert b" 101 " in raw.recv(4096)
        yield raw


def to_frame(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def read_close(raw: socket.socket) -> int:
    """The code of the close frame that is the last thing that comes."""
    data = b""
    while piece := raw.recv(65536):
        data += piece
    at = data.rindex(b"\x88")
    return int.from_bytes(data[at + 2 : at + 4], "big")


def test_a_newer_incarnation_supersedes_also_one_of_zeromq() -> None:
    with serving(websocket=0) as parts, Game(parts) as old, Game(parts) as new:
        old.enter()
        assert new.enter(incarnation=2)["kind"] == "welcome"
        assert (old.hear()["code"], old.ask("ping")["code"]) == ("superseded", "hello_required")
        assert old.enter()["code"] == "stale_incarnation"


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_gateway_is_a_bye_and_then_a_close(finished: bool) -> None:
    with serving(websocket=0) as parts, Game(parts) as game, Game(parts) as stranger:
        game.enter()
        parts.gateway.close(finished)
        bye = game.hear()
        assert (bye["kind"], bye["finished"]) == ("bye", finished)
        assert game.wait_for_end() == (1001, "the gateway stops")
        assert stranger.wait_for_end()[0] == 1001


def test_a_restarted_gateway_has_its_port_again_and_the_steps_of_an_open_episode_are_not_counted(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, websocket=0) as parts, Game(parts) as game:
        address = find_address(parts)
        game.enter()
        game.act(0, 0)
    with serving(tmp_path, websocket=0) as parts, Game(parts) as game:
        assert find_address(parts) == address
        assert game.enter()["kind"] == "welcome"
        assert game.act(0, 1)["reason"] == "unknown_episode"


def test_a_client_that_has_read_the_bye_closes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FAREWELL_S", 2 * WAIT_S)
    with serving(websocket=0) as parts, Game(parts) as game:
        game.enter()
        closing = start_thread(parts.gateway.close)
        assert game.hear()["kind"] == "bye"
        game.socket.close()
        closing.join(WAIT_S)
        assert (game.socket.close_code, closing.is_alive()) == (1000, False)


def test_pages_of_other_sites_tokens_in_addresses_and_unknown_paths_get_no_connection() -> None:
    with serving(websocket=0, origins=["https://game.example"]) as parts:
        for path, headers, status in (
            ("", {"Origin": "https://evil.example"}, 403),
            ("", {"Origin": "null"}, 403),
            ("/?token=" + TOKEN.replace(" ", "+"), {}, 400),
            ("/pong", {}, 404),
        ):
            with pytest.raises(InvalidStatus) as rejected, Game(parts, path=path, additional_headers=headers):
                pass
            assert rejected.value.response.status_code == status
        for origin in ("https://game.example", "http://localhost:8000"):
            with Game(parts, additional_headers={"Origin": origin}) as game:
                assert game.enter()["kind"] == "welcome"
        with open_socket(parts) as browser:  # that opens the address as a page
            browser.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nOrigin: http://a\r\nOrigin: http://b\r\n\r\n")
            assert browser.recv(4096).startswith(b"HTTP/1.1 4")


# -- certificates -----------------------------------------------------------------------------------------------------


def test_wss_takes_new_content_of_its_files_and_is_not_held_up_by_a_silent_client(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "one"), Authority(tmp_path, "two")
    files = authority.sign()
    tls = {"certificate": files.certificate, "key": files.key}
    trusting = trust(authority)
    with serving(websocket=0, tls=tls, heartbeat_s=0.05, timeout_s=30.0) as parts, open_socket(parts):
        assert find_address(parts).startswith("wss://")
        with open_socket(parts) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"wss, not ws" in plain.recv(4096)
            with Game(parts, ssl=trusting) as game:
                assert game.enter()["kind"] == "welcome"
                assert game.act(0, 0)["action"] in (0, 1)
                (tmp_path / "server.key").write_text("half of a key")
                other.sign()
                trusting_other = trust(other)

                def enter_again() -> bool:
                    try:
                        with Game(parts, ssl=trusting_other) as new:
                            return bool(new.enter("new"))
                    except ssl.SSLError:
                        return False

                wait_for(enter_again, what="the new certificate")
                assert game.act(0, 1)["action"] in (0, 1)


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign()
    parts = Parts(websocket=0, tls={"certificate": files.certificate, "key": files.certificate})
    with pytest.raises(ConfigError, match=r"gateway\.tls"):
        parts.gateway.start()
    parts.gateway.close()


def test_a_client_that_never_begins_tls_is_closed_in_time(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign()
    tls = {"certificate": files.certificate, "key": files.key}
    with serving(websocket=0, tls=tls, heartbeat_s=0.05, timeout_s=0.1) as parts, open_socket(parts) as silent:
        assert silent.recv(1) == b""


# -- limits and hostility ---------------------------------------------------------------------------------------------


def test_messages_beyond_the_limits_end_the_connection_with_1009() -> None:
    with serving(websocket=0, max_message_bytes=65536) as parts, Game(parts) as game:
        with Game(parts) as stranger:
            stranger.socket.send("x" * (connection.MAX_HELLO_BYTES + 1))
            assert stranger.wait_for_end()[0] == 1009
        game.enter()
        game.socket.send("x" * 65536)
        assert game.hear()["code"] == "malformed"
        game.socket.send([b"x" * 65536, b"x"])  # in two fragments
        assert game.wait_for_end()[0] == 1009


def test_fragments_make_one_message_and_empty_ones_take_nothing() -> None:
    with serving(websocket=0) as parts, Game(parts) as game:
        game.enter()
        text = json.dumps({"kind": "act", "episode": 0, "step": 0, "observation": OBSERVATION})
        game.socket.send([*text, *[""] * 100])
        assert game.hear()["action"] in (0, 1)


def test_a_stranger_is_heard_for_a_few_frames_and_what_is_not_websocket_ends() -> None:
    with serving(websocket=0) as parts:
        with raw_session(parts) as raw:
            raw.sendall(to_frame(Opcode.PING, b"") * (connection.MAX_FRAMES_BEFORE + 1))
            assert read_close(raw) == 1008
        with raw_session(parts) as raw:
            raw.sendall(b"\x81\x02{}")  # without a mask
            assert read_close(raw) == 1002
        for request, answer in (
            (b"GET / HTTP/1.1\r\n" + b"a: %s\r\n" % (b"x" * 4000) * 9, b"more than 32768 bytes"),
            (b"POST / HTTP/1.1\r\n\r\n", b"POST"),
            (b"\x16\x03\x01\x02\x00\x01\x00", b"ws, not wss"),
        ):
            with open_socket(parts) as raw:
                raw.sendall(request)
                said = b"".join(iter(partial(raw.recv, 4096), b""))
                assert said.startswith(b"HTTP/1.1 4")
                assert answer in said
        noise = np.random.default_rng(0)
        for length in (1, 20, 500):
            for _ in range(5):
                with open_socket(parts) as raw:
                    raw.sendall(noise.bytes(length))
                with raw_session(parts) as raw:
                    raw.sendall(noise.bytes(length))
        with Game(parts) as game:
            assert game.enter()["kind"] == "welcome"


def test_connections_without_a_session_end_in_time_and_the_oldest_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 2)
    with serving(websocket=0, heartbeat_s=0.05, timeout_s=0.3) as parts:
        with open_socket(parts) as oldest, open_socket(parts), open_socket(parts):
            assert oldest.recv(1) == b""
            with Game(parts) as silent:
                assert silent.wait_for_end() == (1008, "no session: say hello")
        with Game(parts) as game:
            game.enter()
            game.say("bye")
            assert game.wait_for_end() == (1008, "no session: say hello")  # though not at once
        wait_for(lambda: parts.gateway.listener._connections == {}, what="the last one's end")  # type: ignore[union-attr]


def say_hello(raw: socket.socket, actor_id: str) -> None:
    hello = {"kind": "hello", "protocol": 1, "token": TOKEN, "actor_id": actor_id, "incarnation": 1}
    raw.sendall(to_frame(Opcode.TEXT, json.dumps(hello).encode()))
    assert b"welcome" in raw.recv(65536)


def test_a_session_that_floods_leaves_the_others_their_turns() -> None:
    with serving(websocket=0) as parts, Game(parts) as honest, raw_session(parts) as flooding:
        say_hello(flooding, "flooding")
        honest.enter("honest")
        flooding.sendall(to_frame(Opcode.TEXT, b'{"kind":"nonsense"}') * 3000)
        for step in range(5):
            assert honest.act(0, step)["action"] in (0, 1)
        counts = {actor["actor_id"]: actor["invalid"] for actor in parts.gateway.stats()["actors"]}
        assert counts["flooding"]["unknown_kind"] < 3000


def test_clients_without_a_session_rest_while_games_play(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(websocket=0, heartbeat_s=0.05) as parts, Game(parts) as game:
        game.enter()
        assert isinstance(parts.gateway.listener, WebSocketListener)
        monkeypatch.setattr(listener, "BUSY_S", 1e9)
        parts.gateway.listener._rested_at = 1e18  # as after the longest of turns
        game.act(0, 0)
        with open_socket(parts) as stranger:
            stranger.sendall(REQUEST)
            for step in range(1, 20):
                game.act(0, step)
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
            parts.gateway.listener._rested_at = 0.0
            stranger.settimeout(WAIT_S)
            assert b" 101 " in stranger.recv(4096)


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_PARTS", 100)
    with serving(websocket=0) as parts, raw_session(parts) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        say_hello(raw, "mute")
        for each in parts.gateway.listener._routes.values():  # type: ignore[union-attr]
            each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ping = to_frame(Opcode.PING, b"x" * 125) * 1000
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:
                raw.sendall(ping)
        wait_for(lambda: not parts.gateway.stats()["actors"][0]["connected"], what="the end of the session")


def test_without_a_file_descriptor_the_oldest_stranger_leaves_and_without_one_the_listener_waits() -> None:
    class Full:
        """A listening socket for which the process has no descriptor, for as long as it says so."""

        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.num_left = 3
            self.num_asked = 0

        def accept(self) -> Any:
            self.num_asked += 1
            if self.num_left:
                self.num_left -= 1
                raise OSError(24, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    with serving(websocket=0, heartbeat_s=0.1) as parts, Game(parts) as game:
        game.enter()
        its = parts.gateway.listener
        assert its is not None
        with open_socket(parts) as oldest:
            wait_for(lambda: len(its._waiting) == 1, what="a stranger")  # type: ignore[attr-defined]
            full = its._socket = Full(its._socket)  # type: ignore[attr-defined]
            with Game(parts) as new:
                assert oldest.recv(1) == b""
                assert new.enter("new")["kind"] == "welcome"
            assert full.num_asked < 20


# -- pauses -----------------------------------------------------------------------------------------------------------


def test_a_game_at_a_menu_keeps_its_session_for_the_pause_and_holds_no_credit() -> None:
    with (
        serving(websocket=0, heartbeat_s=0.05, timeout_s=0.1, pause_s=600.0, max_credits=1) as parts,
        raw_session(parts) as mute,
        Game(parts) as answering,  # its library answers pings by itself
    ):
        its = parts.gateway.listener
        assert isinstance(its, WebSocketListener)
        its._ping_s = 0.01
        say_hello(mute, "mute")
        answering.enter("answering", inference="local")
        of_mute, of_answering = (each for each in its._routes.values())
        wait_for(lambda: parts.gateway._sessions.compute_open_credit() == {}, what="credit that lapses")
        for each in (of_mute, of_answering):
            each.received_at -= 500.0
        wait_for(lambda: of_answering.received_at > of_mute.received_at + 400.0, what="a pong")
        of_mute.received_at -= 100.0
        assert read_close(mute) == 1008
        lost = [each[2] for each in parts.gateway.take_events() if each[1] == "actor_lost"]
        assert [(each["actor_id"], each["reason"]) for each in lost] == [("mute", "timed out")]
        assert answering.ask("ping")["kind"] == "pong"


# -- several policies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tls", [False, True])
def test_one_address_reaches_every_policy_by_its_path(tmp_path: Path, is_tls: bool) -> None:
    authority = Authority(tmp_path)
    files = authority.sign(names=("game.example", "127.0.0.1"))
    tls = {"tls": {"certificate": files.certificate, "key": files.key}} if is_tls else {}
    ssl_options = {"ssl": trust(authority)} if is_tls else {}
    fields = {"websocket": 0, **tls}
    with serving(setting={"policy": "left"}, **fields) as left, serving(setting={"policy": "right"}, **fields) as right:
        assert left.gateway.listener is not None
        left.gateway.listener.relay({"right": find_address(right)})
        with Game(left, path="/right", **ssl_options) as game, Game(left, path="/left", **ssl_options) as other:
            game.enter("of right")
            other.enter("of left")
            for step in range(3):
                assert game.act(0, step)["action"] in (0, 1)
            game.socket.send("x" * 3_000_000)  # more than either side takes at once
            assert game.hear()["code"] == "malformed"
            assert [each["actor_id"] for each in right.gateway.stats()["actors"]] == ["of right"]
            assert [each["actor_id"] for each in left.gateway.stats()["actors"]] == ["of left"]
            right.gateway.close(finished=True)
            assert game.hear()["finished"] is True
            assert game.wait_for_end()[0] == 1001
        for path, status in (("/", 404), ("/middle", 404)):
            with pytest.raises(InvalidStatus) as rejected, Game(left, path=path, **ssl_options):
                pass
            assert rejected.value.response.status_code == status
        with pytest.raises(InvalidStatus) as rejected, Game(left, path="/right", **ssl_options):
            pass
        assert rejected.value.response.body == b"the gateway of this policy is away: try again"


def test_what_one_side_has_sent_before_its_end_reaches_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(websocket=0) as parts, socket.create_server(("127.0.0.1", 0)) as other:
        its = parts.gateway.listener
        assert isinstance(its, WebSocketListener)
        its.relay({"right": f"ws://127.0.0.1:{other.getsockname()[1]}"})
        with open_socket(parts) as game:
            game.sendall(REQUEST.replace(b"GET / ", b"GET /right "))
            upstream, _ = other.accept()
            upstream.recv(4096)
            sent = start_thread(lambda: (upstream.sendall(bytes(20_000_000)), upstream.close()))
            wait_for(lambda: any(each.unsent for each in its._relays._sides.values()), what="a game that does not read")
            assert len(b"".join(iter(partial(game.recv, 65536), b""))) == 20_000_000
            sent.join(WAIT_S)
            game.close()
            wait_for(lambda: not its._relays._sides, what="the end of both sides")
            monkeypatch.setattr(relay, "LINGER_S", 0.1)
            with open_socket(parts) as silent:
                silent.sendall(REQUEST.replace(b"GET / ", b"GET /right "))
                other.accept()[0].close()
                assert b"503" in silent.recv(4096)
                wait_for(lambda: not its._relays._sides, what="the end of one that does not close")
