"""Chooses the layers that tensor ranks split, by tracing a model, and verifies each choice.

Linear layers that read one tensor (q, k, v; gate and up) followed by another (o; down) form a pair: the first are split
by columns, the second by rows, and operations between them work on a part of the features. A trial shows whether they
may: the module with the pair runs on each part alone, and the parts that reach the second layer must be those of its
full input. Nothing between them may be drawn at random or be used elsewhere: each rank would have that of its part
alone. Parameters between them (a normalisation of heads) get the sum of all parts' gradients. Layers that fail stay
unsplit, with the reason. A model of transformers has a plan of its own (`base_model_tp_plan`), which is verified in the
same way, and wins over a search. Needs no process group; called by `validate` and `apply`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shoal.batch_tree import move_to_device, slice_samples
from shoal.errors import PlanError
from shoal.parallel.loss import get_value
from shoal.parallel.model import TaskProtocol
from shoal.parallel.state.module_snapshot import has_hooks, preserve_module
from shoal.parallel.tensor.dataflow import is_activation_used_elsewhere, is_weight_used_elsewhere
from shoal.parallel.tensor.trace import LinearCall, ModelTrace, Pair, trace_model
from shoal.parallel.tensor.verify import PairSplit, verify_pair

# A layer without a partner is split if that is worth a collective of its own: it has a large share of all parameters,
# and many times more entries than features, like the ends of a language model.
MIN_LAYER_SHARE, MIN_LAYER_RATIO = 0.1, 4
NUM_TRIAL_SAMPLES = 2

# How a layer is split. `column` and `row` belong together; the others stand alone: inputs and output are full.
STYLES = ("column", "row", "column_gathered", "row_split", "vocabulary")
_REASONS = {
    nn.RNNBase: "recurrent layers are not split",
    nn.MultiheadAttention: "its projections are not called as layers",
    nn.modules.conv._ConvNd: "convolutions are not split",
    nn.modules.batchnorm._BatchNorm: "normalisations are not split",
    nn.LayerNorm: "normalisations are not split",
}
_EXPOSED = "what lies between them is used elsewhere as well, where a part would not do"


@dataclass
class TensorPlan:
    """The split layers, and the changes that follow.

    styles:            layer -> one of STYLES
    changes:           (module, attribute) -> its value on each rank: numbers of heads
    dropouts:          dropout layers with a part of the features -> the dimension of these
    modified_in_place: split layers whose outputs the model changes in place
    unsplit:           layers with parameters that every rank holds in full -> why
    summed:            unsplit parameters of whose gradient each rank has a part
    """

    styles: dict[str, str] = field(default_factory=dict)
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    dropouts: dict[str, int] = field(default_factory=dict)
    modified_in_place: set[str] = field(default_factory=set)
    unsplit: dict[str, str] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)

    def add(self, split: PairSplit) -> None:
        self.styles |= {call.name: "column" for call in split.pair.columns} | {split.pair.row.name: "row"}
        self.changes |= split.changes
        self.dropouts |= split.dropouts
        self.summed |= split.entering

    def for_layers_of(self, model: nn.Module) -> TensorPlan:
        """The part of the plan for a model that has some of the layers."""
        names, parameters = dict(model.named_modules()), dict(model.named_parameters())
        return TensorPlan(
            styles={name: style for name, style in self.styles.items() if name in names},
            changes={place: value for place, value in self.changes.items() if place[0] in names},
            dropouts={name: dimension for name, dimension in self.dropouts.items() if name in names},
            modified_in_place=self.modified_in_place & names.keys(),
            unsplit={name: reason for name, reason in self.unsplit.items() if name in names},
            summed=self.summed & parameters.keys(),
        )


def find_tensor_plan(model: nn.Module, learnable: TaskProtocol, size: int, example: Any = None) -> TensorPlan:
    """The user's plan, or a generated one, for `size` ranks. Without an example, a user's plan is checked for sizes
    only.

    Raises PlanError naming the layer that cannot be split, its size and a remedy; or when none can be.
    """
    given = learnable.tensor_plan()
    styles = _resolve_given_styles(model, given, size) if given is not None else {}
    if example is None:
        return TensorPlan(styles)
    few = move_to_device(slice_samples(example, slice(NUM_TRIAL_SAMPLES)), next(model.parameters()).device)
    with preserve_module(model):
        trace = trace_model(model, learnable.inputs(few), lambda outputs: get_value(learnable.loss(outputs, few)))
        if given is not None:
            plan = _verify_given_plan(trace, styles, size)
        else:
            plan = _verify_model_plan(trace, size) or _search_plan(trace, size)
    plan.modified_in_place = trace.modified_in_place & plan.styles.keys()
    for name, module in model.named_modules():  # every other module with parameters has a reason
        if name in plan.styles:
            plan.unsplit.pop(name, None)
        elif next(iter(module.parameters(recurse=False)), None) is not None:
            reasons = (reason for kind, reason in _REASONS.items() if isinstance(module, kind))
            plan.unsplit.setdefault(name, next(reasons, "no pair of linear layers that it belongs to"))
    if not plan.styles:
        listed = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in list(plan.unsplit.items())[:4])
        remedy = "change the layer's size or the degree, use fsdp, or write Task.tensor_plan()"
        raise PlanError("parallel.tensor", size, f"no layer can be split ({listed})", remedy)
    return plan


def _verify_model_plan(trace: ModelTrace, size: int) -> TensorPlan | None:
    """The plan that a model of transformers brings; None without one, or if it does not fit."""
    styles: dict[str, str] = {}
    unsplit: dict[str, str] = {}
    for pattern, style in read_model_plan(trace.model).items():
        for name, layer in trace.model.named_modules():
            if type(layer) not in (nn.Linear, nn.Embedding) or name not in trace.call_counts:
                continue
            if not fnmatchcase(name, pattern):
                continue
            if (problem := _find_misfit(layer, style, size)) is None:
                styles.setdefault(name, style)
            else:
                unsplit[name] = problem
    try:
        plan = _verify_given_plan(trace, styles, size) if styles else None
    except PlanError:
        return None
    if plan is not None:
        plan.unsplit = unsplit | plan.unsplit
    return plan


def _resolve_given_styles(model: nn.Module, given: dict[str, str], size: int) -> dict[str, str]:
    """{layer: style}, by the first pattern that matches a layer's name."""
    styles: dict[str, str] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    for pattern, style in given.items():
        if style not in STYLES:
            raise PlanError(f"tensor_plan.{pattern}", style, "is no style", f"use one of {', '.join(STYLES)}")
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            problem = "matches no linear layer and no embedding"
            raise PlanError("tensor_plan", pattern, problem, f"there are {', '.join(list(layers)[:8])}")
        for name in matching:
            if (misfit := _find_misfit(layers[name], style, size)) is not None:
                remedy = "change its size or parallel.tensor, or leave it out of the plan"
                raise PlanError("parallel.tensor", size, f"{name} {misfit}", remedy)
            styles.setdefault(name, style)
    return styles


