"""The model of the endpoint's benchmarks, the request for it, and how an answer is checked. Needs torch and no more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

SMALL = (64, 256, 10)
ONE_MEGABYTE = (64, 460, 460, 10)  # 1.0 MB of float32


def mlp(sizes: Sequence[int] = SMALL) -> nn.Sequential:
    """Linear layers of these sizes with ReLU in between."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def request_body(size: int = SMALL[0]) -> bytes:
    """One row, as the Open Inference Protocol writes it; every server gets the same bytes."""
    values = [round(0.01 * (index % 100) - 0.5, 2) for index in range(size)]
    tensor = {"name": "x", "shape": [1, size], "datatype": "FP32", "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


def answer_of(rows: Sequence[float]) -> dict[str, object]:
    """What a peer answers for one row: the same fields as the protocol has."""
    output = {"name": "y", "shape": [1, len(rows)], "datatype": "FP32", "data": list(rows)}
    return {"model_name": "mlp", "model_version": "1", "outputs": [output]}
