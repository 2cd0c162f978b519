"""A game in Godot that a run learns from, beside the same game in godot-rl, whose Python side trains nothing.

    python -m benchmarks.godot [--runs N] [--quick]

Catch of `clients/godot`, in `godot3-server` with `--fixed-fps 60`, played by 1 and by 16 agents in one process. Ours is
a gateway with its ledger, and a learner in another process. godot-rl is its GodotEnv with actions made before, and in
the game what its plugin does, written after its protocol (it has none for Godot 3). The game itself takes the times,
from an action to the next, after a second to warm up. Then how long either takes to solve Catch with 16 agents, from
the first step: our IMPALA in a LocalLoop, and PPO of stable-baselines3 through godot-rl, whose settings were searched
for this game as ours were. Sides take turns.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from benchmarks.children import GODOT, OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec

CATCH = ROOT / "clients" / "godot"
PEER = ROOT / "benchmarks" / "peers"
TOKEN, TARGET, TIMEOUT_S = "benchmark", 4.5, 60.0
SPEC = RLSpec(env="{observation: [4], action: 3}").override(
    [
        "gateway.websocket=0",
        "learner.batch_steps=384",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.03",
        "algorithm.discount=0.8",
    ]
)


def make_projects(folder: Path) -> None:
    """Both games: `ours`, and `peer` with the same fields."""
    for side, script in (("ours", "timed"), ("peer", "sync")):
        project = folder / side
        shutil.copytree(CATCH / "catch", project)
        for path in (PEER / "godot_rl_catch").iterdir():
            shutil.copy(path, project)
        scene = project / "catch.tscn"
        scene.write_text(scene.read_text().replace("res://catch.gd", f"res://{script}.gd"))


@contextmanager
def playing(project: Path, num_agents: int, **words: object) -> Iterator[subprocess.Popen[str]]:
    command = ["godot3-server", "--path", str(project), "--fixed-fps", "60", f"agents={num_agents}"]
    command += [f"{name}={value}" for name, value in words.items()]
    environment = {**os.environ, "SHOAL_TOKEN": TOKEN}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as game:
        try:
            yield game
        finally:
            game.kill()


def read_times(game: subprocess.Popen[str]) -> dict[str, float]:
    """What the game's stopwatch printed. Raises StopIteration without."""
    output, _ = game.communicate(timeout=TIMEOUT_S)
    found: dict[str, float] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


def time_ours(folder: Path, num_agents: int, seconds: float, number: int) -> dict[str, float]:
    """The times, and what became of the steps; or without `seconds`, when it was solved."""
    if seconds:
        words = ["--path", str(folder / "ours"), "--fixed-fps", "60", f"agents={num_agents}", f"seconds={seconds}"]
        game = f"SHOAL_TOKEN=$2 godot3-server {shlex.join(words)} address=ws://127.0.0.1:$1 2>/dev/null | grep p50_ms"
        command = [OUR_PYTHON, "-m", "benchmarks.ours.agents_server", str(seconds), "--", "sh", "-c", game, "sh"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found
    experience = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(3), SPEC)
    with LocalLoop(SPEC, experience, folder / f"run-{number}", TOKEN, target_return=TARGET) as loop:
        with playing(folder / "ours", num_agents, address=loop.websocket_address):
            found = {"solved_s": loop.wait_until_solved(TIMEOUT_S), "steps": loop.gateway.stats()["steps"]}
        totals = loop.gateway.stats()["segments"]
        assert (totals["balanced"], totals["duplicates"], totals["dropped"]) == (True, 0, {}), totals
    return found


def time_peer(folder: Path, num_agents: int, seconds: float, number: int) -> dict[str, float]:
    """The same of godot-rl."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["rate", str(port)] if seconds else ["solve", str(port), str(number)]
    command = [str(GODOT / "bin" / "python"), "-u", str(PEER / "godot_rl_learner.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as learner:
        assert learner.stdout is not None
        try:
            next(line for line in learner.stdout if "waiting" in line)
            with playing(folder / "peer", num_agents, port=port, seconds=seconds) as game:
                if seconds:
                    return read_times(game)
                found: dict[str, float] = json.loads(
                    next(line for line in learner.stdout if line.startswith('{"solved'))
                )
                return found
        finally:
            learner.kill()


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 1.0 if chosen.quick else 4.0
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with scratch() as folder:
        make_projects(folder)
        for number in range(chosen.runs):
            for num_agents, how_long in ((1, seconds), (16, seconds), (16, 0.0)):
                for side, measure in (("ours", time_ours), ("peer", time_peer)):
                    one: dict[str, Any] = measure(folder, num_agents, how_long, number)
                    print(f"run {number + 1}, {num_agents} agents, {side}: {one}", flush=True)
                    for name, value in one.items():
                        found[side, num_agents, name].append(value)

    def row(name: str, unit: str, better: Any, key: tuple[int, str], bar: float | None, *kind: Any, **more: Any) -> Any:
        return compare(
            name,
            unit,
            better,
            found["ours", *key],
            found["peer", *key],
            more.pop("peer", "godot-rl"),
            bar,
            *kind,
            **more,
        )

    ledger = "ours learns meanwhile (IMPALA), and counts every step in the ledger; godot-rl trains nothing"
    steps = {side: found[side, 16, "steps"] for side in ("ours", "peer")}
    needed = f"environment steps, ours: {steps['ours']}; PPO's: {steps['peer']}"
    rows = [
        row("Godot, 1 agent: p50 of a decision", "ms", "lower", (1, "p50_ms"), 1.5, "ratio", note=ledger),
        row("Godot, 1 agent: p99 of a decision", "ms", "lower", (1, "p99_ms"), None),
        row("Godot, 16 agents in one game", "steps/s", "higher", (16, "rate"), 1.0, "ratio", note=ledger),
        row(
            "Catch in Godot solved, 16 agents",
            "s",
            "lower",
            (16, "solved_s"),
            8.0,
            "value",
            peer="SB3 PPO, godot-rl",
            note=needed,
        ),
        row(
            "Catch in Godot solved, 16 agents, beside PPO",
            "s",
            "lower",
            (16, "solved_s"),
            0.5,
            "ratio",
            peer="SB3 PPO, godot-rl",
        ),
    ]
    write("godot", rows, chosen.results)


if __name__ == "__main__":
    main()