def _find_misfit(layer: nn.Module, style: str, size: int) -> str | None:
    """Why `layer` cannot be split so; None if its sizes allow it."""
    if isinstance(layer, nn.Embedding) != (style == "vocabulary"):
        return f"is a {type(layer).__name__}, which cannot be split by {style}"
    if any(map(has_hooks, layer.parameters())):
        return "has a parameter with a hook, which a part of its gradient would pass by"
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.padding_idx is not None or layer.sparse:
            return "has a max_norm, a padding_idx or sparse gradients, and cannot be split"
        number, what = layer.num_embeddings, "entries"
    else:
        assert isinstance(layer, nn.Linear)
        number, what = (
            (layer.in_features, "inputs") if style in ("row", "row_split") else (layer.out_features, "outputs")
        )
    return f"has {number} {what}, which {size} ranks cannot share" if number % size else None


def _verify_given_plan(trace: ModelTrace, styles: dict[str, str], size: int) -> TensorPlan:
    """A user's plan, verified: each row layer belongs to the column layers called since the last one."""
    plan = TensorPlan({name: style for name, style in styles.items() if style not in ("column", "row")})
    columns: list[LinearCall] = []
    splits: list[PairSplit] = []
    for call in trace.linears:
        if styles.get(call.name) == "column":
            columns.append(call)
        elif styles.get(call.name) == "row":
            if not columns:
                raise PlanError("tensor_plan", call.name, "is split by rows, and no layer before it by columns")
            split = verify_pair(trace, Pair(tuple(columns), call), size)
            if isinstance(split, str):
                raise PlanError("tensor_plan", call.name, split, "leave these layers out of the plan")
            plan.add(split)
            splits.append(split)
            columns = []
    for name, style in styles.items():
        if name not in plan.styles:
            partner = "no layer split by rows follows it" if style == "column" else "it is not called as a layer"
            raise PlanError("tensor_plan", name, partner, "use column_gathered, or leave it out")
    if shown := _find_exposed_splits(trace, splits):
        names = [name for split in shown for name in split.pair.names]
        raise PlanError("tensor_plan", names, _EXPOSED, "leave these layers out of the plan")
    _reconcile_tied_layers(trace.model, plan)
    if is_weight_used_elsewhere(trace, list(plan.styles)):
        raise PlanError("tensor_plan", list(plan.styles), "a weight of these is used outside its layer's call")
    return plan


