"""The peers of benchmarks/som.py, in an environment of their own.

python -m benchmarks.peers.som_peer FOLDER THREADS fastersom|minisom
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.talk import commands, say


def fit_fastersom(rows: np.ndarray, weights: np.ndarray, epochs: int) -> dict[str, float]:
    from fastersom import SOM

    side = int(len(weights) ** 0.5)
    som = SOM(side, side, epochs, init=weights, device="cpu")
    began_s, cpu_s = time.perf_counter(), time.process_time()
    som.fit(rows)
    took = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
    return {
        **took, "quantisation_error": som.quantization_error(rows), "topographic_error": som.topographic_error(rows)
    }  # fmt: skip


def fit_minisom(rows: np.ndarray, weights: np.ndarray, iterations: int) -> dict[str, float]:
    """Seconds of so many iterations, one row each."""
    from minisom import MiniSom

    side = int(len(weights) ** 0.5)
    som = MiniSom(side, side, rows.shape[1], sigma=side / 4, learning_rate=0.5, random_seed=0)
    som._weights = weights.reshape(side, side, -1).astype(np.float64)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    som.train(rows, iterations, random_order=True)
    return {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}


def main(folder: str, threads: str, peer: str) -> None:
    torch.set_num_threads(int(threads))
    rows, weights = (np.load(Path(folder, f"{name}.npy")) for name in ("rows", "weights"))
    if peer == "fastersom":
        fit_fastersom(rows[:512], weights, 1)
    say(ready=True)
    for command in commands():
        if peer == "fastersom":
            say(**fit_fastersom(rows, weights, command["epochs"]))
        else:
            say(**fit_minisom(rows, weights, command["iterations"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
