"""One decision of an exported policy in each language of a game, beside onnxruntime.

    python -m benchmarks.game_runtimes [--runs N] [--quick]

A policy of 64 x 64 units (8 numbers observed, 4 choices), exported by `shoal export --to game`, takes its best action
at one observation, again and again, in a process for each language: C++ by g++ -O2, C# by Mono, JavaScript by Node,
GDScript by Godot 3. The peer is onnxruntime in Python, one thread, with the folder's policy.onnx and its action alone.
Needs g++, mcs, mono, node and godot3-server. The programs are also those of the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime
from gymnasium import spaces

from benchmarks.children import ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import describe_policy_model, register_policy
from shoal.libs.export.export_model import ExportSpec, export_model
from shoal.rl.spec import experience_spec
from shoal.weights import WeightSnapshot

PROGRAMS = ROOT / "benchmarks" / "runtimes"
DECISIONS = {"C++": 50_000, "C#": 20_000, "JavaScript": 50_000, "GDScript": 2_000}
PEER = "onnxruntime in Python, one thread"


def build(language: str, runtimes: Path, into: Path) -> list[str]:
    """The command of a program, compiled with the runtime of a folder; its arguments are a number of decisions, and
    exported folders. It prints a line for each: the largest difference from its vectors, and microseconds a decision.
    """
    match language:
        case "C++":
            flags = [
                "-std=c++17",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Wshadow",
                "-Werror",
                f'-DPOLICY="{runtimes / "policy.hpp"}"',
            ]
            subprocess.run(["g++", *flags, PROGRAMS / "drive.cpp", "-o", into / "drive"], check=True)
            return [str(into / "drive")]
        case "C#":
            files = [PROGRAMS / "Drive.cs", runtimes / "Policy.cs"]
            subprocess.run(["mcs", "-optimize", "-warnaserror", f"-out:{into / 'Drive.exe'}", *files], check=True)
            return ["mono", str(into / "Drive.exe")]
        case "GDScript":
            return ["godot3-server", "--no-window", "-s", str(PROGRAMS / "drive.gd"), "drive"]
        case _:
            return ["node", str(PROGRAMS / "drive.mjs")]


def run(command: list[str], num_decisions: int, folders: list[Path]) -> list[tuple[float, float]]:
    """The largest difference and the microseconds of each folder."""
    words = [*command, str(num_decisions), *map(str, folders)]
    output = subprocess.run(words, cwd=folders[0].parent, capture_output=True, text=True, timeout=120)
    lines = [line.split() for line in output.stdout.splitlines() if line[:1].isdigit()]
    assert len(lines) == len(folders), output.stdout + output.stderr
    return [(float(line[0]), float(line[1])) for line in lines]


def write_table(folder: Path) -> None:
    """vectors.txt: the vectors as numbers alone, each list after its length, for programs without a reader of JSON."""
    policy, vectors = (json.loads((folder / f"{name}.json").read_text()) for name in ("policy", "vectors"))
    spans, rows = np.subtract(policy["action_high"], policy["action_low"]).tolist(), []
    for each in vectors:
        wanted = each["outputs"] + each["next_state"]
        lists = [each["observation"], each["mask"], each["state"], wanted, spans, each["action"], each["sampled"]]
        numbers = ([len(part), *map(float, part)] for part in (*lists, each["uniforms"]))
        rows.append(" ".join(map(str, [int(each["reset"]), *chain(*numbers)])))
    (folder / "vectors.txt").write_text("\n".join(rows) + "\n")


def export_policy(folder: Path) -> None:
    spec = ActorLearnerSpec(env="Game-v0").override(["endpoint.name=game", "algorithm=impala"])
    experience = experience_spec(spaces.Box(-1, 1, (8,), np.float32), spaces.Discrete(4), spec)
    model = describe_policy_model(spec, experience)[0].build()
    weights = {name: each.numpy() for name, each in model.state_dict().items()}
    weights = {name: each * (30 if name == "policy.4.weight" else 1) for name, each in weights.items()}  # no near ties
    register_policy(spec, experience, WeightSnapshot.of(1, weights), "", {"mean_return": 0, "steps": 0})
    export_model(ExportSpec.parse({"model": "game", "to": "game", "into": str(folder)}))
    write_table(folder)


def time_onnxruntime(folder: Path, num_decisions: int) -> float:
    """Microseconds of a decision."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "policy.onnx", settings)
    feeds = {"observation": np.full((1, 8), 0.5, np.float32)}
    began_s = time.perf_counter()
    for _ in range(num_decisions):
        session.run(["action"], feeds)
    return (time.perf_counter() - began_s) / num_decisions * 1e6


def main() -> None:
    chosen = options(__doc__, runs=7)
    share = 100 if chosen.quick else 1
    taken_us: dict[str, list[float]] = {name: [] for name in (*DECISIONS, PEER)}
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        export_policy(folder / "game")
        commands = {language: build(language, folder / "game", folder) for language in DECISIONS}
        for turn in range(chosen.runs):
            for language in (*DECISIONS, PEER) if turn % 2 else (PEER, *DECISIONS):
                if language == PEER:
                    taken_us[PEER].append(time_onnxruntime(folder / "game", 20_000 // share))
                    continue
                ((_, taken),) = run(commands[language], DECISIONS[language] // share, [folder / "game"])
                taken_us[language].append(taken)
    name = "one decision of an exported policy of 64 x 64"
    rows = [
        compare(f"{name}, {language}", "µs", "lower", taken_us[language], taken_us[PEER], PEER)
        for language in DECISIONS
    ]
    write("game_runtimes", rows, chosen.results)


if __name__ == "__main__":
    sys.exit(main())
