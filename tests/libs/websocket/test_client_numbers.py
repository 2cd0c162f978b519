"""Numbers that a game should not send: each client says the same of them, for their agent alone, and sends none.

In each case agent 2 shows or gets the number, and agent 1 acts in the same message.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from msgspec.structs import replace

import shoal
from libs.websocket.test_godot_client import GODOT, game, write_project
from libs.websocket.test_native_games import Player, Programs, programs, started
from rl_setting import EXPERIENCE, TOKEN, Parts, serving
from shoal.errors import InvalidSegment
from shoal.libs.demonstrations.files import DemonstrationFiles
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.spec import RLSpec, experience_spec
from shoal.store import open_store
from shoal.weights import WeightSnapshot
from shoal.wire import TensorSpec
from waiting import wait_for

TESTS = Path(__file__).parents[2]
JAVASCRIPT = TESTS.parent / "clients" / "javascript" / "index.js"
TABLE = TESTS / "client_numbers.json"
CASES: list[dict[str, Any]] = json.loads(TABLE.read_text())
WIDE = replace(EXPERIENCE, observation=TensorSpec("float32", (4,)), segment_length=len(CASES) + 1)
__all__ = ["programs"]

IN_JAVASCRIPT = """
const { readFileSync } = await import('node:fs');
const { connect } = await import(process.argv[1]);
const run = await connect(process.argv[2], process.argv[3], { inference: process.argv[4], actorId: 'game' });
const zeros = [0, 0, 0, 0], values = { null: null, text: 'text' }, say = (error) => error.message;
const read = (name) => (name in values ? values[name] : Number(name));
for (const agent of [1, 2]) run.begin(agent);
await Promise.all([1, 2].map((agent) => run.act(agent, zeros)));
for (const { field, value } of JSON.parse(readFileSync(process.argv[5]))) {
  const shown = value === 'none' ? [0, 0, 0] : [0, 0, 0, field === 'observation' ? read(value) : 0];
  const reward = field === 'reward' ? read(value) : 0;
  const ask = async () => run.act(2, shown, reward);
  console.log(await Promise.all([run.act(1, zeros, 1), ask().then(() => '', say)]).then(([, said]) => said));
}
await Promise.all([1, 2].map((agent) => run.end(agent, zeros, 1)));
await run.leave();
"""

IN_GODOT = """
extends Node
var shoal = preload("res://shoal.gd").new()
var cases: Array = parse_json(OS.get_environment("CASES"))
var values := {"NaN": NAN, "Infinity": INF, "-Infinity": -INF, "null": null, "text": "text"}
var at := -1
var said := ""

func _ready() -> void:
	add_child(shoal)
	for name in ["action", "refused", "left"]:
		shoal.connect(name, self, "_on_" + name)
	shoal.join(OS.get_environment("ADDRESS"), OS.get_environment("SHOAL_TOKEN"), "game")
	for agent in [1, 2]:
		shoal.act(agent, [0, 0, 0, 0])

func _on_refused(agent, problem) -> void: said = "agent %s: %s" % [agent, problem] if agent != 2 else problem

func _on_left(_reason, _finished) -> void: get_tree().quit()

func _on_action(agent, _action) -> void:
	if agent == 1:
		call_deferred("_ask")

func _ask() -> void:
	if at >= 0:
		print("said ", said)
	said = ""
	at += 1
	if at == cases.size():
		for agent in [1, 2]:
			shoal.end(agent, [0, 0, 0, 0], 1.0)
		shoal.leave()
		return
	var name: String = cases[at].value
	var value = values[name] if values.has(name) else float(name)
	var shown := [0, 0, 0] if name == "none" else [0, 0, 0, value if cases[at].field == "observation" else 0]
	shoal.act(1, [0, 0, 0, 0], 1.0)
	shoal.act(2, shown, value if cases[at].field == "reward" else 0.0)
