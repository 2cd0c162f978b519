"""What `shoal serve deploy` says to type first."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.cli.display.serve_display import suggest_predict_command
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([("x", "FP32", [-1, 4])], "--input 0,0,0,0"),
        ([("x", "FP32", [-1])], "--input 0"),
        ([("tokens", "INT64", [-1, -1])], "--input 0,0,0"),
        ([("text", "BYTES", [-1])], "--input 'a text'"),
        ([("a", "FP32", [-1, 2]), ("b", "INT64", [-1])], "--input a=0,0 --input b=0"),
        ([("image", "FP32", [-1, 1, 28, 28])], "--image FILE"),
        ([("image", "UINT8", [-1, 32, 32, 3])], "--image FILE"),
        ([("x", "FP32", [-1, 1, 2, 2])], "--help"),
        ([("x", "FP32", [-1, 20])], "--help"),
        ([("x", "FP32", [-1, 8, 8])], "--help"),
        ([("words", "BYTES", [-1, 2])], "--help"),
    ],
)
def test_what_to_ask_first_can_be_typed_as_it_stands(inputs: list[tuple[str, str, list[int]]], words: str) -> None:
    tensors = [TensorSignature(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs]
    version = Registry().register(
        "m",
        WeightSnapshot.of(1, {"weight": np.zeros(1, np.float32)}),
        model=ModelFactory(factory="mine:clean"),
        signature=Signature(inputs=tensors, outputs=tensors),
    )
    assert suggest_predict_command(version) == f"shoal predict m {words}"
