"""Finds where a model can be split into stages, from one real pass, and where it should be, by timing another.

A split point lies just before a call of a module whose first tensor argument is everything that the rest of the pass
needs of the earlier part: no edge of the autograd graph crosses it, except to that tensor. So any model whose calls are
sequential can be split, at any depth, with any code between its modules, and nothing is traced or rewritten. Called by
`partition`. Knows no process group; leaves the model's weights, buffers, gradients and random state unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import PlanError
from shoal.parallel.comm.world import read_clock_s
from shoal.parallel.state.module_snapshot import eval_mode, get_trainable_parameters, hook_modules, preserve_module
from shoal.random_state import preserve_rng

UNFIT_REASON = "is recomputed in the backward pass, or not called in evaluation"
NUM_TIMED_PASSES = 2  # passes, after a warm-up; the fastest counts


@dataclass
class ModuleCall:
    """One call of a module during a pass. `last` is the last call within it: its inner calls follow it."""

    module: str
    last: int = -1


@dataclass(frozen=True)
class SplitPoint:
    """Just before call number `call`, which gets the stage's input as `argument` (position or name).

    size_bytes: of that tensor, for the profiled micro-batch
    """

    call: int
    module: str
    argument: int | str
    size_bytes: int


@dataclass
class SplitProfile:
    """The result of one pass: the parts between all possible split points, in order.

    split_points: between part i and part i + 1
    inner:        other names of a split point: modules that get the same tensor
    parameters:   the parts that use a parameter, by its first name; [] if none does
    buffers:      the first part that computes with a buffer
    changed:      the parts that change a buffer, if any does
    cost_s:       seconds of each part, forward and backward
    unfit:        modules with which no stage can begin: the backward pass calls them again (activation checkpointing),
                  or evaluation does not call them (fast paths)
    """

    calls: list[ModuleCall]
    split_points: list[SplitPoint]
    inner: dict[str, SplitPoint]
    parameters: dict[str, list[int]]
    buffers: dict[str, int]
    cost_s: list[tuple[float, float]] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)
    changed: dict[str, list[int]] = field(default_factory=dict)


def profile_splits(
    model: nn.Module, run: Callable[[], Tensor], device: torch.device, has_weights: bool = True
) -> SplitProfile:
    """Find every possible split point, and the cost of each part between two of them.

    run:         one pass over a micro-batch, returning the loss
    has_weights: if not, no gradient is computed, and costs are shares of operations and parameters
    """
    with preserve_module(model), preserve_rng(), torch.enable_grad():
        profile = _find_split_points(model, run)
        if has_weights:
            passes = [_time_pass(model, run, profile, device) for _ in range(NUM_TIMED_PASSES + 1)]
            profile.cost_s = [(min(f for f, _ in part), min(b for _, b in part)) for part in zip(*passes, strict=True)]
        else:
            profile.cost_s = _count_costs(model, run, profile)
        model.zero_grad(set_to_none=True)
        # Modules that evaluation calls more or less often than training.
        names = {module: name for name, module in model.named_modules()}
        counts: Counter[str] = Counter()

        def enter(module: nn.Module, args: Any) -> None:
            if module in names:
                counts[names[module]] += 1

        hook = register_module_forward_pre_hook(enter)  # a module's own hooks would disable its fast path
        try:
            with eval_mode(model), torch.no_grad():
                run()
        finally:
            hook.remove()
        trained = Counter(call.module for call in profile.calls)
        profile.unfit |= {name for name in counts | trained if counts[name] != trained[name]}
    return profile


def select_splits(profile: SplitProfile, num_stages: int, wanted: Sequence[str] | None) -> list[SplitPoint]:
    """The split points between so many stages: the user's, or those whose slowest stage is fastest.

    Raises PlanError when there are too few places, or when one of the user's is invalid.
    """
    if wanted is not None:
        return _resolve_wanted(profile, num_stages, wanted)
    used = {part for parts in profile.parameters.values() for part in parts}
    places: list[int] = []  # with parameters between any two
    begin = 0
    for place, split_point in enumerate(profile.split_points):
        is_between = any(begin <= part <= place for part in used) and any(part > place for part in used)
        if split_point.module not in profile.unfit and is_between:
            places.append(place)
            begin = place + 1
    if len(places) + 1 < num_stages:
        named = ", ".join(profile.split_points[place].module for place in places) or "none"
        problem = (
            f"needs {num_stages} stages, but the model can be cut at {len(places)} places only, where one tensor is "
            f"handed on and parameters lie on both sides ({named})"
        )
        remedy = "use fewer stages, a schedule with one stage for each rank, or a model that is a chain of blocks"
        if profile.unfit:
            remedy += ", without activation checkpointing"
        raise PlanError("parallel.pipeline", num_stages, problem, remedy)
    edges = [0, *(place + 1 for place in places), len(profile.cost_s)]
    costs = [sum(map(sum, profile.cost_s[begin:end])) for begin, end in pairwise(edges)]
    return [profile.split_points[places[end - 1]] for end in balance_stages(costs, num_stages)]


def balance_stages(costs: Sequence[float], num_stages: int) -> list[int]:
    """The beginnings of stages after the first, so that the costliest of these contiguous stages is as cheap as
    possible."""
    total = [0.0, *accumulate(costs)]
    # best[j]: the smallest maximum of the first j parts in so many stages; begin[j]: where the last of these begins
    best = list(total)
    begins: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        row, begin = [float("inf")] * len(total), [0] * len(total)
        for end in range(stages, len(total)):
            for start in range(stages - 1, end):
                slowest = max(best[start], total[end] - total[start])
                if slowest < row[end]:
                    row[end], begin[end] = slowest, start
        best = row
        begins.append(begin)
    result: list[int] = []
    end = len(costs)
    for begin in reversed(begins):
        end = begin[end]
        result.append(end)
    return result[::-1]


def _resolve_wanted(profile: SplitProfile, num_stages: int, wanted: Sequence[str]) -> list[SplitPoint]:
    if len(wanted) != num_stages - 1:
        problem = f"names {len(wanted)} cuts for {num_stages} stages"
        raise PlanError("pipeline_cuts", list(wanted), problem, f"name {num_stages - 1} of its modules")
    known = profile.inner | {split_point.module: split_point for split_point in reversed(profile.split_points)}
    split_points: list[SplitPoint] = []
    for name in wanted:
        if name not in known:
            called = any(call.module == name for call in profile.calls)
            problem = "more than its first tensor is handed on there" if called else "no module of this name is called"
            possible = ", ".join(split_point.module for split_point in profile.split_points)
            raise PlanError("pipeline_cuts", name, problem, f"cut at {possible}")
        if known[name].module in profile.unfit:
            raise PlanError("pipeline_cuts", name, UNFIT_REASON, "cut elsewhere, or do not checkpoint it")
        split_points.append(known[name])
    if sorted({split_point.call for split_point in split_points}) != [split_point.call for split_point in split_points]:
        raise PlanError("pipeline_cuts", list(wanted), "are not in the order of the calls", "sort them, each once")
    return split_points


def find_first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor] | None:
    """The argument by which a chain passes its result on: the first that has a gradient."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for position, value in named:
        if isinstance(value, Tensor) and value.requires_grad:
            return position, value
    return None


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int | str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, except one."""
    if isinstance(position, str):
        return args, kwargs | {position: value}
    return (*args[:position], value, *args[position + 1 :]), kwargs


@dataclass
class _Candidate:
    """A candidate. `node` made the passed tensor; operations after the call have greater sequence numbers."""

    split_point: SplitPoint
    node: Any
    sequence: int


class _CallRecorder:
    """Hooks on every module that record calls, and the first tensor of each."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self.candidates: list[_Candidate] = []
        self.inner: dict[str, int] = {}
        self._call_stack: list[int] = []
        self._indices: dict[Any, int] = {}  # by the node of an entry: its index
        self._names = {module: name for name, module in model.named_modules()}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index, name = len(self.calls), self._names[module]
        torch.clear_autocast_cache()  # a cast weight that is used twice would bypass the passed tensor
        self.calls.append(ModuleCall(name))
        self._call_stack.append(index)
        found = find_first_tensor(args, kwargs) if torch.is_grad_enabled() else None
        if found is None:
            return
        position, tensor = found
        if tensor.grad_fn in self._indices:  # an earlier call, such as the enclosing module's, has this tensor already
            self.inner.setdefault(name, self._indices[tensor.grad_fn])
            return
        self._indices[tensor.grad_fn] = len(self.candidates)
        now = _sequence_number(tensor.view_as(tensor).grad_fn)
        size_bytes = tensor.numel() * tensor.element_size()
        self.candidates.append(_Candidate(SplitPoint(index, name, position, size_bytes), tensor.grad_fn, now))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls[self._call_stack.pop()].last = len(self.calls) - 1


