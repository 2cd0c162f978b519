"""The add-on of Godot: it plays until solved, outlives its gateway, and sends what docs/protocol.md describes."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from websockets.sync.server import ServerConnection, serve

from certificates import Authority
from libs.websocket.test_native_games import EPISODE
from rl_setting import POLICY, TOKEN, Parts, serving
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec

CLIENT = Path(__file__).parents[3] / "clients" / "godot"
GODOT = shutil.which("godot3-server")
pytestmark = pytest.mark.skipif(GODOT is None, reason="needs Godot 3: apt-get install godot3-server")
NOWHERE = "ws://127.0.0.1:1"
SPEC = RLSpec(env="{observation: [4], action: 3}", hidden=(16,)).override(
    [
        "gateway.websocket=0",
        "learner.batch_steps=384",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.03",
        "algorithm.discount=0.8",
    ]
)
EXPERIENCE = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(3), SPEC)
# Two agents: at its third action "a" was played by a person, "b" reaches its goal and begins again.
GAME = """
extends Node
var shoal = preload("res://shoal.gd").new()
var played := {"a": 0, "b": 0}

func _ready() -> void:
	add_child(shoal)
	shoal.behaviour = "by script"
	shoal.offers = {"observation": {"dtype": "uint8", "shape": [2]}}
	shoal.connect("joined", self, "_on_joined")
	shoal.connect("action", self, "_on_action")
	shoal.connect("settings_changed", self, "_on_settings")
	shoal.connect("left", self, "_on_left")
	shoal.join(OS.get_environment("ADDRESS"), "secret", "robot")
	shoal.act("a", PoolByteArray([1, 2]), 0.0, [1, 0, 1])
	shoal.act("b", [3, 4])

func _on_joined(spec) -> void: print("joined ", spec.segment_length)

func _on_settings(values) -> void: print("gravity ", values.gravity)

func _on_left(reason, finished) -> void:
	print("left ", reason, " ", finished)
	get_tree().quit()

func _on_action(agent, action) -> void:
	print(agent, " ", action)
	played[agent] += 1
	if agent == "a" and played.a == 2:
		shoal.took("a", [0, 1])
	if agent == "b" and played.b == 2:
		shoal.end("b", [9, 9], 0.5, false, true)
	shoal.act(agent, [played[agent], 0], 0.25)
