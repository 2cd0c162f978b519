"""The random states of a process: Python's, NumPy's and torch's, in a form for checkpoints.

Called by the checkpoint manager, and at the start of a run to seed them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Everything that `set_random_state` needs: tensors, numbers and lists."""
    version, numbers, gauss = random.getstate()
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict)
    inner = generator["state"]
    state: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": {
            "generator": generator["bit_generator"],
            "key": torch.from_numpy(np.asarray(inner["key"]).astype(np.int64)),
            "position": int(inner["pos"]),
            "has_gauss": int(generator["has_gauss"]),
            "gauss": float(generator["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random states of `get_random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((int(version), tuple(numbers.tolist()), gauss))
    numpy_state = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy_state["generator"],
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["position"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