def _sequence_number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _find_split_points(model: nn.Module, run: Callable[[], Tensor]) -> SplitProfile:
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    recorder = _CallRecorder(model)
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)  # so that the graph shows where it is used
        with hook_modules(model, recorder.enter, recorder.leave):
            loss = run()
        crossed, used = _walk_graph(loss, recorder.candidates)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    valid = [not each for each in crossed]
    part_of = [0, *accumulate(int(each) for each in valid)]  # by the number of earlier entries
    split_points = [entry.split_point for entry, each in zip(recorder.candidates, valid, strict=True) if each]
    inner = {name: recorder.candidates[place].split_point for name, place in recorder.inner.items() if valid[place]}
    parts = {parameter: sorted({part_of[place] for place in places}) for parameter, places in used.items()}
    split_calls = [split_point.call for split_point in split_points]
    called: dict[str, int] = {}  # the part that calls a module first
    for index, call in enumerate(recorder.calls):
        called.setdefault(call.module, bisect_right(split_calls, index))
    parameters: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        parameters[name] = parts.get(parameter) or ([called[owner]] if owner in called else [])
    firsts = {module: name for name, module in model.named_modules()}
    buffers = {
        f"{prefix}.{name}" if prefix else name: called.get(firsts[module], 0)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False)
    }
    return SplitProfile(recorder.calls, split_points, inner, parameters, buffers)


