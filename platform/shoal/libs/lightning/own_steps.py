"""Steps that a module takes itself: manual optimization, and a step of which it overrides a part.

Owns `self.trainer.strategy`: what `self.optimizers()`, `self.manual_backward` and their like ask of Lightning's
trainer. Called by `LightningEvents`, and by the module. One process, without accumulation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shoal.errors import ConfigError
from shoal.extend.train import RunFacts, list_parameters
from shoal.libs.lightning.hooks import OF_STEP, is_overridden
from shoal.libs.lightning.logs import average_over_ranks
from shoal.libs.lightning.trainer_view import TrainerView


def takes_own_steps(module: Any, run: RunFacts) -> bool:
    """Whether the module takes its steps itself, rather than returning losses. Raises ConfigError for a run that would
    change such steps."""
    parts = ["manual optimization"] if not module.automatic_optimization else []
    parts += [name for name in OF_STEP for each in (module, *module.trainer.callbacks) if is_overridden(each, name)]
    is_clipped = run.clip_norm is not None and not module.automatic_optimization
    if parts and (run.num_ranks > 1 or run.accumulate > 1 or is_clipped):
        problem = f"takes its steps itself ({parts[0]}): not with several workers, accumulate, or clip_norm if manual"
        remedy = "use workers=1, and accumulate and clip in it; or write a Task with `optimizers` and a `train_step`"
        raise ConfigError("task", type(module).__name__, problem, remedy)
    return bool(parts)


class Strategy:
    """What the methods of a LightningModule use of `self.trainer.strategy`.

    loss:      the sum of those with a backward pass since the step of the run began
    num_steps: of all optimizers, over all attempts of the run
    gradients: of the newest step
    """

    def __init__(self, view: TrainerView, call: Callable[..., None]) -> None:
        self._view, self._call = view, call
        self._lightning_optimizers: list[Any] = []
        self.loss = torch.zeros(())
        self.num_steps = 0
        self.gradients: list[Tensor | None] = []

    def configure(self, returned: Any) -> None:
        """Note the optimizers and schedules, of any form that `configure_optimizers` may return: by Lightning's own
        code, which raises errors of its own."""
        view, module = self._view, self.lightning_module
        [base] = [each for each in type(module).__mro__ if each.__name__ == "LightningModule"]
        lightning: Any = sys.modules[base.__module__.replace("core.module", "core.optimizer")]
        if returned is None:
            return
        view.optimizers, schedulers, monitor = lightning._configure_optimizers(returned)
        lightning._validate_multiple_optimizers_support(view.optimizers, module)
        self._lightning_optimizers = [lightning.LightningOptimizer(each) for each in view.optimizers]
        for each in self._lightning_optimizers:
            each._strategy = self
        if module.automatic_optimization:
            view.lr_scheduler_configs = lightning._configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            view.lr_scheduler_configs = lightning._configure_schedulers_manual_opt(schedulers)

    @property
    def lightning_module(self) -> Any:
        return self._view.lightning_module

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Of `manual_backward`, and of each loss that a training_step returns."""
        self._call("on_before_backward", loss)
        self.lightning_module.backward(loss, *args, **kwargs)
        self._call("on_after_backward")
        self.loss = self.loss + loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
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

    def clip_gradients(self, optimizer: Any, clip_val: float, gradient_clip_algorithm: str) -> None:
        """Of `self.clip_gradients`."""
        parameters = list_parameters(optimizer)
        if clip_val > 0:
            (clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_)(parameters, clip_val)

    def exchange_gradients(self) -> None:
        """Put back the gradients of the newest step, and keep the present ones: a run has none between its steps."""
        parameters = list(self.lightning_module.parameters())
        before = self.gradients or [None] * len(parameters)
        self.gradients = [each.grad for each in parameters]
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        """Of EarlyStopping. Collective."""
        share = average_over_ranks({"": (float(decision), 1.0)}, self._view.world_size)[""]
        return share == 1.0 if all else share > 0.0
