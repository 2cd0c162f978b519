"""A registered policy and a registered network in a program of one's own, beside Stable-Baselines3 and torch by hand.

    python -m benchmarks.load [--runs N] [--quick]

Microseconds of one call, and lines without imports. Policies are PPO's for CartPole-v1, two layers of 64: `act` of what
`shoal.load` gives, and `predict` of what `PPO.load` gives (stable-baselines3 of benchmarks/peers.txt, in .venv-peers).
The network is a perceptron of 784, 512, 512 and 10: `predict` beside torch under `inference_mode`, from arrays to
arrays, for 1 and 64 rows. One torch thread each; processes of both sides take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.children import OUR_PYTHON, PEERS_PYTHON, ROOT
from benchmarks.peers.sb3_act import SB3_TEXT, measure
from benchmarks.result import compare, options, write

OURS_TEXT = 'policy = shoal.load("cartpole@champion")\naction = policy.act(observation, deterministic={best})'
PREDICT_TEXT = 'model = shoal.load("perceptron@champion")\noutput = model.predict(rows)["output"]'
HAND_TEXT = (
    "network = build()\nnetwork.load_state_dict(safetensors.torch.load_file(path))\nnetwork.eval()\n"
    "with torch.inference_mode():\n    output = network(torch.from_numpy(rows)).numpy()"
)
ROWS = (1, 64)
BAR = 1.1


def measure_ours(seconds: float) -> dict[str, float]:
    os.environ["SHOAL_HOME"] = tempfile.mkdtemp()
    import numpy as np
    import torch

    import shoal
    from shoal.flows.actor_learner_spec import ActorLearnerSpec
    from shoal.flows.rl_policy import describe_policy_model, inspect_environment, register_policy
    from shoal.registry import ModelFactory, Registry, Signature, TensorSignature

    torch.set_num_threads(1)
    spec = ActorLearnerSpec(env="CartPole-v1").override(["algorithm=ppo"])
    experience, _ = inspect_environment(spec)
    built: Any = describe_policy_model(spec, experience)[0].build()
    register_policy(spec, experience, snapshot(built), "run", {"mean_return": 0, "steps": 0})
    observation, found = np.array([0.1, 0.2, 0.03, -0.4], np.float32), dict[str, float]()
    for best in (True, False):
        names: dict[str, Any] = {"shoal": shoal, "observation": observation}
        exec(OURS_TEXT.format(best=best), names)
        found[f"act {best}"] = measure(lambda: names["policy"].act(observation, deterministic=best), seconds)  # noqa: B023
    shapes = {"input": [-1, 784], "output": [-1, 10]}
    tensors = {name: [TensorSignature(name=name, datatype="FP32", shape=shape)] for name, shape in shapes.items()}
    network = build_perceptron()
    Registry().register(
        "perceptron",
        snapshot(network),
        model=ModelFactory(factory="benchmarks.load:build_perceptron"),
        signature=Signature(inputs=tensors["input"], outputs=tensors["output"]),
        criterion=None,
    )
    model = shoal.load("perceptron@champion")
    for count in ROWS:
        rows = np.random.default_rng(0).normal(size=(count, 784)).astype(np.float32)

        def compute_by_hand() -> Any:
            with torch.inference_mode():
                return network(torch.from_numpy(rows)).numpy()  # noqa: B023

        np.testing.assert_allclose(model.predict(rows)["output"], compute_by_hand(), rtol=1e-4, atol=1e-5)
        parts: list[tuple[float, float]] = []  # in turns, and the best of each: what else runs here slows down both
        for _ in range(9):
            parts.append((measure(lambda: model.predict(rows), seconds / 9), measure(compute_by_hand, seconds / 9)))  # noqa: B023
        found[f"predict {count}"], found[f"hand {count}"] = map(min, zip(*parts, strict=True))
    return found


def build_perceptron() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).eval()


def snapshot(network: Any) -> Any:
    from shoal.weights import WeightSnapshot

    return WeightSnapshot.of(1, {name: each.numpy() for name, each in network.state_dict().items()})


def ask(python: str, module: str, *words: str) -> dict[str, float]:
    """One side's numbers, of a process of its own."""
    words = (python, "-m", module, *words)
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 0.3 if chosen.quick else 2.0
    ours: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for _ in range(chosen.runs):
        peer.append(ask(PEERS_PYTHON, "benchmarks.peers.sb3_act", str(seconds)))
        ours.append(ask(OUR_PYTHON, "benchmarks.load", "ours", str(seconds)))
    rows = []
    for best, name in ((True, "best"), (False, "sampled")):
        values = [[each[f"act {best}"] for each in side] for side in (ours, peer)]
        rows.append(
            compare(f"one {name} action of CartPole", "µs", "lower", *values, "stable-baselines3", BAR, "ratio")
        )
    for count in ROWS:
        values = [[each[f"{side} {count}"] for each in ours] for side in ("predict", "hand")]
        name = f"predict, {count} row{'s' if count > 1 else ''}"
        rows.append(compare(name, "µs", "lower", *values, "torch by hand", BAR, "ratio"))
    for name, one, other, whose in (
        ("lines to act", OURS_TEXT, SB3_TEXT, "stable-baselines3"),
        ("lines to predict", PREDICT_TEXT, HAND_TEXT, "torch by hand"),
    ):
        counts = [[float(text.count("\n") + 1)] for text in (one, other)]
        rows.append(compare(name, "lines", "lower", *counts, whose, 2, "value", note="without imports"))
    write("load", rows, chosen.results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        print(json.dumps(measure_ours(float(sys.argv[2]))))
    else:
        main()