def _search_plan(trace: ModelTrace, size: int) -> TensorPlan:
    plan = TensorPlan()
    splits: list[PairSplit] = []
    tied = {name for names in _list_sharing_layers(trace.model) for name in names}
    runs: list[list[LinearCall]] = []  # the calls, with consecutive ones that have the same input grouped
    for call in trace.linears:
        if runs and runs[-1][-1].input is call.input:
            runs[-1].append(call)
        else:
            runs.append([call])
    index = 0
    while index < len(runs):
        pairs = [pair for pair in _iter_candidates(runs, index) if not tied & set(pair.names)]
        splits_here = (_try_split(trace, pair, size, plan) for pair in pairs)
        split = next((each for each in splits_here if each is not None), None)
        if split is None:
            index += 1
            continue
        splits.append(split)
        names = set(split.pair.names)
        while index < len(runs) and names & {call.name for call in runs[index]}:
            index += 1
    shown = _find_exposed_splits(trace, splits)
    for split in shown:
        plan.unsplit |= dict.fromkeys(split.pair.names, _EXPOSED)
    splits = [split for split in splits if split not in shown]
    lone = _find_lone_layers(trace, plan, {name for split in splits for name in split.pair.names}, size)
    groups = [split.pair.names for split in splits] + [[name] for name in lone]
    if is_weight_used_elsewhere(trace, [name for names in groups for name in names]):
        elsewhere = {name for names in groups if is_weight_used_elsewhere(trace, names) for name in names}
        plan.unsplit |= dict.fromkeys(elsewhere, "a weight of it is used outside its layer's call")
        splits = [split for split in splits if not elsewhere & set(split.pair.names)]
        lone = {name: style for name, style in lone.items() if name not in elsewhere}
    for split in splits:
        plan.add(split)
    plan.styles |= lone
    _reconcile_tied_layers(trace.model, plan)
    return plan


def _find_exposed_splits(trace: ModelTrace, splits: list[PairSplit]) -> list[PairSplit]:
    """The pairs with values, or parameters, between their layers that are used elsewhere, too."""

    def is_used_elsewhere(some: list[PairSplit]) -> bool:
        entering = {name for split in some for name in split.entering}
        return is_activation_used_elsewhere(trace, [split.pair for split in some], entering)

    shown: list[PairSplit] = []
    while (left := [split for split in splits if split not in shown]) and is_used_elsewhere(left):
        shown += [split for split in left if is_used_elsewhere([split])] or left
    return shown


def _iter_candidates(runs: list[list[LinearCall]], index: int) -> Iterator[Pair]:
    """A group and the next layer; or two groups (queries, and keys and values of another sequence) and the next
    layer."""
    columns: list[LinearCall] = []
    for last in (index, index + 1):
        if last + 1 >= len(runs):
            return
        columns += runs[last]
        row = runs[last + 1]
        if len(row) == 1 and any(call.module.out_features == row[0].module.in_features for call in columns):
            yield Pair(tuple(columns), row[0])


def _try_split(trace: ModelTrace, pair: Pair, size: int, plan: TensorPlan) -> PairSplit | None:
    """The pair, split; None, with the reason recorded, when it cannot be."""
    for call in (*pair.columns, pair.row):
        problem = _find_misfit(call.module, "row" if call is pair.row else "column", size)
        if problem is not None:
            plan.unsplit.setdefault(call.name, problem)
            return None
    split = verify_pair(trace, pair, size)
    if isinstance(split, str):
        plan.unsplit.setdefault(pair.columns[0].name, split)
        return None
    return split


def _find_lone_layers(trace: ModelTrace, plan: TensorPlan, paired: set[str], size: int) -> dict[str, str]:
    """Large embeddings and large linear layers without a partner: the ends of a language model."""
    styles: dict[str, str] = {}
    total = sum(parameter.numel() for parameter in trace.model.parameters())
    for name, module in trace.model.named_modules():
        if name in paired or type(module) not in (nn.Linear, nn.Embedding) or name not in trace.call_counts:
            continue
        assert isinstance(module, (nn.Linear, nn.Embedding))
        style = "vocabulary" if isinstance(module, nn.Embedding) else "column_gathered"
        entries, features = module.weight.shape
        if module.weight.numel() < MIN_LAYER_SHARE * total or entries < MIN_LAYER_RATIO * features:
            plan.unsplit.setdefault(name, "has no partner, and is too small to be split alone")
        elif (problem := _find_misfit(module, style, size)) is not None:
            plan.unsplit.setdefault(name, problem)
        else:
            styles[name] = style
    return styles


def _list_sharing_layers(model: nn.Module) -> list[list[str]]:
    """The layers of each parameter that several have."""
    holders: dict[int, dict[str, None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), {})[name.rpartition(".")[0]] = None
    return [list(names) for names in holders.values() if len(names) > 1]


def _reconcile_tied_layers(model: nn.Module, plan: TensorPlan) -> None:
    """Layers that share a weight are all split over dimension 0, or not at all."""
    for names in _list_sharing_layers(model):
        if not all(plan.styles.get(name) in ("column_gathered", "vocabulary") for name in names):
            for name in names:
                if plan.styles.pop(name, None) is not None:
                    others = ", ".join(other for other in names if other != name)
                    plan.unsplit[name] = f"shares a weight with {others}, which is not split alike"


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
