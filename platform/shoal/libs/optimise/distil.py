"""Distillation (arXiv:1503.02531) as a Task: a student learns the answers of a registered teacher, and the labels.

Owns the Task, which is trained as any other, and its loss. Called by `search`; a run of it can be resumed.
Legend: B samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.extend.parallel import Loss, Mean
from shoal.extend.registry import ModelFactory, Registry
from shoal.extend.train import Task, make_task
from shoal.libs.optimise.entry import build_module, build_network, read_payload


class Distillation(Task):
    """The Task of the teacher, with a student in its place.

    task, args:  of the Task that has the data and the loss
    teacher:     NAME@VERSION of the registry
    student:     the fields of a ModelFactory
    temperature: by which the logits of both are divided, where the answers are classes
    weight:      of the teacher's answers; the rest is the weight of the Task's own loss
    """

    def __init__(
        self,
        *,
        task: str,
        args: Mapping[str, Any],
        teacher: str,
        student: Mapping[str, Any],
        temperature: float = 2.0,
        weight: float = 0.7,
    ) -> None:
        self._task = make_task(task, args)
        self._teacher_ref, self._student = teacher, ModelFactory.parse(student)
        self._temperature, self._weight = temperature, weight
        self.preprocess, self.postprocess = self._task.preprocess, self._task.postprocess

    @cached_property
    def _teacher(self) -> nn.Module:
        version = Registry().get(self._teacher_ref)
        return build_network(version.manifest.model, read_payload(version.snapshot()))

    def train_step(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        """The weighted sum of both losses; the teacher's is logged as train/distillation."""
        inputs = self.inputs(batch)
        outputs = model(*inputs)
        if (device := next((each.device for each in inputs if isinstance(each, Tensor)), None)) is not None:
            self._teacher.to(device)
        with torch.no_grad():
            answers = self._teacher(*inputs)
        distilled = compute_distillation_loss(outputs, answers, get_targets(batch), self._temperature)
        loss = self._task.loss(outputs, batch)
        own = 1 - self._weight
        if isinstance(loss, Mean):
            total: Loss = Mean(own * loss.total + self._weight * distilled * loss.count, loss.count)
        else:
            total = own * loss + self._weight * distilled
        return {"loss": total, "distillation": distilled}

    def model(self) -> nn.Module:
        return build_module(self._student)


def _ask_task(method: str) -> Callable[..., Any]:
    def call(self: Distillation, *args: Any) -> Any:
        return getattr(self._task, method)(*args)

    return call


# All else is as the teacher's Task has it.
for _method in (
    "data",
    "loss",
    "inputs",
    "metrics",
    "optimizer",
    "augmentations",
    "stateful_metrics",
    "update_metric",
    "callbacks",
    "signature",
):
    setattr(Distillation, _method, _ask_task(_method))


def get_targets(batch: Any) -> Tensor | None:
    """A batch's labels: the last of a tuple, or `batch["targets"]`."""
    targets = batch.get("targets") if isinstance(batch, Mapping) else batch
    targets = targets[-1] if isinstance(targets, tuple | list) else targets
    return targets if isinstance(targets, Tensor) else None


def compute_distillation_loss(outputs: Any, answers: Any, targets: Tensor | None, temperature: float) -> Tensor:
    """Scalar: of classes the divergence of the softened distributions times the squared temperature, so that its
    gradients keep their size (equation 1 ff.); of other numbers the mean squared difference. Several outputs add up.
    """
    pairs = list(zip(list_tensors(outputs), list_tensors(answers), strict=True))
    total = torch.zeros((), device=pairs[0][0].device)
    for mine, theirs in pairs:
        axis = find_class_axis(mine, targets)
        if axis is None:
            total = total + nn.functional.mse_loss(mine.float(), theirs.float())
            continue
        mine_log, theirs_log = (
            (each.float() / temperature).movedim(axis, -1).flatten(0, -2).log_softmax(-1)  # [B, C]
            for each in (mine, theirs)
        )
        divergence = nn.functional.kl_div(mine_log, theirs_log, reduction="batchmean", log_target=True)
        total = total + temperature**2 * divergence
    return total


def find_class_axis(outputs: Tensor, targets: Tensor | None) -> int | None:
    """Along which dimension the outputs are logits of classes, by integer labels that lack it; None: they are none.

    A single logit is none either: its softmax is 1. Labels of text may be longer by a token, since its inputs are in
    the same tensor.
    """
    if targets is None or targets.is_floating_point() or not 1 <= targets.ndim == outputs.ndim - 1:
        return None
    is_first = outputs.movedim(1, -1).shape[:-1] == targets.shape  # as nn.CrossEntropyLoss has them
    axis = 1 if is_first and (outputs.ndim > 3 or outputs.shape[:-1] != targets.shape) else -1
    return axis if outputs.shape[axis] > 1 else None


def list_tensors(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of a network's outputs. Raises ConfigError for outputs without any."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    every = [values] if isinstance(values, Tensor) else list(values)
    tensors = [each for each in every if isinstance(each, Tensor) and each.is_floating_point()]
    if not tensors:
        remedy = "let it return a tensor of numbers, or a tuple or dict with some"
        raise ConfigError("task", type(outputs).__name__, "of the network is nothing to learn from", remedy)
    return tensors
