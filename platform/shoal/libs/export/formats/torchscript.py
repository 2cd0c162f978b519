"""A TorchScript file (`torch.jit.save`): weights and operations in one file, without their Python code.

Called by the predictor, and by `shoal models add` to check a file. A file has no names and shapes of its tensors: its
signature is registered with it. It is called with its inputs in the signature's order, and its precision is its own.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch

from shoal.errors import WeightsError
from shoal.extend.serve import Forward, TemplateConfig, make_torch_forward
from shoal.weights import WeightSnapshot


class TorchScriptTemplate:
    """Files with one signature, one for each version."""

    def __init__(self, setting: TemplateConfig) -> None:
        self._setting = setting

    def load(self, snapshot: WeightSnapshot) -> Forward:
        module = load_module(snapshot.payload, f"version {snapshot.version}", self._setting.device)
        return make_torch_forward(module, self._setting)


def load_module(payload: bytes, what: str, device: str = "cpu") -> Any:
    """Load a file's module in evaluation mode. Raises WeightsError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", DeprecationWarning)
            module = torch.jit.load(io.BytesIO(payload), map_location=device)
    except (RuntimeError, ValueError) as error:  # of the archive, and of its code
        reason = str(error).partition(". ")[0].splitlines()[0]
        remedy = "write it with torch.jit.save; a state dict is registered with its module, from Python"
        raise WeightsError(f"{what} is not a TorchScript file that this torch can load ({reason}): {remedy}") from error
    return module.eval()
