"""The network of `many_models`, and its weights as files: for our endpoint's process and the peer's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

NUM_FEATURES, NUM_HIDDEN = 16, 1024


class Wide(nn.Module):
    """x [B, 16] to y [B, 1]; 4 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_HIDDEN), nn.ReLU(),
            nn.Linear(NUM_HIDDEN, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def name_of(number: int) -> str:
    return f"m{number:03}"


def save(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    torch.save(Wide().state_dict(), folder / f"{name_of(number)}.pt")


def load(folder: Path, name: str) -> Wide:
    model = Wide()
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    return model.eval()