"""


@contextmanager
def game(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = ["godot3-server", "--path", str(folder), "--fixed-fps", "60", *arguments]
    variables = {**os.environ, "SHOAL_TOKEN": TOKEN, **environment}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def catch(address: str, *arguments: str, **environment: str) -> Any:
    return game(CLIENT / "catch", f"address={address}", *arguments, **environment)


def write_project(folder: Path) -> None:
    shutil.copy(CLIENT / "shoal3.gd", folder / "shoal.gd")
    (folder / "game.gd").write_text(GAME)
    (folder / "project.godot").write_text('config_version=4\n\n[application]\n\nrun/main_scene="res://game.tscn"\n')
    scene = (CLIENT / "catch" / "catch.tscn").read_text().replace("res://catch.gd", "res://game.gd")
    (folder / "game.tscn").write_text(scene)


def test_sixteen_agents_of_one_game_solve_it_and_the_game_ends_with_the_run(tmp_path: Path) -> None:
    with (
        LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN, target_return=4.5) as loop,
        catch(f"{NOWHERE},{loop.websocket_address}", "agents=16") as process,
    ):
        loop.wait_until_solved(600)
        loop.close()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        totals = loop.gateway.stats()["segments"]
        assert (totals["duplicates"], totals["balanced"]) == (0, True)


def test_it_comes_back_to_a_gateway_that_was_restarted(tmp_path: Path) -> None:
    def play_on(parts: Parts) -> None:
        seen = parts.ledger.get_totals().received
        while parts.ledger.get_totals().received < seen + 3:
            parts.take()

    experience = ExperienceSpec(EXPERIENCE.observation, EXPERIENCE.action, 16, POLICY)
    with serving(tmp_path, experience=experience, websocket=0, queue_capacity=4) as parts:
        address = format_websocket_address(parts.gateway.listener, parts.spec.host)
        with catch(address, "agents=2") as process:
            play_on(parts)
            parts.gateway.close()
            with serving(tmp_path, experience=experience, websocket=0, queue_capacity=4) as again:
                play_on(again)
                (actor,) = again.gateway.stats()["actors"]
                assert actor["actor_id"] == "godot"
                again.gateway.close(finished=True)
                output, _ = process.communicate(timeout=600)
                assert process.returncode == 0, output
                assert again.ledger.get_totals().duplicates == 0


def test_what_is_wrong_ends_the_game_with_its_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.sign()
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    with serving(websocket=0, tls=tls) as parts:
        address = format_websocket_address(parts.gateway.listener, "localhost")  # Godot compares names, not numbers
        with catch(address, f"certificate={authority.ca}", SHOAL_TOKEN="guess") as process:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 1
            assert "bad_token: the token is not the one of this gateway" in output


class FakeGateway:
    """Plays the gateway's part, with JSON in binary messages, one connection at a time."""

    def __init__(self) -> None:
        self._connections: queue.Queue[ServerConnection] = queue.Queue()
        self._left = threading.Event()
        self._server = serve(self._keep, "127.0.0.1", 0, compression=None)
        self.address = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def _keep(self, connection: ServerConnection) -> None:
        self._connections.put(connection)
        self._left.wait(600)

    def __enter__(self) -> FakeGateway:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._server.shutdown()

    def accept(self) -> dict[str, Any]:
        """The `hello` of the next connection."""
        self.connection = self._connections.get(timeout=600)
        return self.receive()[0]

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        data, frames = self.connection.recv(600), []
        assert isinstance(data, bytes)
        while data:
            size = struct.unpack("<I", data[:4])[0]
            frames.append(data[4 : 4 + size])
            data = data[4 + size :]
        return json.loads(frames[0]), frames[1:]

    def send(self, kind: str, *frames: bytes, **header: Any) -> None:
        parts = [json.dumps({"kind": kind, **header}).encode(), *frames]
        self.connection.send(b"".join(struct.pack("<I", len(part)) + part for part in parts))

    def welcome(self, **fields: Any) -> None:
        masks = {"name": "masks", "per": "observation", "tensor": {"dtype": "bool", "shape": [3]}}
        spec = {
            "observation": {"dtype": "uint8", "shape": [2]},
            "action": {"dtype": "int64", "shape": [2]},
            "segment_length": 8,
            "extras": [masks],
        }
        self.send("welcome", spec=spec, heartbeat_s=60, timeout_s=60, **fields)

    def act(self, episode: int, step: int, *action: int, **fields: Any) -> None:
        self.send("action", episode=episode, step=step, action=action, version=1, **fields)


def pick(message: tuple[dict[str, Any], list[bytes]], *names: str) -> list[Any]:
    return [message[0].get(name) for name in ("kind", "episode", "step", *names)]


