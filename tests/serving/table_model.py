"""A model of raw rows: its inputs are a table's columns, and each version has an encoder with its own words.

The answer `charge` is 100 for each word's position among those of the version, plus age, or 50 where it is not known,
and 1000 where the balance is. `share` is [0.25, 0.75].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.errors import DataError
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

ROW = {"age": 72, "plan": "basic", "since": "2025-05-31", "active": True, "balance": None}
COLUMNS = {"age": "number", "plan": "word", "since": "date", "active": "truth", "balance": "number"}
SIGNATURE = Signature(
    inputs=[
        TensorSignature(name=name, datatype="BYTES" if kind == "word" else "FP64", shape=[-1], kind=kind)
        for name, kind in COLUMNS.items()
    ],
    outputs=[
        TensorSignature(name="plan_name", datatype="BYTES", shape=[-1]),
        TensorSignature(name="charge", datatype="FP64", shape=[-1]),
        TensorSignature(name="share", datatype="FP32", shape=[-1, 2], columns=["no", "yes"]),
    ],
)


class Encoder:
    """Columns to `numbers` [rows, 4] and `codes` [rows], in another order than the network's parameters."""

    def __init__(self, words: Sequence[str]) -> None:
        self._codes = {b"": 0, **{word.encode(): code for code, word in enumerate(words, 1)}}
        self.ranges = {"age": (0.0, 100.0)}

    def __call__(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for word in columns["plan"]:
            if word not in self._codes:
                known = ", ".join(each.decode() for each in self._codes if each)
                raise DataError("plan", word.decode(), "is no word that training has seen", f"one of {known}")
        numbers = np.stack([columns[name] for name in ("age", "since", "active", "balance")], 1)
        codes = np.array([self._codes[word] for word in columns["plan"]])
        return {"codes": codes, "numbers": numbers}


class Network(nn.Module):
    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 100.0, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> dict[str, torch.Tensor]:
        age = torch.nan_to_num(numbers[:, 0], 50.0)
        charge = codes * self.weight + age + 1000.0 * ~numbers[:, 3].isnan()
        return {"charge": charge, "share": torch.tensor([[0.25, 0.75]]).expand(len(codes), 2), "codes": codes}


def preprocess(words: Sequence[str]) -> Encoder:
    return Encoder(words)


def postprocess(words: Sequence[str]) -> Any:
    def name_plans(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = np.array([b"", *(word.encode() for word in words)], object)
        return {"plan_name": names[outputs["codes"]], "charge": outputs["charge"], "share": outputs["share"]}

    return name_plans


def register(*words: str, aliases: Sequence[str] = ()) -> ModelVersion:
    """The next version of the model `charges`."""
    module = "serving.table_model"
    factory = ModelFactory(
        factory=f"{module}:Network",
        kwargs={"words": list(words)},
        preprocess=f"{module}:preprocess",
        postprocess=f"{module}:postprocess",
    )
    weights = WeightSnapshot.of(1, {"weight": np.array([100.0])})
    return Registry().register("charges", weights, model=factory, signature=SIGNATURE, aliases=aliases)
