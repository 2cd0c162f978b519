"""Models that are exported, and the ways to register and export them. `from libs.export.exported import ...`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from registered import arrays_of, tensors
from shoal.libs.export.export_model import ExportReport, ExportSpec, export_model
from shoal.registry import ModelFactory, Registry, Signature
from shoal.weights import WeightSnapshot

INFER = "/v2/models/pair/infer"
SIGNATURE = Signature(
    inputs=tensors(left=[-1, -1, 3], right=[-1, 3]),
    outputs=tensors(y=[-1, -1, 2], label=("INT64", [-1, -1])),
)


class Pair(nn.Module):
    """Of any length; gives a dict in another order, and without dropout what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.dropout(self.linear(left - right[:, None]))
        return {"label": y.argmax(-1), "y": y}


class Scripted(Pair):
    """Gives a tuple in the signature's order."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = self.dropout(self.linear(left - right[:, None]))
        return y, y.argmax(-1)


class ByName(Pair):
    def predict(self, right: torch.Tensor, left: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.forward(left, right)


class Narrow(Pair):
    """Computes in bfloat16, as a version that was made smaller."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = super().forward(left, right)
        return {name: each.float() if name == "y" else each for name, each in found.items()}


class Bessel(Pair):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.special.i1(self.linear(left)), "label": left.argmax(-1)}


class BranchesOnSize(Pair):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(left if len(left) > 1 else left + 1, right)


class SmallIds(nn.Module):
    """Fails on the ones of generated examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)


class Transposed(nn.Module):
    """Rows are columns of `state`; `rate` is equal for all."""

    def forward(self, state: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return state.cumsum(0) * rate[0]


TRANSPOSED = Signature(
    inputs=tensors(state=[3, -1], rate=[1]),
    outputs=tensors(y=[3, -1]),
)

IDS = Signature(
    inputs=tensors(ids=("INT64", [-1, 4])),
    outputs=tensors(y=[-1, 4, 2]),
)


def register(
    module: nn.Module,
    name: str = "pair",
    signature: Signature = SIGNATURE,
    lineage: dict[str, object] | None = None,
    **model: Any,
) -> None:
    factory = {"factory": f"{__name__}:{type(module).__name__}", **model}
    state = arrays_of(module)
    made = ModelFactory(**factory)
    Registry().register(name, WeightSnapshot.of(1, state), model=made, signature=signature, lineage=lineage)


def register_file(payload: bytes, kind: str, name: str = "pair", signature: Signature = SIGNATURE) -> None:
    snapshot = WeightSnapshot.from_payload(1, payload)
    Registry().register(name, snapshot, model=ModelFactory(format=kind), signature=signature)


def write(into: Path = Path("out"), to: str = "container", model: str = "pair", **fields: Any) -> ExportReport:
    return export_model(ExportSpec.parse({"model": model, "to": to, "into": str(into), **fields}))


def request(rows: int, length: int, seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    shapes = {"left": [rows, length, 3], "right": [rows, 3]}
    return {
        "id": f"{rows} by {length}",
        "inputs": [
            {"name": name, "shape": shape, "datatype": "FP32", "data": generator.random(shape, np.float32).tolist()}
            for name, shape in shapes.items()
        ],
    }


def export_pair(folder: Path) -> Path:
    """The folder of a `Pair`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(folder / "home"))
        register(Pair())
        write(folder / "out")
    return folder / "out"
