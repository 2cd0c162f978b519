"""Policies that must be mixed, as they are served, beside what training has: returns, and exploitability.

    python -m benchmarks.mixed_policies [--seeds N] [--quick]

Stochastic: PPO; the mean return of 1,000 episodes by sampled actions of the registered version, beside that of an
actor's policy with the same weights. Kuhn poker: DQN against its pool (benchmarks.self_play, 10,000 steps); the
exploitability, half the NashConv, of the mixture that `action=average` registers, by the members that it draws and
their actions, beside that of the pool's average. Both are computed as a replica computes them, in this process.
"""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium
import numpy as np

from benchmarks import self_play, steady_lag
from benchmarks.children import scratch
from benchmarks.ours.kuhn_poker import TURNS, Strategy, average, nash_conv, observe
from benchmarks.result import Row, compare, options, write
from shoal.actor.policy import make_policy
from shoal.client import Answer
from shoal.flows.rl_policy import describe_policy_model, inspect_environment, mix_policies
from shoal.libs.evaluation.episodes import play_through
from shoal.registry import Registry
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.learner import model_arrays
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.messages.inference import Outputs
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

STOCHASTIC, KUHN_STEPS, QUICK_STEPS, NUM_EPISODES, NUM_DRAWS = (
    "benchmarks.ours.stochastic:make",
    10_000,
    2_000,
    1_000,
    20_000,
)
TOLERANCE = 0.02


def learn_stochastic(seed: int, num_batches: int) -> float:
    """Train and register; the mean return of an actor's policy."""
    spec, experience, algorithm, _ = steady_lag.train("Stochastic-v0", ["algorithm=ppo"], 0, seed, num_batches)
    factory, signature = describe_policy_model(spec, experience)
    arrays = model_arrays(algorithm.model)
    model = factory.update({"action": "sampled"})
    Registry().register(f"stochastic-{seed}", WeightSnapshot.of(1, arrays), model=model, signature=signature)
    policy = make_policy(experience.policy, seed)
    policy.load(1, arrays)
    return steady_lag.evaluate("Stochastic-v0", policy, is_sampled=True, num_episodes=NUM_EPISODES)


class ServedPolicy:
    """A registered version as a replica computes it: the predictor, and the sampler of its actions."""

    def __init__(self, ref: str, action: str | None = None) -> None:
        version = Registry().get(ref)
        predictor = Predictor(version.manifest.model, version.manifest.signature, ModelOptions())
        self._loaded, self._action = predictor.load(version.snapshot()), action

    def answer(self, **inputs: np.ndarray) -> Outputs:
        (outputs,) = self._loaded.predict_batch([inputs])
        call = InferCall(inputs, len(inputs["observation"]), action=self._action)
        return outputs if self._loaded.sampler is None else self._loaded.sampler.act(outputs, call)

    def insist(self, observations: np.ndarray, *_: object, **__: object) -> Answer:
        return Answer(self.answer(observation=observations), 1, "policy")


def play_stochastic(seed: int, action: str | None) -> float:
    policy = ServedPolicy(f"stochastic-{seed}", action)
    return play_through([{"": policy}], STOCHASTIC, NUM_EPISODES, 10_000, {"": 64})[""].mean_return


def learn_kuhn(seed: int, num_steps: int, folder: Path) -> float:
    """Train and register the pool's mixture; the exploitability of the pool's average."""
    strategies = self_play.train(seed, num_steps, folder)
    pool = OpponentPool.of_run(self_play.SPEC.self_play, folder)
    assert pool is not None
    experience, _ = inspect_environment(self_play.SPEC)
    factory, signature, snapshot = mix_policies(*describe_policy_model(self_play.SPEC, experience), pool.load_own())
    Registry().register(f"kuhn-{seed}", snapshot, model=factory, signature=signature)
    return nash_conv(average(strategies)) / 2


def measure_kuhn(policy: ServedPolicy) -> float:
    """The exploitability of the mixture as it is served: of its members as often as they are drawn."""
    points = [(card, history) for card in range(3) for history in TURNS]
    observations = np.stack([observe(*each) for each in points])
    first, zero = np.tile(observations[:1], (50, 1)), np.zeros((50, 1), np.float32)
    drawn = [policy.answer(observation=first, state=zero)["next_state"][:, 0] for _ in range(NUM_DRAWS // 50)]
    served = list[Strategy]()
    for number, count in zip(*np.unique(np.concatenate(drawn), return_counts=True), strict=True):
        state = np.full((len(points), 1), number, np.float32)
        actions = policy.answer(observation=observations, state=state)["action"].tolist()
        chosen = {each: (float(action == 0), float(action == 1)) for each, action in zip(points, actions, strict=True)}
        served += [chosen] * int(count)
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
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder)
        gymnasium.register("Stochastic-v0", entry_point=STOCHASTIC)
        returns = [learn_stochastic(seed, 3 if chosen.quick else 30) for seed in seeds]
        sampled, best = ([play_stochastic(seed, action) for seed in seeds] for action in (None, "best"))
        steps = QUICK_STEPS if chosen.quick else KUHN_STEPS
        exploitabilities = [learn_kuhn(seed, steps, folder / f"kuhn-{seed}") for seed in seeds]
        served = [measure_kuhn(ServedPolicy(f"kuhn-{seed}")) for seed in seeds]
    note = f"; with action=best {', '.join(f'{each:.4f}' for each in best)}"
    rows = [
        make_row(
            "Stochastic, served by sampled actions: difference from training", "return", sampled, returns, note
        ),
        make_row(
            "Kuhn poker, served by action=average: difference from the pool's average",
            "exploitability", served, exploitabilities, "",
        ),
    ]  # fmt: skip
    write("mixed_policies", rows, chosen.results)


if __name__ == "__main__":
    main()
