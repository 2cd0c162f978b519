"""Policies that must be mixed, as an endpoint serves them, beside what training has: returns, and exploitability.

    python -m benchmarks.mixed_policies [--seeds N] [--quick]

Stochastic: PPO; the mean return of 200 episodes through an endpoint that samples, beside that of an actor's policy with
the same weights. Kuhn poker: DQN against its pool (benchmarks.self_play, 20,000 steps); the exploitability, half the
NashConv, of the mixture that `action=average` registers, by the members that the endpoint draws and their answers,
beside that of the pool's average. One endpoint serves all.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import gymnasium
import numpy as np

import shoal
from benchmarks import self_play, steady_lag
from benchmarks.children import scratch
from benchmarks.ours.kuhn_poker import TURNS, Strategy, average, nash_conv, observe
from benchmarks.result import Row, compare, options, write
from shoal.actor.policy import make_policy
from shoal.client import Client
from shoal.flows.policy_connection import InferenceConnection
from shoal.flows.policy_evaluation import play_through
from shoal.flows.rl_policy import describe_policy_model, inspect_environment, mix_policies
from shoal.home import load_access_token
from shoal.registry import Registry
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.learner import model_arrays
from shoal.weights import WeightSnapshot

STOCHASTIC, KUHN_STEPS, QUICK_STEPS, NUM_EPISODES, NUM_DRAWS = (
    "benchmarks.ours.stochastic:make",
    20_000,
    5_000,
    200,
    20_000,
)
TOLERANCE = 0.02


def learn_stochastic(seed: int, num_batches: int) -> float:
    """Train and register; the mean return of an actor's policy."""
    gymnasium.register("Stochastic-v0", entry_point=STOCHASTIC)
    spec, experience, algorithm, _ = steady_lag.train("Stochastic-v0", ["algorithm=ppo"], 0, seed, num_batches)
    factory, signature = describe_policy_model(spec, experience)
    arrays = model_arrays(algorithm.model)
    model = factory.update({"action": "sampled"})
    Registry().register(f"stochastic-{seed}", WeightSnapshot.of(1, arrays), model=model, signature=signature)
    policy = make_policy(experience.policy, seed)
    policy.load(1, arrays)
    return steady_lag.evaluate("Stochastic-v0", policy, is_sampled=True, num_episodes=NUM_EPISODES)


def play_stochastic(url: str, seed: int, action: str | None) -> float:
    connection = InferenceConnection(url, f"stochastic-{seed}", load_access_token(), action=action)
    played = play_through([{"": connection}], STOCHASTIC, NUM_EPISODES, 10_000, {"": 64})
    connection.close()
    return played[""].mean_return


def learn_kuhn(seed: int, num_steps: int, folder: Path) -> float:
    """Train and register the pool's mixture; the exploitability of the pool's average."""
    strategies = self_play.train(seed, num_steps, folder)
    pool = OpponentPool.of_run(self_play.SPEC.self_play, folder)
    assert pool is not None
    experience, _ = inspect_environment(self_play.SPEC)
    factory, signature, snapshot = mix_policies(*describe_policy_model(self_play.SPEC, experience), pool.load_own())
    Registry().register(f"kuhn-{seed}", snapshot, model=factory, signature=signature)
    return nash_conv(average(strategies)) / 2


def measure_kuhn(client: Client, name: str) -> float:
    """The exploitability of the mixture as it is served: of its members as often as they are drawn."""
    points = [(card, history) for card in range(3) for history in TURNS]
    observations = np.stack([observe(*each) for each in points])
    drawn = [
        client.infer(name, {"observation": np.tile(observations[:1], (50, 1)), "state": np.zeros((50, 1), "f4")})
        for _ in range(NUM_DRAWS // 50)
    ]
    numbers, counts = np.unique(np.concatenate([each["next_state"][:, 0] for each in drawn]), return_counts=True)
    served = list[Strategy]()
    for number, count in zip(numbers, counts, strict=True):
        answer = client.infer(name, {"observation": observations, "state": np.full((len(points), 1), number, "f4")})
        choices: Mapping[tuple[int, str], tuple[float, float]] = {
            point: (float(action == 0), float(action == 1))
            for point, action in zip(points, answer["action"].tolist(), strict=True)
        }
        served += [choices] * int(count)
    return nash_conv(average(served)) / 2


def make_row(name: str, unit: str, served: list[float], trained: list[float], note: str) -> Row:
    """Our value is the largest difference, relative to training."""
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(served, trained, strict=True)]
    shown = ", ".join(f"{ours:.4f} ({theirs:.4f})" for ours, theirs in zip(served, trained, strict=True))
    note = f"{unit} served (trained): {shown}{note}"
    return compare(name, "of it", "lower", differences, bar=TOLERANCE, bar_kind="value", note=note)


def main() -> None:
    chosen = options(__doc__, runs=3)
    seeds = range(chosen.runs)
    with scratch() as folder, ExitStack() as closing:
        returns = [learn_stochastic(seed, 3 if chosen.quick else 30) for seed in seeds]
        print(f"Stochastic, trained: {returns}", flush=True)
        steps = QUICK_STEPS if chosen.quick else KUHN_STEPS
        exploitabilities = [learn_kuhn(seed, steps, folder / f"kuhn-{seed}") for seed in seeds]
        print(f"Kuhn poker, trained: {exploitabilities}", flush=True)
        names = [f"{name}-{seed}" for name in ("stochastic", "kuhn") for seed in seeds]
        endpoint = closing.enter_context(shoal.serve(*names))
        sampled = [play_stochastic(endpoint.url, seed, None) for seed in seeds]
        best = [play_stochastic(endpoint.url, seed, "best") for seed in seeds]
        client = closing.enter_context(endpoint.client())
        served = [measure_kuhn(client, f"kuhn-{seed}") for seed in seeds]
    note = f"; with action=best {', '.join(f'{each:.4f}' for each in best)}"
    rows = [
        make_row(
            "Stochastic through an endpoint that samples: difference from training", "return", sampled, returns, note
        ),
        make_row(
            "Kuhn poker through action=average: difference from the pool's average",
            "exploitability", served, exploitabilities, "",
        ),
    ]  # fmt: skip
    write("mixed_policies", rows, chosen.results)


if __name__ == "__main__":
    main()
