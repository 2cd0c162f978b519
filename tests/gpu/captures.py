"""Counts captures of CUDA graphs; on the CPU an eager call into fixed memory stands in for a replay."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from shoal.serve.model import predictor
from shoal.serve.model.formats import cuda_graphs, torch_forward


def count_captures(monkeypatch: pytest.MonkeyPatch, device: str) -> list[int]:
    """Returns a list that gets the rows of each capture's outputs."""
    sizes: list[int] = []
    original = cuda_graphs.capture_graph

    def capture(compute: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        if device != "cpu":
            replay, outputs = original(compute, pool)
        else:
            outputs = compute()

            def replay() -> None:
                outputs.copy_(compute())

        sizes.append(len(outputs))
        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    if device == "cpu":
        monkeypatch.setattr(predictor, "devices", lambda *_: ["cpu"])
        monkeypatch.setattr(torch_forward, "PINNED_BYTES", math.inf)
    return sizes
