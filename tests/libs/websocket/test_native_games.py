"""Games in C++ and C#: they learn, outlive cuts and restarts, and name what a server or their game does wrong."""

import json
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from msgspec.structs import replace
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.server import ServerConnection, serve
from websockets.utils import accept_key

from cutting_proxy import CuttingProxy
from rl_setting import EXPERIENCE, TOKEN, Parts, serving
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec
from waiting import start_thread, wait_for

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / "clients"
TOOLS = {"c++": ("g++",), "c#": ("mcs", "mono")}
SPEC = RLSpec(hidden=(32,), segment_length=32).override(
    [
        "learner.batch_steps=256",
        "learner.max_batch_steps=256",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.03",
        "algorithm.discount=0.8",
        "algorithm.entropy_cost=0.003",
        "gateway.websocket=0",
    ]
)
OBSERVATION = "0.25,-0.5,0.125,1"
NUM_ODD = 200
Programs = dict[str, list[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The command of each language's game, where the machine has its compiler."""
    folder = tmp_path_factory.mktemp("games")
    checks = ["-fsanitize=address,undefined", "-fno-sanitize=null,alignment,vptr,object-size", "-fno-sanitize-recover"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *checks]
    sources = [HERE / "NativeGame.cs", CLIENTS / "csharp" / "Catch.cs", CLIENTS / "csharp" / "Shoal.cs"]
    compilers = {
        "c++": ["g++", *flags, "-I", CLIENTS / "cpp", HERE / "native_game.cpp", "-o", folder / "game"],
        "c#": ["mcs", "-warnaserror", "-main:NativeGame", f"-out:{folder / 'game.exe'}", *sources],
    }
    commands = {"c++": [str(folder / "game")], "c#": ["mono", str(folder / "game.exe")]}
    found = {name: command for name, command in commands.items() if all(map(shutil.which, TOOLS[name]))}
    for name in found:
        subprocess.run(compilers[name], check=True)
    return found


@pytest.fixture(params=list(TOOLS))
def program(request: pytest.FixtureRequest, programs: Programs) -> list[str]:
    if request.param not in programs:
        pytest.skip(f"needs {' and '.join(TOOLS[request.param])}")
    return programs[request.param]


@contextmanager
def started(command: list[str], token: str = TOKEN) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "SHOAL_TOKEN": token}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, encoding="utf-8", errors="replace", **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_end(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (0, "the run is over\n")


def find_address(parts: Parts) -> str:
    return format_websocket_address(parts.gateway.listener, "127.0.0.1")


def wait_while_playing(games: list[subprocess.Popen[str]], predicate: Callable[[], object]) -> None:
    def is_reached() -> bool:
        assert [game.poll() for game in games] == [None] * len(games), "a game has ended"
        return bool(predicate())

    wait_for(is_reached)


def count_steps(parts: Parts) -> dict[str, int]:
    return {actor["actor_id"]: actor["steps"] for actor in parts.gateway.stats()["actors"]}


def test_they_learn_together_until_the_game_is_solved(tmp_path: Path, programs: Programs) -> None:
    experience = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(3), SPEC)
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN, target_return=4.5) as loop, ExitStack() as games:
        addresses = f"ws://127.0.0.1:1,{loop.websocket_address}"  # nothing listens at the first
        playing = [games.enter_context(started([*command, addresses, "8"])) for command in programs.values()]
        wait_while_playing(playing, lambda: len(loop.gateway.stats()["actors"]) == len(programs))
        assert loop.wait_until_solved(timeout_s=600) > 0
        stats = loop.gateway.stats()
        loop.close()
        for process in playing:
            wait_for_end(process)
    assert all(actor["invalid"].keys() <= {"unknown_kind"} for actor in stats["actors"])
    totals = loop.ledger.get_totals()
    assert (totals.is_balanced, totals.duplicates) == (True, 0)


