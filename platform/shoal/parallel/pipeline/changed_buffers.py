"""Which parts of a pass change a model's buffers: what one of them holds can lie with a single stage only.

Called by `pipeline_layout`. Leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.pipeline.split_points import Cut, Survey, undisturbed


def changed_buffers(model: nn.Module, run: Callable[[], Tensor], cuts: Sequence[Cut]) -> dict[str, list[int]]:
    """The parts between the cuts in which a buffer gets another value, by its name; others are not listed.

    run: one pass, with the modules in their own modes
    """
    changing = _changed(model, run, {name for name, _ in model.named_buffers()}, [])
    return _changed(model, run, set(changing), cuts) if changing else {}


def _changed(model: nn.Module, run: Callable[[], Tensor], names: set[str], cuts: Sequence[Cut]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    places = {cut.call for cut in cuts}
    part = num_calls = 0
    values = {name: buffer.clone() for name, buffer in model.named_buffers() if name in names}

    def look() -> None:
        for name, buffer in model.named_buffers():
            if name in values and not _are_equal(values[name], buffer):
                found.setdefault(name, []).append(part)
                values[name] = buffer.clone()

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal part, num_calls
        if num_calls in places:
            look()
            part += 1
        num_calls += 1

    with undisturbed(model), torch.enable_grad():
        handles = [module.register_forward_pre_hook(enter) for module in model.modules()]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        look()
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is as it was, too


def parted(found: Survey, stages: Sequence[int], cuts: Sequence[Cut]) -> tuple[Cut, PlanError] | None:
    """The first cut found between two stages that would change the same buffer, or of which one keeps it; and what to
    say of it. None when each buffer is its stage's own.

    stages: of each part
    """
    for name, parts in found.changed.items():
        users = sorted({stages[part] for part in [*parts, found.buffers[name]]})
        if len(users) > 1:
            problem = f"the buffer {name} would be changed by stage {users[1]}, too, and lie with stage {users[0]}"
            remedy = "cut where no layer with such a buffer is called on both sides, or use ddp or fsdp"
            cut = cuts[users[1] - 1]
            return cut, PlanError("parallel.pipeline", cut.module, problem, remedy)
    return None