"""


def play_in_javascript(inference: str) -> Callable[..., list[str]]:
    def play(parts: Parts, folder: Path, programs: Programs) -> list[str]:
        command = ["node", "--experimental-websocket", "--input-type=module", "-e", IN_JAVASCRIPT, str(JAVASCRIPT)]
        command += [find_address(parts), TOKEN, inference, str(TABLE)]
        output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        return [line.removeprefix("invalid: ") for line in output.split("\n")[:-1]]

    return play


def play_in_godot(parts: Parts, folder: Path, programs: Programs) -> list[str]:
    write_project(folder)
    (folder / "game.gd").write_text(IN_GODOT)
    with game(folder, ADDRESS=find_address(parts), CASES=TABLE.read_text()) as process:
        output, _ = process.communicate(timeout=120)
    return [line.removeprefix("said ") for line in output.splitlines() if line.startswith("said ")]


def play_natively(language: str) -> Callable[..., list[str]]:
    def play(parts: Parts, folder: Path, programs: Programs) -> list[str]:
        if language not in programs:
            pytest.skip(f"needs a compiler of {language}")
        said = []
        with started([*programs[language], "-"]) as process:
            player = Player(process)
            zeros, none = "0,0,0,0", "0,0,0"
            player.say(f"play {find_address(parts)}", f"ask 1 0 {zeros}", f"ask 2 0 {zeros}", "wait")
            for case in CASES:
                value, is_reward = case["value"], case["field"] == "reward"
                if value in ("null", "text") and (is_reward or language == "c++"):
                    said.append(case["says"])  # its types have none
                    player.say(f"ask 1 1 {zeros}", "wait")
                    continue
                shown = none if value == "none" else zeros if is_reward else f"{none},{value}"
                player.say(f"ask 1 1 {zeros}", f"ask 2 {value if is_reward else 0} {shown}", "wait", "wait", "show 1")
                lines = [player.hear()]
                while not lines[-1].startswith("action"):
                    lines.append(player.hear())
                said.append(" ".join(line.removeprefix("error invalid 2 invalid: ") for line in lines[:-1]))
            player.say(f"end 1 1 1 {zeros}", f"end 2 1 1 {zeros}", "wait", "leave", "show 1")
            player.hear()
        return said

    return play


def play_in_python(inference: str) -> Callable[..., list[str]]:
    def play(parts: Parts, folder: Path, programs: Programs) -> list[str]:
        values = {"null": None, "text": "text"}
        said = []
        with shoal.connect(parts.address, token=TOKEN, actor_id="game", inference=inference) as actor:
            for agent in (1, 2):
                actor.act([0.0] * 4, episode=agent)
            for case in CASES:
                value = values.get(case["value"]) if case["value"] in (*values, "none") else float(case["value"])
                shown: list[Any] = [0.0] * 4
                actor.reward(1.0, episode=1)
                actor.act([0.0] * 4, episode=1)
                try:
                    if case["field"] == "reward":
                        actor.reward(value, episode=2)  # type: ignore[arg-type]
                    else:
                        shown = [0.0] * 3 + ([] if case["value"] == "none" else [value])
                    actor.act(shown, episode=2)
                    said.append("")
                except InvalidSegment as error:
                    said.append(str(error))
            for agent in (1, 2):
                actor.reward(1.0, episode=agent)
                actor.end_episode([0.0] * 4, episode=agent)
        return said

    return play


def find_address(parts: Parts) -> str:
    return format_websocket_address(parts.gateway.listener, parts.spec.host)


CLIENTS = {
    "javascript local": play_in_javascript("local"),
    "javascript remote": play_in_javascript("remote"),
    "godot": play_in_godot,
    "c++": play_natively("c++"),
    "c#": play_natively("c#"),
    "python local": play_in_python("local"),
    "python remote": play_in_python("remote"),
}
NEEDS = {"javascript": shutil.which("node"), "godot": GODOT}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_no_number_is_an_error_of_its_agent_and_the_others_go_on(
    client: str, tmp_path: Path, programs: Programs
) -> None:
    if not NEEDS.get(client.split()[0], os.name):
        pytest.skip(f"needs {client.split()[0]}")
    with serving(websocket=0, experience=WIDE, queue_capacity=64) as parts:
        said = CLIENTS[client](parts, tmp_path, programs)
        for case, heard in zip(CASES, said, strict=True):
            if case.get("refused") and "local" not in client:  # the gateway names the bound; locally it drops a segment
                assert "reward" in heard
                assert "above 1" in heard
            else:
                assert heard == case["says"], case
        wait_for(lambda: parts.ledger.get_totals().received >= 2, what="both episodes")
        honest = len(CASES) + 1.0  # a reward of 1 in each step
        assert honest in parts.gateway._progress.returns
        (actor,) = parts.gateway.stats()["actors"]
        assert actor["invalid"].keys() <= {"invalid_range"}


OFFERS = {"observation": [4], "action": [{"low": -1, "high": 1}, 2]}  # turn, and jump
MIXED = experience_spec(
    Box(-1, 1, (4,), np.float32),
    Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32)),
    RLSpec(hidden=()).override(["algorithm=ppo"]),
)
TURNING_IN_JAVASCRIPT = """
const { connect } = await import(process.argv[1]);
const options = { inference: 'remote', actorId: 'game', offers: JSON.parse(process.argv[4]) };
const run = await connect(process.argv[2], process.argv[3], options), zeros = [0, 0, 0, 0];
run.begin(1);
await run.act(1, zeros);
console.log(JSON.stringify(await run.act(1, zeros, 0, { taken: [0.5, 0] })));
await run.end(1, zeros);
await run.leave();
"""
TURNING_IN_GODOT = """
extends Node
var shoal = preload("res://shoal.gd").new()
var count := 0

