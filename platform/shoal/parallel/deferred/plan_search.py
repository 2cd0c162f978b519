"""Finds the plan for a model whose parameters have no memory: it runs with arbitrary values meanwhile.

Called by plans that try a model before they split it. Where the trial fails, each rank gets the full weights first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from shoal.errors import summarize_error
from shoal.parallel.comm.world import World
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.state.module_snapshot import preserve_module
from shoal.parallel.state.skeleton import lend_values
from shoal.random_state import preserve_rng

T = TypeVar("T")


def decide_plan(
    find: Callable[[], T], model: nn.Module, deferred: DeferredWeights | None, world: World, device: torch.device
) -> T:
    """What `find` returns on rank 0, on every rank. Collective. Raises its PlanError, on every rank.

    A plan follows from what a model does with values, not from the values: arbitrary ones stand in for those of
    `deferred`. If `find` fails with them, each rank fills the whole model, and `deferred` has the reason.
    """
    if deferred is not None and not deferred.is_filled:
        found, reason = world.broadcast(_try_without_weights(find, model, device) if world.is_first else (None, ""))
        if found is not None:
            return found
        deferred.fill(model, device)
        deferred.eager_reason = f"its plan is not found without its weights: {reason}"
    return world.decide(find)


def _try_without_weights(find: Callable[[], T], model: nn.Module, device: torch.device) -> tuple[T | None, str]:
    """What `find` returns; or None, and why not."""
    try:
        with lend_values(model, device), preserve_module(model), preserve_rng():
            return find(), ""
    except Exception as error:  # noqa: BLE001 - any error of the user's module, which may need its own values
        return None, summarize_error(error)