def test_episodes_go_on_after_a_cut_and_after_a_restart_of_the_gateway(tmp_path: Path, programs: Programs) -> None:
    """Each episode of Catch has 25 steps, a segment of 16 and one of 9, and an odd return."""
    experience = replace(EXPERIENCE, action=replace(EXPERIENCE.action, high=2))
    fields = {"queue_capacity": 10_000, "experience": experience}
    with ExitStack() as games, serving(tmp_path, websocket=0, **fields) as first:
        address = find_address(first)
        port = int(address.rpartition(":")[2])
        playing, proxies = [], []
        for number, command in enumerate(programs.values()):
            proxy = games.enter_context(CuttingProxy(("127.0.0.1", port), limit=20_000 + number))
            near = proxy.url.replace("http", "ws")
            playing.append(games.enter_context(started([*command, f"{near},{address}", str(1 + 3 * number)])))
            proxies.append(proxy)
        wait_while_playing(playing, lambda: all(proxy.is_cut for proxy in proxies))
        before = count_steps(first)
        wait_while_playing(
            playing, lambda: all(steps > before[name] + 100 for name, steps in count_steps(first).items())
        )
        lengths = first.take(1, 10**6, 10**5).lengths.tolist()
        assert set(lengths) == {16, 9}
        assert 0 <= lengths.count(16) - lengths.count(9) <= 5  # the open episodes
        assert first.ledger.get_totals().duplicates == 0
        first.gateway.close()
        with serving(tmp_path, websocket=port, **fields) as second:
            wait_while_playing(
                playing, lambda: [steps > 100 for steps in count_steps(second).values()] == [True] * len(programs)
            )
            assert set(second.gateway._progress.returns) <= {-5.0, -3.0, -1.0, 1.0, 3.0, 5.0}  # with what came before
            assert second.ledger.get_totals().duplicates == 0
            second.gateway.close(finished=True)
            for process in playing:
                wait_for_end(process)


class Player:
    """A game that does what this test says, a line at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def say(self, *lines: str) -> None:
        self._stdin.write("".join(f"{line}\n" for line in lines))
        self._stdin.flush()

    def hear(self) -> str:
        return self._stdout.readline().rstrip()

    def ask(self, *lines: str) -> str:
        self.say(*lines)
        return self.hear()


@pytest.fixture
def player(program: list[str]) -> Iterator[Player]:
    with started([*program, "-"]) as process:
        yield Player(process)


def test_errors_have_names(player: Player) -> None:
    with serving(websocket=0) as parts:
        address = find_address(parts)
        assert player.ask(f"join {address}", f"ask 0 0 {OBSERVATION}", "wait").startswith(
            "error bad_token -1 bad_token:"
        )
        assert player.ask("wait").startswith("error bad_token")  # it stays
        answer = player.ask(f"join {address}/other 0.5", f"ask 0 0 {OBSERVATION}", "wait")
        if not answer.startswith("error unreachable -1 unreachable: no gateway for 0.5 s: "):  # Mono tells no status
            assert answer.startswith("error rejected -1 rejected: 404")


WELCOME = {
    **{"kind": "welcome", "protocol": 1, "run_id": "run-1", "next_seq": 0, "send_limit": 0, "weights_version": 1},
    **{"heartbeat_s": 1.0, "timeout_s": 6.0, "max_message_bytes": 2**26, "synchronous": False, "inference": "remote"},
    **{"settings": {"gravity": 9.5}, "settings_version": 3},
}


def describe_spec(actions: list[int], choices: int = 0) -> dict[str, Any]:
    extras = (
        [{"name": "masks", "tensor": {"dtype": "bool", "shape": [choices]}, "per": "observation"}] if choices else []
    )
    tensors = {"observation": {"dtype": "uint8", "shape": [2, 2]}, "action": {"dtype": "int64", "shape": actions}}
    return {**tensors, "segment_length": 8, "policy": {}, "extras": extras}


class Gateway:
    """The gateway's end of one connection: what the game says, and answers by this test."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def hear(self) -> tuple[dict[str, Any], list[list[int]]]:
        """A header, and each frame's bytes."""
        message, frames = self._connection.recv(60), []
        assert isinstance(message, bytes)
        while message:
            size = int.from_bytes(message[:4], "little")
            frames.append(message[4 : 4 + size])
            message = message[4 + size :]
        return json.loads(frames[0]), [list(frame) for frame in frames[1:]]

    def say(self, header: dict[str, Any], *frames: bytes) -> None:
        parts = [json.dumps(header).encode(), *frames]
        self._connection.send(b"".join(struct.pack("<I", len(part)) + part for part in parts))

    def act(self, action: Any, **fields: Any) -> None:
        """Answer one `act`."""
        header, _ = self.hear()
        assert header["kind"] == "act"
        self.say({"kind": "action", "episode": header["episode"], "step": header["step"], "action": action, **fields})