def test_it_sends_what_the_protocol_describes(tmp_path: Path) -> None:
    write_project(tmp_path)
    with FakeGateway() as gateway, game(tmp_path, ADDRESS=gateway.address) as process:
        hello = gateway.accept()
        fields = {
            "protocol": 1,
            "token": "secret",
            "actor_id": "robot",
            "inference": "remote",
            "behaviour": "by script",
        }
        assert {name: hello[name] for name in fields} == fields
        assert hello["offers"] == {"observation": {"dtype": "uint8", "shape": [2]}}
        gateway.welcome(settings={"gravity": 9}, settings_version=2)
        # Two rows in one message, an answer in columns, and the steps after it.
        header, frames = gateway.receive()
        assert header == {"kind": "acts", "episodes": [0, 1], "steps": [0, 0], "settings": [2, 2]}
        assert frames == [bytes([1, 2, 3, 4]), bytes(8), bytes(2), bytes([1, 0, 1, 1, 1, 1])]
        gateway.send("actions", np.array([[7, 8], [-1, 2]]).tobytes(), episodes=[0, 1], steps=[0, 0], version=1)
        header, frames = gateway.receive()
        assert (header["episodes"], header["steps"]) == ([0, 1], [1, 1])
        assert np.frombuffer(frames[1], np.float32).tolist() == [0.25, 0.25]
        # The gateway has restarted, and an older one has taken its place: it knows neither `acts` nor the episodes.
        gateway.send("bye", finished=False)
        assert gateway.accept()["incarnation"] == hello["incarnation"]
        gateway.welcome()
        assert gateway.receive()[0]["kind"] == "acts"
        gateway.send("error", code="unknown_kind", message="acts")
        assert pick(gateway.receive()) == ["act", 0, 1]
        assert pick(gateway.receive()) == ["act", 1, 1]
        gateway.send("action", episode=0, step=1, reason="unknown_episode")
        assert pick(gateway.receive(), "reward", "settings") == ["act", 2, 0, 0.25, 2]
        gateway.act(2, 0, 1, 1)
        gateway.act(1, 1, 2, 2)
        # What a person played, the end of an episode, and the next one: in one turn.
        assert pick(gateway.receive(), "reward", "taken") == ["act", 2, 1, 0.25, [0, 1]]
        last = gateway.receive()
        assert pick(last, "terminated", "truncated", "success", "reward") == ["act", 1, 2, False, True, True, 0.5]
        assert last[1] == [bytes([9, 9]), bytes([1, 1, 1])]
        assert pick(gateway.receive(), "reward") == ["act", 3, 0, 0]
        # The connection breaks: what has no answer is sent again.
        gateway.send("settings", values={"gravity": 3}, version=3)
        gateway.connection.close()
        gateway.accept()
        gateway.welcome()
        assert {tuple(pick(gateway.receive())) for _ in range(3)} == {("act", 2, 1), ("act", 1, 2), ("act", 3, 0)}
        gateway.send("bye", reason="the run is over", finished=True)
        lines = process.communicate(timeout=600)[0].splitlines()
    played = ["a [7, 8]", "b [-1, 2]", "joined 8", "a [1, 1]", "b [2, 2]", "gravity 3", "joined 8"]
    assert lines[-len(played) - 3 :] == ["joined 8", "gravity 9", *played, "left the run is over True"]


def test_the_files_for_both_versions_differ_in_what_the_engine_has() -> None:
    (first, engine3), (other, engine4) = (
        re.split("^# -- what this version of Godot has.*\n", (CLIENT / name).read_text(), flags=re.MULTILINE)
        for name in ("shoal3.gd", "shoal4.gd")
    )
    assert first.replace("For Godot 3.", "For Godot 4.") == other

    def declare(text: str) -> set[str]:
        return {re.sub("Pool|Packed", "", line) for line in re.findall(r"^func .*?:$", text, re.MULTILINE)}

    assert declare(engine3) - declare(engine4) == {line for line in declare(engine3) if "_take_packet" in line}
    assert declare(engine4) <= declare(engine3)
    for gone in ("Pool", "yield", "OS.get_ticks", "parse_json", "pause_mode", ".empty()"):
        assert gone not in other + engine4, f"{gone} is of Godot 3"


# Its menu runs while the tree is paused, and opens, closes and reloads the scene by the settings.
PAUSING = """
extends Node
var shoal = preload("res://shoal.gd").new()
var ticker := Ticker.new()
var is_held := false

class Ticker extends Node:
	var ticks := 0
	func _process(_delta) -> void: ticks += 1

func _ready() -> void:
	pause_mode = PAUSE_MODE_PROCESS
	ticker.pause_mode = PAUSE_MODE_STOP
	add_child(ticker)
	add_child(shoal)
	for name in ["action", "settings_changed", "left"]:
		shoal.connect(name, self, "_on_" + name)
	shoal.join(OS.get_environment("ADDRESS"), "secret", "robot")
	shoal.act("hero", [1, 2])

func _process(_delta) -> void:
	if shoal._is_holding and not is_held:
		is_held = true
		ticker.ticks = 0
		say("held")

func say(what) -> void: print("%s, paused %s, ticks %s" % [what, get_tree().paused, ticker.ticks])

func _on_settings_changed(values) -> void:
	if values.menu == "open":
		get_tree().paused = true
	elif values.menu == "toggle":
		get_tree().paused = not get_tree().paused
	elif values.menu == "reload":
		get_tree().reload_current_scene()
	say(values.menu)

func _on_left(_reason, _finished) -> void: get_tree().quit()

func _on_action(_agent, action) -> void:
	say("action")
	is_held = false
	if action[0] == 2: # the game is over: its menu opens
		get_tree().paused = true
	shoal.act("hero", [3, 4])
"""


