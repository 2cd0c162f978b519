"""Reads the tensor-parallel plan that a model of transformers brings: `base_model_tp_plan` of its configuration.

Called by `plan`, which verifies it. Loads nothing of transformers: the plan is an attribute of the model.
"""

from __future__ import annotations

from torch import nn

# Styles of transformers (5.23, `transformers.distributed.tensor_parallel`), and ours. Its styles for experts and packed
# parameters are of no layers of torch: such modules stay unsplit. What it does for normalisations of heads is seen in
# the trace of the model.
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocabulary",
}


def read_model_plan(model: nn.Module) -> dict[str, str]:
    """{pattern of names: style}, as `Task.tensor_plan` gives it; {} for a model without a plan."""
    plans = {f"{name}.": getattr(module, "_tp_plan", None) for name, module in model.named_modules()}
    name, plan = next(((name, plan) for name, plan in plans.items() if isinstance(plan, dict) and plan), ("", {}))
    return {f"{name.removeprefix('.')}{pattern}": _STYLES[style] for pattern, style in plan.items() if style in _STYLES}