@contextmanager
def scripted(script: Callable[[Gateway], None]) -> Iterator[str]:
    """The address of a gateway that does this with each connection; what it finds wrong fails the test."""
    failures: list[BaseException] = []

    def serve_one(connection: ServerConnection) -> None:
        try:
            script(Gateway(connection))
        except ConnectionClosed:
            pass
        except BaseException as error:
            failures.append(error)
            raise

    with serve(serve_one, "127.0.0.1", 0, compression=None) as server:
        thread = start_thread(server.serve_forever)
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(60)
    assert not failures


def test_several_agents_travel_as_rows_with_masks_and_settings(player: Player) -> None:
    def play(gateway: Gateway) -> None:
        hello, _ = gateway.hear()
        assert (hello["token"], hello["behaviour"]) == ('a "token"', "human")
        assert hello["offers"] == {"action": {"dtype": "int64"}}
        gateway.say({**WELCOME, "spec": describe_spec([], choices=3)})
        header, frames = gateway.hear()
        assert header == {"kind": "acts", "episodes": [0, 1], "steps": [0, 0], "settings": [3, 3]}
        assert frames == [[1, 2, 3, 4, 250, 6, 7, 8], [0] * 8, [0, 0], [1, 0, 1, 0, 1, 1]]
        answers = {"kind": "actions", "episodes": [1, 0], "steps": [0, 0], "version": 7}
        gateway.say(answers, np.array([2, 1]).tobytes())
        header, frames = gateway.hear()
        gateway.say({"kind": "settings", "version": 4, "values": {"gravity": 1.25}})
        assert (header["episodes"], header["steps"], header["settings"]) == ([0, 1, 2], [1, 1, 0], [0, 0, 3])
        assert np.array(frames[1], np.uint8).view(np.float32).tolist() == [0.5, -1.0, 0.0]
        assert (frames[2], frames[3]) == ([13, 2, 0], [1, 1, 1, 1, 1, 0, 1, 1, 1])
        refusal = {"row": 2, "episode": 2, "step": 0, "reason": "invalid", "detail": "observation: too large"}
        answers = {"kind": "actions", "episodes": [], "steps": [], "ended": [0, 1], "refused": [refusal]}
        gateway.say(answers, b"")
        header, _ = gateway.hear()  # the agent that was corrected, alone
        assert (header["kind"], header["episode"], header["settings"]) == ("act", 3, 4)
        gateway.say({"kind": "bye", "finished": True})

    with scripted(play) as address:
        player.say(
            f"join {address}", "connect", "ask 1 0 1,2,3,4 1,0,1", "ask 5 0 250,6,7,8 0,1,1", "wait", "show 1", "show 5"
        )
        assert [player.hear() for _ in range(3)] == ["gravity 9.5", "action 1 of 7", "action 2 of 7"]
        player.say("end 1 0.5 13 9,9,9,9", "end 5 -1 2 9,9,9,9 1,1,0", "ask 7 0 1,2,3,4 1,1,1", "wait")
        assert player.hear() == "gravity 1.25"
        assert player.hear() == "error invalid 7 invalid: observation: too large"
        assert player.ask("ask 7 0 1,2,3,4 1,1,1", "wait", "show 7") == "action 0 of 0, over"


