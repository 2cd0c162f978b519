"""What a shadow calls another answer: numbers by their values, whatever holds them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from gated_forward import run, until
from shoal.open_inference.datatypes import NUMPY, bf16_bits
from shoal.serve.batcher import Batcher
from shoal.serve.call import Arrays, InferCall
from shoal.serve.metrics import ModelStatistics
from shoal.serve.options import GuardOptions, ModelOptions
from shoal.serve.shadow import Answer, Shadow
from shoal.serve.versions import Track

TOLERANCE = 0.01


def array(datatype: str, values: Sequence[object]) -> np.ndarray:
    return bf16_bits(np.array(values, np.float32)) if datatype == "BF16" else np.array(values, NUMPY[datatype])


@pytest.mark.parametrize(
    ("datatype", "stable", "candidate", "differs"),
    [
        ("BF16", [1.0, -2.0], [1.0078125, -2.015625], False),  # the next numbers that there are
        ("BF16", [1.0, -2.0], [1.03125, -2.0], True),
        ("BF16", [0.0, np.nan], [-0.0, np.nan], False),
        ("FP32", [1.0, np.nan], [1.005, np.nan], False),
        ("FP16", [1.0], [1.05], True),
        ("UINT16", [1000], [1001], True),
        ("INT64", [7, 8], [7, 8], False),
        ("BYTES", [b"shoe"], [b"hat"], True),
    ],
)
def test_answers_differ_by_more_than_the_tolerance(
    datatype: str, stable: list[object], candidate: list[object], differs: bool
) -> None:
    def forward(group: Hashable, requests: Sequence[Arrays]) -> list[Answer]:
        return [({"y": array(datatype, candidate)}, 2) for _ in requests]

    async def body() -> None:
        batcher: Batcher[Arrays, Answer] = Batcher()
        counts = ModelStatistics("m")
        options = ModelOptions(guard=GuardOptions(tolerance=TOLERANCE))
        shadow = Shadow("m", batcher, forward, options, counts, {"y": datatype})
        shadow.set(Track(SimpleNamespace(version=2)), 100.0)  # type: ignore[arg-type]
        shadow.consider(InferCall({}, 1), {"y": array(datatype, stable)}, None)
        await until(lambda: "2" in counts.snapshot()["versions"])
        shadow.close()
        batcher.close()
        version = counts.snapshot()["versions"]["2"]
        assert (version["compared"], version["disagreed"]) == (1, differs)

    run(body)
