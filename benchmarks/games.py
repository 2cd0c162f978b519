"""Mean returns of games after a fixed number of environment steps, of all actors together.

    python -m benchmarks.games [--runs N] [--quick] [--only GAME ...]

The return is that of the last 100 finished training episodes, exploration included, and its mean over the seeds counts.
Ours has gateway and learner in one process, and actors in processes of their own. For the games of MinAtar, the control
is the same algorithm in one process without a queue. Each GAME has a file of its own in benchmarks/results, with the
curves, so games can be measured one by one; the curves of all are drawn in docs/pictures/games.png.

Needs 'CHECKOUT[box2d]', minatar, ale-py and opencv-python-headless. `quiet_s` is what a run takes on two cores that
nothing else uses; a run ends at three times as much, and the note says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.ours.rl import START_TIMEOUT_S, actors_of, run_of
from benchmarks.result import RESULTS, Row, compare, options, write

PICTURE = ROOT / "docs" / "pictures" / "games.png"
NUM_POINTS, QUICK_STEPS = 40, 20_000

Curve = list[tuple[float, int, float]]  # seconds, environment steps, mean return


class Game(NamedTuple):
    """`bar` is for the return, or for its ratio to the control's where there is one."""

    title: str
    num_steps: int
    bar: float
    quiet_s: float
    num_actors: int
    num_envs: int  # of each actor
    spec: Mapping[str, Any]
    has_control: bool = False


FRESH = {"queue_capacity": 16, "max_credits": 2}
LANDER = {
    "env": "LunarLander-v3",
    "algorithm": {"name": "ppo", "discount": 0.999, "lambda_": 0.98, "learning_rate": 3e-4, "minibatch_steps": 64},
    "learner": {"batch_steps": 4096},
    "gateway": FRESH,
}
ACROBOT = {
    "env": "Acrobot-v1",
    "algorithm": {"name": "ppo", "lambda_": 0.94, "learning_rate": 3e-4, "minibatch_steps": 256, "entropy_cost": 0.0},
    "learner": {"batch_steps": 4096},
    "gateway": FRESH,
}
SMALL_FRAMES = {
    "segment_length": 128,
    "algorithm": {"name": "ppo", "learning_rate": 5e-4, "minibatch_steps": 256},
    "learner": {"batch_steps": 2048},
    "gateway": FRESH,
}
PONG = {
    "env": "shoal.libs.games:SmallPong-v0",
    "segment_length": 64,
    "algorithm": {
        **{"name": "dqn", "learning_rate": 3e-4, "num_steps": 5, "batch_size": 64, "samples_per_insert": 6},
        **{"learning_starts": 4000, "epsilon_steps": 40_000, "target_update_period": 500, "replay_mb": 1500},
    },
    "gateway": FRESH,
}
MINATAR = "benchmarks.ours.minatar_games:MinAtar/"
GAMES = {
    "lunar_lander": Game("LunarLander-v3", 1_000_000, 200.0, 240.0, 2, 8, LANDER),
    "acrobot": Game("Acrobot-v1", 500_000, -86.0, 120.0, 2, 8, ACROBOT),
    "breakout": Game(
        "MinAtar breakout",
        3_000_000,
        1.0,
        900.0,
        2,
        8,
        {"env": f"{MINATAR}Breakout-v1"} | SMALL_FRAMES,
        has_control=True,
    ),
    "asterix": Game(
        "MinAtar asterix", 3_000_000, 1.0, 900.0, 2, 8, {"env": f"{MINATAR}Asterix-v1"} | SMALL_FRAMES, has_control=True
    ),
    "pong": Game("Pong, frames of 42 x 42", 300_000, -15.0, 1200.0, 2, 4, PONG),
}