def test_a_pause_of_the_player_holds_no_agent_acts_in_it_and_a_scene_that_is_reloaded_says_goodbye(
    tmp_path: Path,
) -> None:
    write_project(tmp_path)
    (tmp_path / "game.gd").write_text(PAUSING)
    with FakeGateway() as gateway, game(tmp_path, ADDRESS=gateway.address) as process:

        def hear() -> str:
            assert process.stdout is not None
            return next(line.rstrip() for line in process.stdout if ", paused " in line)

        def set_menu(word: str) -> str:
            nonlocal version
            version += 1
            gateway.send("settings", values={"menu": word}, version=version)
            return hear()

        version = 0
        first = gateway.accept()["incarnation"]
        gateway.welcome()
        for step, word in enumerate(("open", "toggle")):
            assert pick(gateway.receive()) == ["act", 0, step]
            assert hear() == "held, paused False, ticks 0"
            assert set_menu(word) == f"{word}, paused True, ticks 0"
            gateway.act(0, step, 1, 1)
            assert [set_menu("look") for _ in range(2)] == ["look, paused True, ticks 0"] * 2
            assert set_menu("toggle") == "toggle, paused False, ticks 0"
            assert hear().startswith("action, paused False")
        assert pick(gateway.receive()) == ["act", 0, 2]
        assert hear() == "held, paused False, ticks 0"
        gateway.act(0, 2, 2, 1)
        assert hear() == "action, paused False, ticks 0"
        assert set_menu("look") == "look, paused True, ticks 0"
        assert pick(gateway.receive()) == ["act", 0, 3]
        set_menu("reload")
        assert gateway.receive()[0]["kind"] == "bye"
        assert gateway.accept()["incarnation"] > first


REPLAYING = """
extends Node
var shoal = preload("res://shoal.gd").new()
var step := 0

func _ready() -> void:
	add_child(shoal)
	shoal.connect("joined", self, "_on_joined")
	shoal.connect("action", self, "_on_action")
	shoal.connect("settings_changed", self, "_on_settings")
	shoal.connect("left", self, "_on_left")
	shoal.replay(OS.get_environment("EPISODE"))
	shoal.act("hero", [0.25, 1])

func _on_joined(spec) -> void: print("joined ", spec.observation.shape)

func _on_settings(values) -> void: print("gravity ", values.gravity)

func _on_left(reason, finished) -> void:
	print("left ", reason, " ", finished, " ", shoal.diverged_at)
	get_tree().quit()

func _on_action(agent, action) -> void:
	print(agent, " ", action)
	step += 1
	if step == 2:
		shoal.end(agent, [0.75, 1], 1.0)
	shoal.act(agent, [float(OS.get_environment("SECOND")), 1], 0.5)
"""


def test_it_replays_a_recorded_episode(tmp_path: Path) -> None:
    write_project(tmp_path)
    (tmp_path / "game.gd").write_text(REPLAYING)
    path = tmp_path / "episode.json"
    path.write_text(json.dumps(EPISODE))
    for second, diverged_at in (("0.5", -1), ("0.6", 1)):
        with game(tmp_path, EPISODE=str(path), SECOND=second) as process:
            output = process.communicate(timeout=600)[0]
        lines = [line for line in output.splitlines() if line.startswith(("joined", "gravity", "hero", "left"))]
        played = ["joined [2]", "gravity 9.5", "hero 2", "hero 0"]
        assert lines == [*played, f"left the recorded episode is over True {diverged_at}"], output
    path.write_text("[]")
    with game(tmp_path, EPISODE=str(path)) as process:
        output = process.communicate(timeout=600)[0]
    assert f"left {path} is no episode of `shoal episodes RUN --export NAME` False -1" in output