def _walk_graph(loss: Tensor, entries: list[_Candidate]) -> tuple[list[bool], dict[Tensor, set[int]]]:
    """The candidates crossed by edges to a node other than their own, and the parts that use each parameter."""
    sequences = [entry.sequence for entry in entries]
    place_of = {entry.node: place for place, entry in enumerate(entries)}
    crossings = [0] * (len(entries) + 1)  # differences: edges that begin or cease to cross
    used: dict[Tensor, set[int]] = {}
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            end = bisect_left(sequences, _sequence_number(node))
            if hasattr(following, "variable"):
                used.setdefault(following.variable, set()).add(end)
                continue
            begin = min(end, bisect_left(sequences, _sequence_number(following)))
            crossings[begin] += 1
            crossings[end] -= 1
            own = place_of.get(following)
            if own is not None and begin <= own < end:
                crossings[own] -= 1
                crossings[own + 1] += 1
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return [count > 0 for count in accumulate(crossings)][: len(entries)], used


def _time_pass(
    model: nn.Module, run: Callable[[], Tensor], profile: SplitProfile, device: torch.device
) -> list[tuple[float, float]]:
    """Seconds of each part, forward and backward. The first pass warms up, and finds recomputed modules."""
    split_points = profile.split_points
    places = {split_point.call: place for place, split_point in enumerate(split_points)}
    reached_s: dict[int, float] = {}  # by the backward pass, which runs through the parts in reverse
    began_s: list[float] = []
    num_calls = 0
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_calls
        if num_calls == len(profile.calls):
            profile.unfit.add(names[module])
            return
        place = places.get(num_calls)
        num_calls += 1
        if place is None:
            return
        began_s.append(read_clock_s(device))
        argument = split_points[place].argument
        handed = kwargs[argument] if isinstance(argument, str) else args[argument]
        if handed.requires_grad:
            handed.register_hook(lambda gradient: reached_s.__setitem__(place, read_clock_s(device)))

    def drop_gradient(parameter: Tensor) -> None:
        """A timed pass has no use for it, and a model without memory for its weights has none for their gradients."""
        parameter.grad = None

    drops = [each.register_post_accumulate_grad_hook(drop_gradient) for each in get_trainable_parameters(model)]
    began_s.append(read_clock_s(device))
    with hook_modules(model, enter):
        loss = run()
        began_s.append(read_clock_s(device))
        loss.backward()
    for hook in drops:
        hook.remove()
    ended_s = read_clock_s(device)
    forward_s = [after - before for before, after in pairwise(began_s)]
    moments_s = [ended_s, *(reached_s.get(place, ended_s) for place in range(len(split_points))), began_s[-1]]
    return list(zip(forward_s, (before - after for before, after in pairwise(moments_s)), strict=True))


def _count_costs(model: nn.Module, run: Callable[[], Tensor], profile: SplitProfile) -> list[tuple[float, float]]:
    """Each part's share of the operations, and of the parameters: a stage is to be quick and small."""
    split_calls = {split_point.call for split_point in profile.split_points}
    num_calls, began = 0, [0]
    counter = FlopCounterMode(display=False)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal num_calls
        if num_calls in split_calls:
            began.append(counter.get_total_flops())
        num_calls += 1

    with hook_modules(model, enter), counter:
        run()
    operations = [after - before for before, after in pairwise([*began, counter.get_total_flops()])]
    sizes = [0] * len(operations)
    for name, parameter in model.named_parameters():
        for part in profile.parameters[name]:
            sizes[part] += parameter.numel()
    totals = max(1, sum(operations)), max(1, sum(sizes))
    return [(each / totals[0], size / totals[1]) for each, size in zip(operations, sizes, strict=True)]
