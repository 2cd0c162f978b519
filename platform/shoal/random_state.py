"""The random states of a process, Python's, NumPy's and torch's: seed, save, restore and preserve them.

Called by a run at its start, by its checkpoints, by the readers of data and by trials of a model. Imports nothing of
Shoal.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_all(seed: int, epoch: int, index: int) -> None:
    """Seed torch, `random` and NumPy for a dataset. Takes 10 µs."""
    digest = hashlib.blake2b(b"%d %d %d" % (seed, epoch, index), digest_size=12).digest()
    words = struct.unpack("<III", digest)
    torch.default_generator.manual_seed(words[0])
    random.seed(words[1])
    np.random.seed(words[2])


@contextmanager
def preserve_rng(seed: int | None = None, *, has_cuda: bool = True) -> Iterator[None]:
    """Numbers drawn within leave the random states as they were. Within, they begin at `seed`, if one is given.

    has_cuda: whether the states of CUDA devices are preserved, too. It starts CUDA, which a forked process must not.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if has_cuda else ()):
        try:
            if seed is not None:
                seed_everything(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


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
