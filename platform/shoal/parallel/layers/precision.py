"""Reduced precision: autocast, and the scale that keeps fp16 gradients from vanishing. And images channels last.

Parameters, gradients and the optimiser stay in fp32 in every plan; autocast computes its listed operations in bf16 or
fp16. With `bf16_params` the forward pass also has its weights in bf16, see `spmd.fsdp_layout`. Called by every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

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


CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def check_channels_last(model: nn.Module) -> None:
    """Raises PlanError unless there is a convolution that supports it."""
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        problem = f"{type(model).__name__} has no convolution of two dimensions"
        raise PlanError("parallel.channels_last", True, problem, "leave it out")


def use_channels_last(model: nn.Module) -> None:
    """Let each convolution read its images channels last; the layers that follow keep the format of their input."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            module.register_forward_pre_hook(_convert_images)


def _convert_images(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *others = inputs
    if images.ndim == 3 or images.stride(1) == 1:  # one image without [B]; or already channels last
        return inputs
    # Not `contiguous`: an image of one channel is channels last in any case, and convolutions decide by strides.
    return images.clone(memory_format=torch.channels_last), *others