def test_an_agent_begins_again_in_the_message_with_its_end_and_an_action_has_several_numbers(player: Player) -> None:
    def play(gateway: Gateway) -> None:
        gateway.hear()
        gateway.say({**WELCOME, "spec": describe_spec([2])})
        gateway.hear()
        answers = {"kind": "actions", "version": 7}
        gateway.say({**answers, "episodes": [0, 1], "steps": [0, 0]}, np.array([[1, 2], [3, 4]]).tobytes())
        header, frames = gateway.hear()
        assert (header["episodes"], header["steps"], frames[2]) == ([0, 2], [1, 0], [1, 0])
        gateway.say({**answers, "episodes": [2], "steps": [0], "ended": [0]}, np.array([5, 6]).tobytes())
        assert gateway.hear()[0] == {"kind": "bye"}

    with scripted(play) as address:
        player.say(f"join {address}", "connect", "ask 0 0 1,2,3,4", "ask 5 0 1,2,3,4", "wait", "show 0", "show 5")
        assert [player.hear() for _ in range(3)] == ["gravity 9.5", "action 1 2 of 7", "action 3 4 of 7"]
        player.say("end 0 1 1 1,2,3,4", "ask 0 0 1,2,3,4", "wait", "show 0", "leave")
        assert player.hear() == "action 5 6 of 7"


def test_what_a_gateway_does_without_is_sent_otherwise(player: Player) -> None:
    """No rows, an episode that it has lost, a question that it does not answer, an action of a person."""
    connections: list[Gateway] = []

    def play(gateway: Gateway) -> None:
        connections.append(gateway)
        hello, _ = gateway.hear()
        gateway.say({**WELCOME, "spec": describe_spec([2]), "settings_version": 0})
        if len(connections) == 1:
            assert gateway.hear()[0]["kind"] == "acts"
            gateway.say({"kind": "error", "code": "unknown_kind", "message": "acts"})
            gateway.act([1, 2], version=5)
            assert gateway.hear()[0]["episode"] == 1
            return  # without an answer: the connection breaks
        assert (hello["run_id"], len(connections)) == ("run-1", 2)
        gateway.act([3, 4])
        gateway.act(None, reason="unknown_episode")
        header, frames = gateway.hear()
        assert (header["episode"], header["step"], header["reward"]) == (2, 0, 0.5)  # with the return until then
        gateway.say({"kind": "action", "episode": 2, "step": 0, "action": [5, 6]})
        header, _ = gateway.hear()
        assert (header["step"], header["reward"], header["taken"], frames) == (1, 0.25, [7, 8], [[9] * 4])
        gateway.say({"kind": "action", "episode": 2, "step": 1, "action": [0, 0]})
        assert gateway.hear()[0] == {"kind": "bye"}

    with scripted(play) as address:
        player.say(f"join {address}", "ask 0 0 1,2,3,4", "ask 1 0 1,2,3,4", "wait", "show 0", "show 1")
        assert [player.hear() for _ in range(2)] == ["action 1 2 of 5", "action 3 4 of 0"]
        assert player.ask("ask 0 0.5 9,9,9,9", "wait", "show 0") == "action 5 6 of 0"
        assert player.ask("take 0 7,8", "ask 0 0.25 1,1,1,1", "ask 0 0 1,1,1,1").startswith("error busy 0")
        said = "error invalid 0 invalid: observation"
        assert player.ask("wait", "ask 0 0 1,2,3", "wait") == f"{said} of agent 0: 3 numbers, expected 4"
        assert player.ask("ask 0 0 1,2,3,300", "wait") == f"{said}[3] of agent 0: 300 is no uint8"
        assert player.ask("end 9 0 1 1,2,3,4").startswith("error invalid 9")
        assert player.ask("leave", "show 0") == "action 0 0 of 0, over"


def test_a_gateway_that_is_silent_is_asked_and_left(player: Player) -> None:
    connections: list[Gateway] = []

    def play(gateway: Gateway) -> None:
        connections.append(gateway)
        gateway.hear()
        gateway.say({**WELCOME, "spec": describe_spec([]), "settings_version": 0, "heartbeat_s": 0.1, "timeout_s": 0.2})
        if len(connections) == 1:
            assert gateway.hear()[0]["kind"] == "act"
            assert gateway.hear()[0]["kind"] == "ping"
            while True:  # until it has left
                gateway.hear()
        gateway.act(2, version=1)
        assert gateway.hear()[0] == {"kind": "bye"}

    with scripted(play) as address:
        assert player.ask(f"join {address}", "ask 0 0 1,2,3,4", "wait", "show 0") == "action 2 of 1"
        player.ask("leave", "show 0")
    assert len(connections) >= 2


