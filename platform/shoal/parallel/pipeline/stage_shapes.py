"""The schedules of a pipeline by the form of their micro-batches, of which the newest are kept.

Called by `pipeline`. Knows nothing of what a schedule does; makes none.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from shoal.batch_tree import tensors_of
from shoal.parallel.layers.batch_norm import DataRanks

NUM_KEPT = 32  # each has memory for what its stages are handed, of all micro-batches

Form = tuple[tuple[torch.Size, torch.dtype], ...]


def form_of(batch: Any) -> Form:
    """Shapes and types: what a schedule is made for."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(batch))


class Schedules:
    """Each with what its stages hand on, by stage. The ranks of one pipeline, which see the same forms, keep the same.

    ranks: data ranks that gather one another's parameters, and must run the model equally often; None where they do not
    """

    def __init__(self, ranks: DataRanks | None, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._kept: OrderedDict[Form, tuple[Any, dict[int, Tensor]]] = OrderedDict()

    def __contains__(self, form: Form) -> bool:
        return form in self._kept

    def must_try(self, form: Form) -> bool:
        """Whether one of the data ranks has no schedule for what it is given, here of this form. Collective."""
        is_new = form not in self._kept
        if self._ranks is None:
            return is_new
        return bool(self._ranks.gather(torch.tensor([is_new], device=self._ranks.told_on(self._device))).any())

    def keep(self, form: Form, schedule: Any, handed: dict[int, Tensor]) -> None:
        """In place of the one that was not used for longest, where there are too many."""
        self._kept[form] = schedule, handed
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)

    def get(self, form: Form) -> tuple[Any, dict[int, Tensor]]:
        """The schedule, and what its stages hand on. It must be kept."""
        self._kept.move_to_end(form)
        return self._kept[form]

    def clear(self) -> None:
        """Let all of them go."""
        self._kept.clear()
