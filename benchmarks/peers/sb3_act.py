"""Stable-baselines3: what one call of a loaded policy's `predict` takes, in microseconds, as the last line's JSON.

python -m benchmarks.peers.sb3_act SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import timeit
from collections.abc import Callable
from typing import Any

SB3_TEXT = "model = PPO.load(path)\naction, _ = model.predict(observation, deterministic={best})"


def measure(call: Callable[[], object], seconds: float) -> float:
    """Microseconds of one call: the median of nine rounds."""
    call()
    timer = timeit.Timer(call)
    number = max(1, int(seconds / 9 / (timer.timeit(20) / 20)))
    return 1e6 * sorted(timer.repeat(9, number))[4] / number


def measure_sb3(seconds: float) -> dict[str, float]:
    import numpy as np
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    path = os.path.join(tempfile.mkdtemp(), "policy")
    PPO("MlpPolicy", "CartPole-v1", device="cpu").save(path)
    observation, found = np.array([0.1, 0.2, 0.03, -0.4], np.float32), {}
    for best in (True, False):
        names: dict[str, Any] = {"PPO": PPO, "path": path, "observation": observation}
        exec(SB3_TEXT.format(best=best), names)
        found[f"act {best}"] = measure(lambda: names["model"].predict(observation, deterministic=best), seconds)  # noqa: B023
    return found


if __name__ == "__main__":
    print(json.dumps(measure_sb3(float(sys.argv[1]))))