def ours(game: Game, seed: int, folder: Path, num_steps: int) -> Curve:
    limit_s = 3 * game.quiet_s
    actor = ["--env", game.spec["env"], "--envs", str(game.num_envs)]
    with (
        run_of("local", folder, spec=game.spec, words=[f"learner.seed={seed}"]) as (run, address),
        actors_of(folder, game.num_actors, ["--connect", address, *actor]),
    ):
        asked = {"do": "curve", "steps": num_steps, "timeout_s": limit_s, "points": NUM_POINTS}
        return list(run.ask(limit_s + 60.0, **asked)["points"])


def control(game: Game, seed: int, folder: Path, num_steps: int) -> Curve:
    limit_s = 3 * game.quiet_s
    setting = {"spec": game.spec, "words": [], "seed": seed, "steps": num_steps}
    setting |= {"num_envs": game.num_actors * game.num_envs, "points": NUM_POINTS, "timeout_s": limit_s}
    with Child([OUR_PYTHON, "-m", "benchmarks.ours.control", json.dumps(setting)], folder) as child:
        return list(child.answer(START_TIMEOUT_S + limit_s)["points"])


def rows_of(game: Game, num_steps: int, curves: Sequence[Curve], controls: Sequence[Curve]) -> list[Row]:
    """One row: the mean over the seeds of the last point of each curve."""
    means = [statistics.fmean(curve[-1][2] for curve in each) for each in (curves, controls) if each]
    parts = [f"{'control' if each is controls else 'seeds'}: {describe(each)}" for each in (curves, controls) if each]
    early = sum(curve[-1][1] < num_steps for curve in [*curves, *controls])
    parts += [f"{early} runs ended before, at three times {game.quiet_s:g} s"] if early else []
    row = compare(
        f"{game.title} at {num_steps:,} steps, mean of {len(curves)} seeds", "return", "higher", means[:1], means[1:],
        "the same in one process, synchronous" if controls else None, game.bar, "ratio" if controls else "value",
        note="; ".join(parts),
    )  # fmt: skip
    row.runs["curves"] = {"ours": list(curves), "peer": list(controls)}
    return [row]


def describe(curves: Sequence[Curve]) -> str:
    seconds = statistics.median(curve[-1][0] for curve in curves)
    return f"{', '.join(f'{curve[-1][2]:.1f}' for curve in curves)} in {seconds:,.0f} s each"


def draw(folder: Path, path: Path) -> None:
    """The curves of all games in `folder`: a line for each seed, the control's dashed."""
    import matplotlib.pyplot as plt

    found = {name: folder / f"games_{name}.json" for name in GAMES}
    found = {name: each for name, each in found.items() if each.exists()}
    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3.0), squeeze=False, layout="constrained")
    for axis, (name, each) in zip(axes[0], found.items(), strict=True):
        (row,) = json.loads(each.read_text())["rows"]
        for side, style in (("ours", "C0-"), ("peer", "C1--")):
            for curve in row["runs"]["curves"][side]:
                axis.plot([point[1] / 1e6 for point in curve], [point[2] for point in curve], style, linewidth=0.8)
        axis.set_title(GAMES[name].title, fontsize=9)
        axis.set_xlabel("million environment steps")
    axes[0][0].set_ylabel("mean return of 100 episodes")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(GAMES))
    with scratch() as folder:
        for name in chosen.only:
            game, curves, controls = GAMES[name], list[Curve](), list[Curve]()
            num_steps = QUICK_STEPS if chosen.quick else game.num_steps
            for seed in range(chosen.runs):
                curves.append(ours(game, seed, folder, num_steps))
                print(f"{name}, seed {seed}, ours: {curves[-1][-1]}", flush=True)
                if game.has_control:
                    controls.append(control(game, seed, folder, num_steps))
                    print(f"{name}, seed {seed}, control: {controls[-1][-1]}", flush=True)
            write(f"games_{name}", rows_of(game, num_steps, curves, controls), chosen.results)
    draw(chosen.results, PICTURE if chosen.results == RESULTS else chosen.results / "games.png")


if __name__ == "__main__":
    main()
