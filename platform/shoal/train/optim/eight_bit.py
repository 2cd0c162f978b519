"""Adam with states of eight bits in blocks of 256 values, by torchao (arXiv:2110.02861): 2 bytes a parameter, not 8.

Called by `optimizers`. A checkpoint has the states in fp32, see `parallel.state.state_dict`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.errors import needs_extra


def make_8bit_optimizer(name: str, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> Optimizer:
    """`adam_8bit` or `adamw_8bit`. Tensors of less than 4096 values on this rank keep states of their own type.

    torchao compiles a step for each shape of a parameter. On the CPU that takes longer than the steps it saves, so they
    run eagerly there. Raises MissingExtra without torchao.
    """
    log = logging.getLogger("torchao")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each of its extensions that does not fit this torch
    try:
        with needs_extra("torchao"):
            from torchao.optim import Adam8bit, AdamW8bit
    finally:
        log.setLevel(level)
    kind: type[Optimizer] = AdamW8bit if name == "adamw_8bit" else Adam8bit
    if any(each.device.type != "cpu" for group in groups for each in group["params"]):
        return kind(groups, **settings)
    return _make_eager(kind)(groups, **settings)


def _make_eager(kind: type[Optimizer]) -> type[Optimizer]:
    def step(self: Optimizer, closure: None = None) -> None:
        with torch.compiler.set_stance("force_eager"):
            kind.step(self)

    return type(f"Eager{kind.__name__}", (kind,), {"step": step})
