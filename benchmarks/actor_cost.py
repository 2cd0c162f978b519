"""What a step of experience costs beside acting and stepping, with 1, 8 and 32 environments in an actor.

    python -m benchmarks.actor_cost [--runs N] [--quick]

Core-µs per environment step of CartPole, with segments of 256 steps: the processor time of four actors, of the gateway
and of the learner (in one process without Ray), less that of the same actors which only act and step. Policy, weights
and windows are those of `experience`. With several environments one evaluation of the network gives all actions, in
both.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.balancing import balancing_weights
from benchmarks.children import scratch
from benchmarks.experience import NUM_ACTORS, Window, measure
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import compare, options, write
from shoal.rl.spec import RLSpec
from shoal.weights import encode_tensors

ENV = "CartPole-v1"
COUNTS = (1, 8, 32)  # environments in an actor
BAR_US = {1: 7.0, 8: 10.0, 32: 10.0}


def measure_cost(is_alone: bool, num_environments: int, folder: Path, warm_up_s: float, window_s: float) -> float:
    """Core-µs per environment step."""
    words = ["--env", ENV, "--envs", str(num_environments)]
    if is_alone:
        weights = folder / "weights.safetensors"
        weights.write_bytes(encode_tensors(balancing_weights(RLSpec(env=ENV))))
        with actors_of(folder, NUM_ACTORS, [*words, "--alone", str(weights)]) as actors:
            return _to_us(measure(actors, None, warm_up_s, window_s))
    with (
        run_of("local", folder, spec={"env": ENV}, balancing=True, still=True) as (run, address),
        actors_of(folder, NUM_ACTORS, [*words, "--connect", address]) as actors,
    ):
        return _to_us(measure(actors, run, warm_up_s, window_s))


def _to_us(window: Window) -> float:
    return 1e6 * (window.actor_cores + window.run_cores) / window.steps_per_s


def main() -> None:
    chosen = options(__doc__, runs=4)
    warm_up_s, window_s = (2.0, 3.0) if chosen.quick else (3.0, 8.0)
    alone: dict[int, list[float]] = {count: [] for count in COUNTS}
    taught: dict[int, list[float]] = {count: [] for count in COUNTS}
    with scratch() as folder:
        for index in range(chosen.runs):
            for count in COUNTS:
                alone[count].append(measure_cost(True, count, folder, warm_up_s, window_s))
                taught[count].append(measure_cost(False, count, folder, warm_up_s, window_s))
                found = f"{taught[count][-1]:.1f} µs a step, acting alone {alone[count][-1]:.1f}"
                print(f"run {index + 1}, {count} environments: {found}", flush=True)
    rows = []
    for count in COUNTS:
        name = f"{count} environment{'s' if count > 1 else ''} in an actor"
        beyond = [whole - part for whole, part in zip(taught[count], alone[count], strict=True)]
        note = f"the whole step {median(taught[count]):.1f} core-µs, acting and stepping {median(alone[count]):.1f}"
        beside, unit = f"cost beside acting, {name}", "core-µs a step"
        rows.append(compare(beside, unit, "lower", beyond, bar=BAR_US[count], bar_kind="value", note=note))
        rows.append(compare(f"whole cost, {name}", unit, "lower", taught[count], taught[1], "one environment"))
    write("actor_cost", rows, chosen.results)


if __name__ == "__main__":
    main()
