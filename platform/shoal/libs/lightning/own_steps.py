"""Steps that a module takes itself: manual optimization, and a step of which it overrides a part.

Owns `self.trainer.strategy`: what `self.optimizers()`, `self.manual_backward` and their like ask of Lightning's
trainer. Called by `LightningEvents`, and by the module. One process, without accumulation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.extend.train import RunFacts
from shoal.libs.lightning.hooks import OF_STEP, is_overridden
from shoal.libs.lightning.logs import average_over_ranks
from shoal.libs.lightning.trainer_view import TrainerView, make_error


def takes_own_steps(module: Any) -> bool:
    """Whether the module takes its steps itself, rather than returning losses."""
    return not module.automatic_optimization or any(is_overridden(module, name) for name in OF_STEP)


def check_own_steps(module: Any, run: RunFacts) -> None:
    """Raises ConfigError for a run that would change the steps of such a module."""
    which = next((name for name in OF_STEP if is_overridden(module, name)), "manual optimization")
    why = f"{type(module).__name__} takes its steps itself ({which})"
    remedy = "write a Task with `optimizers` and a `train_step` that yields, for several workers"
    if run.num_ranks > 1:
        raise ConfigError("workers", run.num_ranks, why, f"use workers=1, or {remedy}")
    if run.accumulate > 1:
        raise ConfigError("parallel.accumulate", run.accumulate, why, "leave it out, and accumulate in training_step")
    if run.clip_norm is not None and not module.automatic_optimization:
        raise ConfigError("clip_norm", run.clip_norm, why, "call self.clip_gradients in training_step")


class Strategy:
    """What the methods of a LightningModule use of `self.trainer.strategy`.

    losses:    of the backward passes since the step of the run began
    num_steps: of all optimizers, over all attempts of the run
    gradients: of the newest step
    """

    def __init__(self, view: TrainerView, call: Callable[..., None]) -> None:
        self._view, self._call = view, call
        self._lightning_optimizers: list[Any] = []
        self.losses: list[Tensor] = []
        self.num_steps = 0
        self.gradients: list[Tensor | None] = []

    def wrap(self, optimizers: Iterable[Optimizer]) -> None:
        """Let `self.optimizers()` give these, in Lightning's own class."""
        [base] = [each for each in type(self.lightning_module).__mro__ if each.__name__ == "LightningModule"]
        self._lightning_optimizers = [
            vars(sys.modules[base.__module__])["LightningOptimizer"](each) for each in optimizers
        ]
        for each in self._lightning_optimizers:
            each._strategy = self

    @property
    def lightning_module(self) -> Any:
        return self._view.lightning_module

    @property
    def root_device(self) -> Any:
        return self.lightning_module.device

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Of `manual_backward`, and of each loss that a training_step returns."""
        self._call("on_before_backward", loss)
        self.lightning_module.backward(loss, *args, **kwargs)
        self._call("on_after_backward")
        self.losses.append(loss.detach())

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Of `self.optimizers().step()`."""
        module = self.lightning_module

        def compute() -> Any:
            result = closure()
            self._call("on_before_optimizer_step", optimizer)
            if module.automatic_optimization:
                limit = self._view.gradient_clip_val
                module.configure_gradient_clipping(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=None)
            return result

        result = optimizer.step(closure=compute, **kwargs)
        self.num_steps += 1
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Of `self.clip_gradients`."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if clip_val > 0:
            (clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_)(parameters, clip_val)

    def exchange_gradients(self) -> None:
        """Put back the gradients of the newest step, and keep the present ones: a run has none between its steps."""
        parameters = list(self.lightning_module.parameters())
        before = self.gradients or [None] * len(parameters)
        self.gradients = [each.grad for each in parameters]
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Of EarlyStopping. Collective."""
        share = average_over_ranks({"": (float(decision), 1.0)}, self._view.world_size)[""]
        return share == 1.0 if all else share > 0.0

    def __getattr__(self, name: str) -> Any:
        raise make_error("self.trainer.strategy", name, "leave it to the run")
