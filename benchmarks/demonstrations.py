"""Environment steps until a game with sparse reward is solved: with 20 episodes of a scripted person, and without.

    python -m benchmarks.demonstrations [--seeds N] [--quick] [--only ALGORITHM ...]

The game: on 12 x 12 fields, fetch a key, then reach a door; each stands somewhere else in each episode. The only
reward is 1 at the door with the key, within 96 steps. Solved: a mean return of 0.9 over 100 episodes of the policy. The
script takes the shortest way; its steps count as steps, too. Both sides have the same seeds, in turns, each an actor
process and a loop in this process. A run that is not solved within MAX_STEPS counts as that many.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import shoal
from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.actor import ActorClient, play
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec

SIZE, EPISODE_STEPS, NUM_ENVS = 12, 96, 16
TARGET, MAX_STEPS, NUM_SHOWN, TOKEN = 0.9, 1_500_000, 20, "benchmark"
MOVES = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])
ALGORITHMS = {"ppo": ["algorithm=ppo"], "impala": ["algorithm=impala"]}
BAR = 0.3


class KeyDoor:
    """Observes the way to the key, the way to the door, and whether the key is there."""

    observation_space = gymnasium.spaces.Box(-1, 1, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        cells = self._random.choice(SIZE * SIZE, 3, replace=False)
        self.place, self.key, self.door = (np.array(divmod(int(cell), SIZE)) for cell in cells)
        self.has_key, self._steps = False, 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = np.clip(self.place + MOVES[int(action)], 0, SIZE - 1)
        self.has_key |= bool((self.place == self.key).all())
        self._steps += 1
        is_open = self.has_key and bool((self.place == self.door).all())
        return self._look(), float(is_open), is_open, self._steps == EPISODE_STEPS and not is_open, {}

    def show(self) -> int:
        """The person's next move: nearer to the key, and with it to the door."""
        way = (self.door if self.has_key else self.key) - self.place
        return int((MOVES @ way).argmax())

    def _look(self) -> np.ndarray:
        ways = [*(self.key - self.place) * (not self.has_key), *(self.door - self.place), SIZE * self.has_key]
        return np.array(ways, np.float32) / SIZE


def show_how(address: str, seed: int) -> int:
    """Play NUM_SHOWN episodes by the script; returns their steps."""
    game, num_steps = KeyDoor(), 0
    with shoal.connect(address, token=TOKEN, behaviour="script") as actor:
        for episode in range(NUM_SHOWN):
            (observation, _), is_over = game.reset(seed=1000 * seed + episode), False
            while not is_over:
                action = actor.act(observation, taken=game.show())
                observation, reward, is_open, is_late, _ = game.step(action)
                actor.reward(reward)
                is_over, num_steps = is_open or is_late, num_steps + 1
            actor.end_episode(observation, truncated=is_late)
    return num_steps


def measure(algorithm: str, seed: int, is_shown: bool, max_steps: int, folder: Path) -> float:
    """Steps until solved, at most `max_steps`."""
    spec = RLSpec(env="KeyDoor").override([*ALGORITHMS[algorithm], f"learner.seed={seed}"])
    experience = experience_spec(KeyDoor.observation_space, KeyDoor.action_space, spec)
    with LocalLoop(spec, experience, folder, TOKEN, TARGET) as loop:
        shown = show_how(loop.address, seed) if is_shown else 0
        began, words = time.monotonic(), ["-m", "benchmarks.demonstrations", "actor", loop.address, str(seed)]
        actor = subprocess.Popen([str(OUR_PYTHON), *words], cwd=ROOT)
        try:
            while (stats := loop.gateway.stats())["solved_s"] is None and stats["steps"] < max_steps:
                loop.require_learner()
                time.sleep(0.05)
        finally:
            actor.terminate()
            actor.wait(30)
        steps = shown + (stats["solved_steps"] or max_steps)
    what = f"{algorithm}, seed {seed}, {'shown' if is_shown else 'alone'}"
    print(f"{what}: {steps:,} steps, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return float(steps)


def act(address: str, seed: int) -> None:
    with ActorClient(address, TOKEN, "player", timeout_s=60) as client:
        play([KeyDoor() for _ in range(NUM_ENVS)], client, seed=10_000 * (seed + 1))


def main() -> None:
    chosen = options(__doc__, runs=3, only=tuple(ALGORITHMS))
    max_steps, rows = 20_000 if chosen.quick else MAX_STEPS, []
    with scratch() as folder:
        for algorithm in chosen.only:
            found: dict[bool, list[float]] = {True: [], False: []}
            for seed in range(chosen.runs):
                for is_shown in (True, False):
                    run = folder / f"{algorithm}-{seed}-{is_shown}"
                    found[is_shown].append(measure(algorithm, seed, is_shown, max_steps, run))
            name, note = f"{algorithm.upper()} after {NUM_SHOWN} shown episodes", "steps of the script included"
            rows.append(
                compare(name, "steps to solve", "lower", found[True], found[False], "without", BAR, "ratio", note)
            )
    write("demonstrations", rows, chosen.results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["actor"]:
        act(sys.argv[2], int(sys.argv[3]))
    else:
        main()
