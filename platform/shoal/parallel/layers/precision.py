"""Reduced precision: autocast, and the scale that keeps fp16 gradients from vanishing.

Parameters, gradients and the optimiser stay in fp32 in every plan; autocast computes its listed operations in bf16 or
fp16. With `bf16_params` the forward pass also has its weights in bf16, see `spmd.fsdp_options`. Called by every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.errors import PlanError
from shoal.parallel.spec import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_params": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: Precision, device: str) -> None:
    """Raises PlanError when `device` cannot train in this precision."""
    if precision == "fp16" and device != "cuda":
        raise PlanError("parallel.precision", precision, f"is for CUDA, not for {device}", "use bf16 or fp32")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of the forward pass and of the loss."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class LossScale:
    """The factor of an fp16 loss: halved when gradients overflow, doubled after `growth_steps` without.

    Unlike a GradScaler, which skips the step of the optimiser, a plan repeats the step with the smaller factor: the
    Trainer always gets the gradient of the full batch.
    """

    MIN_VALUE = 1.0

    def __init__(self, initial: float = 65536.0, growth_steps: int = 2000) -> None:
        self.value = initial
        self._growth_steps, self._good_steps = growth_steps, 0

    def state_dict(self) -> dict[str, float]:
        """The state for a later attempt, ready for JSON."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    def update(self, is_finite: bool) -> bool:
        """Whether to use the gradients: they are finite, or the factor cannot be lowered."""
        if is_finite:
            self._good_steps += 1
            if self._good_steps == self._growth_steps:
                self.value, self._good_steps = self.value * 2, 0
            return True
        self._good_steps = 0
        if self.value <= self.MIN_VALUE:
            return True
        self.value /= 2
        return False
