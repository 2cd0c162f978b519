"""Steps that a Task defines itself, by its `train_step`: one loss, named losses, or a loss for each optimiser in turn.

Owns what such a step may return. Called by `SpmdModel`, and by what runs a model before training. Computes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.loss import LOSS, Loss, get_value, require_loss

StepResult = Loss | Mapping[str, Loss] | Iterator[tuple[str, Loss]]
TrainStep = Callable[[nn.Module, Any], StepResult]
EvalStep = Callable[[nn.Module, Any], dict[str, Loss]]
FIELD = "Task.train_step"


def get_train_step(learnable: object) -> TrainStep | None:
    """The Task's own `train_step`; None: its step is `loss` of the model's outputs."""
    return getattr(learnable, "train_step", None)


def split_losses(result: StepResult) -> tuple[Loss, dict[str, Loss]]:
    """The loss of a step without phases, and the others by name. Raises ConfigError."""
    if isinstance(result, Mapping):
        if LOSS not in result:
            raise _make_step_error(f"gave {', '.join(map(str, result)) or 'nothing'}", f"name one of them {LOSS!r}")
        named = {name: require_loss(value, FIELD) for name, value in result.items() if name != LOSS}
        return require_loss(result[LOSS], FIELD), named
    if isinstance(result, Iterator):
        raise _make_step_error("yields losses for several optimizers", "write Task.optimizers(model)")
    return require_loss(result, FIELD), {}


def begin_phases(result: StepResult) -> Iterator[tuple[str, Loss]]:
    """A step of several optimizers. Raises ConfigError for one that returns its loss."""
    if not isinstance(result, Iterator):
        raise _make_step_error("returned a loss for several optimizers", "write `yield name, loss` for each of them")
    return result


def next_phase(phases: Iterator[tuple[str, Loss]], name: str | None) -> tuple[str, Loss] | None:
    """The next (optimizer, loss) of a step over one micro-batch; None at its end.

    name: of the optimizer that the first micro-batch gave for this phase; None: this is the first

    Raises ConfigError when micro-batches differ in their phases.
    """
    result = next(phases, None)
    if name is not None and (result is None or result[0] != name):
        raise _make_step_error("yields other optimizers for some micro-batches", "yield the same ones for each batch")
    return None if result is None else (result[0], require_loss(result[1], FIELD))


def get_phase_parameters(parameters: Mapping[str, list[nn.Parameter]], name: str) -> list[nn.Parameter]:
    """Those of the optimizer `name`. Raises ConfigError."""
    if name not in parameters:
        raise _make_step_error(f"yielded {name!r}", f"Task.optimizers has {', '.join(parameters)}")
    return parameters[name]


def sum_losses(result: StepResult) -> Tensor:
    """All losses that are optimised in a step, added up: for a trial without any optimiser."""
    if isinstance(result, Iterator):
        return torch.stack([get_value(require_loss(loss, FIELD)) for _, loss in result]).sum()
    return get_value(split_losses(result)[0])


def _make_step_error(problem: str, remedy: str) -> ConfigError:
    return ConfigError("task", "train_step", problem, remedy)
