"""The tensors of a version in torch, each in memory of its own.

Called where a network is filled. A file is read once: neither its bytes nor a mapping are copied on the way, and its
hash, where it was not verified before, is computed of the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import WeightsError
from shoal.weights.store import REMEDY, WeightFile, WeightPart, WeightSnapshot


def read_tensors(snapshot: WeightSnapshot) -> dict[str, Tensor]:
    """The tensors by name; they share memory with nothing. Raises WeightsError when checksum or format do not fit."""
    try:
        if isinstance(snapshot, WeightFile):
            return _read_file(snapshot)
        snapshot.verify()
        return dict(safetensors.torch.load(snapshot.payload))
    except OSError as error:
        raise WeightsError(f"weights version {snapshot.version} cannot be read ({error}): {REMEDY}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        snapshot.verify()
        raise WeightsError(f"weights version {snapshot.version} are not safetensors: {error}") from None


def _read_file(file: WeightFile) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in file.parts:
        found |= _read_part(file, part)
    return found


def _read_part(file: WeightFile, part: WeightPart) -> dict[str, Tensor]:
    """A mapping of the file says which tensors there are. It is not read: in it they are misaligned, which changes the
    last digits of products."""
    path, digest = file.find(part), hashlib.sha256()
    mapped = safetensors.torch.load_file(path)
    found: dict[str, Tensor] = {}
    with path.open("rb") as opened:
        size = opened.read(8)
        header = opened.read(int.from_bytes(size, "little"))
        digest.update(size + header)
        described = json.loads(header)
        for name in sorted(mapped, key=lambda name: described[name]["data_offsets"]):
            found[name] = torch.empty_like(mapped[name])
            payload: Any = found[name].reshape(-1).view(torch.uint8).numpy()
            if opened.readinto(payload) != payload.nbytes:
                raise WeightsError(f"{path} was cut off while it was read")
            if not file.is_verified:
                digest.update(payload)
    if not file.is_verified and digest.hexdigest() != part.sha256:
        raise file.describe_damage(part.path)
    return found