def frame_of(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return Frame(Opcode.BINARY, struct.pack("<I", len(text)) + text).serialize(mask=False)


def disturb(data: bytes, rng: random.Random) -> bytes:
    disturbed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, size = rng.randrange(len(disturbed)), rng.randrange(1, 9)
        piece = rng.choice([rng.randbytes(1), rng.randbytes(size), b"", disturbed[:200], b"\xff" * size])
        disturbed[at : at + rng.choice([0, 1, size])] = piece
    return bytes(disturbed)


def answer_oddly(near: socket.socket, rng: random.Random) -> None:
    """What a gateway says, but for some bytes."""
    key = near.recv(4096).partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    upgrade = f"{head}Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n".encode()
    action = frame_of({"kind": "action", "episode": 0, "step": 0, "action": [1, 2], "version": 2})
    welcome = frame_of({**WELCOME, "spec": describe_spec([2])})
    messages = welcome + Frame(Opcode.PING, b"x").serialize(mask=False) + action
    is_upgrade = rng.random() < 0.2
    with near, suppress(OSError):
        near.sendall(disturb(upgrade, rng) if is_upgrade else upgrade)
        near.sendall(messages if is_upgrade else disturb(messages, rng))
        near.shutdown(socket.SHUT_WR)
        while near.recv(4096):
            pass


def test_odd_bytes_are_an_error_and_no_crash(player: Player, program: list[str]) -> None:
    """After a connection with odd bytes others are answered by HTTP 400, so that the game ends."""
    is_mono = len(program) > 1  # it does not see the status, and so gives up
    rng = random.Random(1)

    def serve_all(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                if is_odd.pop():
                    threading.Thread(target=answer_oddly, args=[near, rng], daemon=True).start()
                else:
                    with near:
                        near.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = start_thread(serve_all, server)
        ends = Counter[str]()
        for _ in range(NUM_ODD // 10 if is_mono else NUM_ODD):
            is_odd = [False] * 99 + [True]
            address = f"ws://127.0.0.1:{server.getsockname()[1]}"
            player.say(f"join {address}{' 0.2' if is_mono else ''}", "ask 0 0 1,2,3,4", "wait", "show 0")
            lines = []
            while not (line := player.hear()).startswith("action"):
                assert line or lines, "it has crashed"
                lines.append(line)
            words = [line.split(" ")[1] for line in lines if line.startswith("error ")]
            ends[words[0] if words else "none"] += 1
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert ends.keys() <= {"none", "malformed", "rejected", "unreachable", "no_remote_inference"}
    assert ends["none"] < ends.total() / 2
    assert is_mono or ends["malformed"] > NUM_ODD / 4


EPISODE = {
    "kind": "episode",
    "format": 1,
    "spec": {"observation": {"dtype": "float32", "shape": [2]}, "action": {"dtype": "int64", "shape": []}},
    "settings": {"gravity": 9.5},
    "settings_version": 1,
    "observations": [[0.25, 1.0], [0.5, 1.0], [0.75, 1.0]],
    "actions": [2, 0],
}


def test_they_replay_a_recorded_episode(program: list[str], tmp_path: Path) -> None:
    path = tmp_path / "episode.json"
    path.write_text(json.dumps(EPISODE))
    play = ["ask 0 0 0.25,1", "wait", "show 0", "ask 0 1 {},1", "wait", "show 0", "end 0 1 1 0.75,1", "wait", "show 0"]
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"kind": "episode"')
    lines = [f"join {path}", *play, f"join {path}", *play, f"join {wrong}", "connect"]
    lines += [f"join {path}", "ask 0 0 0.25,1", "wait", "ask 5 0 0.25,1", "wait"]
    text = "\n".join(lines).format("0.5", "0.6") + "\n"
    with started([*program, "-"]) as process:
        output = process.communicate(text, timeout=600)[0].splitlines()
    over = "action 0 of 0, over"
    assert output[:4] == ["gravity 9.5", "action 2 of 0", "action 0 of 0", over]
    other = ", another game from step 1"
    assert output[4:8] == ["gravity 9.5", "action 2 of 0", f"action 0 of 0{other}", f"{over}{other}"]
    assert output[8].startswith("error no_episode -1 no_episode: ")
    assert output[9] == "gravity 9.5"
    assert output[10].startswith("error no_episode 5 ")