func _ready() -> void:
	add_child(shoal)
	shoal.connect("action", self, "_on_action")
	shoal.connect("left", self, "_on_left")
	shoal.offers = parse_json(OS.get_environment("OFFERS"))
	shoal.join(OS.get_environment("ADDRESS"), OS.get_environment("SHOAL_TOKEN"), "game")
	shoal.act(1, [0, 0, 0, 0])

func _on_left(_reason, _finished) -> void: get_tree().quit()

func _on_action(agent, action) -> void:
	count += 1
	if count == 1:
		shoal.took(1, [0.5, 0])
		shoal.act(1, [0, 0, 0, 0])
	else:
		print("said ", to_json(action))
		shoal.end(1, [0, 0, 0, 0])
		shoal.leave()
"""


def turn_in_javascript(parts: Parts, folder: Path, programs: Programs) -> list[float]:
    command = ["node", "--experimental-websocket", "--input-type=module", "-e", TURNING_IN_JAVASCRIPT, str(JAVASCRIPT)]
    command += [find_address(parts), TOKEN, json.dumps(OFFERS)]
    said: list[float] = json.loads(subprocess.run(command, capture_output=True, timeout=120, check=True).stdout)
    return said


def turn_in_godot(parts: Parts, folder: Path, programs: Programs) -> list[float]:
    write_project(folder)
    (folder / "game.gd").write_text(TURNING_IN_GODOT)
    with game(folder, ADDRESS=find_address(parts), OFFERS=json.dumps(OFFERS)) as process:
        lines = process.communicate(timeout=120)[0].splitlines()
    said: list[float] = json.loads(next(line for line in lines if line.startswith("said ")).removeprefix("said "))
    return said


def turn_natively(language: str) -> Callable[..., list[float]]:
    def turn(parts: Parts, folder: Path, programs: Programs) -> list[float]:
        if language not in programs:
            pytest.skip(f"needs a compiler of {language}")
        ask = "ask 1 0 0,0,0,0"
        with started(["env", f"OFFERS={json.dumps(OFFERS)}", *programs[language], "-"]) as process:
            player = Player(process)
            words = player.ask(
                f"play {find_address(parts)}", ask, "wait", "take 1 0.5,0", ask, "wait", "show 1"
            ).split()
            player.ask("end 1 0 1 0,0,0,0", "wait", "leave", "show 1")
        return [float(word) for word in words[1:3]]

    return turn


def turn_in_python(inference: str) -> Callable[..., list[float]]:
    def turn(parts: Parts, folder: Path, programs: Programs) -> list[float]:
        options: dict[str, Any] = {"actor_id": "game", "inference": inference, "offers": OFFERS}
        with shoal.connect(parts.address, token=TOKEN, **options) as actor:
            assert actor.act([0.0] * 4, taken=[0.5, 0]) == [0.5, 0]
            action: list[float] = actor.act([0.0] * 4)
            actor.end_episode([0.0] * 4)
        return action

    return turn


TURNING = {
    "javascript": turn_in_javascript,
    "godot": turn_in_godot,
    "c++": turn_natively("c++"),
    "c#": turn_natively("c#"),
    "python local": turn_in_python("local"),
    "python remote": turn_in_python("remote"),
}


@pytest.mark.parametrize("client", TURNING)
def test_an_action_of_a_number_and_a_choice(client: str, tmp_path: Path, programs: Programs) -> None:
    """The run learns from a number for each; the game gets, and takes, a choice."""
    if not NEEDS.get(client.split()[0], os.name):
        pytest.skip(f"needs {client.split()[0]}")
    arrays = {"policy.0.weight": np.zeros((2, 4), np.float32), "policy.0.bias": np.array([0, 2], np.float32)}
    with serving(tmp_path, websocket=0, experience=MIXED) as parts:
        parts.store.publish(WeightSnapshot.of(2, {**arrays, "log_std": np.full(2, -9, np.float32)}))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 2)
        turn, jump = TURNING[client](parts, tmp_path, programs)
        assert turn == pytest.approx(0, abs=0.01)
        assert jump == 1
        assert parts.take().actions.tolist() == [pytest.approx([0, 1 + math.tanh(2)], abs=0.01)]
        files = DemonstrationFiles([open_store(tmp_path / "demonstrations")])
        (shown,) = files.read_sound().values()
        assert shown.segment.actions.tolist() == [[0.5, 0.5]]
