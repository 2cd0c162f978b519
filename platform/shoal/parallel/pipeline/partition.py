"""The partition of a model into stages: chosen on rank 0 from a profile of the model, verified, and sent to all.

Called by `pipeline`. The model is unchanged when it returns or raises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.comm.world import World
from shoal.parallel.deferred.weights import DeferredWeights, decide_plan
from shoal.parallel.loss import Mean, get_value
from shoal.parallel.loss_trace import find_means
from shoal.parallel.model import TaskProtocol, compute_loss_and_metrics
from shoal.parallel.pipeline.split_points import ModuleCall, SplitPoint, SplitProfile, profile_splits, select_splits
from shoal.parallel.pipeline.stage_forward import StageForward, build_stage_slices, mask_parameters
from shoal.parallel.state.module_snapshot import eval_mode, hook_modules, preserve_module
from shoal.random_state import preserve_rng


@dataclass(frozen=True)
class StagePartition:
    """The stages of a model.

    calls, split_points:   those that define the stages
    blocks:                modules that begin at a possible split point, with the first stage that calls them
    parameters:            the stages that use a parameter, by its first name; the first stage if none does
    buffers:               the stage that stores a buffer, by each of its names
    forward_s, backward_s: measured, of each stage and micro-batch, when the partition was made
    has_mean_loss:         whether the Task's loss is a `Mean`, which only the last stage sees
    """

    calls: list[ModuleCall]
    split_points: list[SplitPoint]
    blocks: dict[str, int]
    parameters: dict[str, list[int]]
    buffers: dict[str, int]
    forward_s: list[float]
    backward_s: list[float]
    has_mean_loss: bool


def partition_model(
    model: nn.Module,
    learnable: TaskProtocol,
    batch: Any,
    num_stages: int,
    world: World,
    context: Callable[[], Any],
    deferred: DeferredWeights | None = None,
) -> StagePartition:
    """The partition, the same on every rank. Collective. Raises PlanError, on every rank, when the model has none.

    batch:    a micro-batch
    context:  of a forward pass (autocast)
    deferred: of a model without memory for its parameters
    """
    find = partial(find_partition, model, learnable, batch, num_stages, world.device, context)
    return decide_plan(find, model, deferred, world, world.device)


def find_partition(
    model: nn.Module,
    learnable: TaskProtocol,
    batch: Any,
    num_stages: int,
    device: torch.device,
    context: Callable[[], Any] = nullcontext,
    has_weights: bool = True,
) -> StagePartition:
    """The partition as this process finds it. Raises PlanError when the model has none.

    has_weights: whether the parameters have values and memory for gradients (see `profile_splits`)
    """
    kinds: set[bool] = set()  # whether a loss is a `Mean`

    def run() -> Tensor:
        with context():
            loss = find_means(partial(learnable.loss, model(*learnable.inputs(batch)), batch))
            kinds.add(isinstance(loss, Mean))
            return get_value(loss)

    profile = profile_splits(model, run, device, has_weights)
    changing = _trace_buffer_changes(model, run, {name for name, _ in model.named_buffers()}, [])
    profile.changed = _trace_buffer_changes(model, run, set(changing), profile.split_points) if changing else {}
    wanted = learnable.pipeline_cuts()
    rejection: PlanError | None = None
    while True:
        try:
            split_points = select_splits(profile, num_stages, wanted)
        except PlanError as error:
            if rejection is not None and wanted is None:
                raise rejection from error
            raise
        refused = find_shared_buffer(profile, _map_segments_to_stages(profile, split_points), split_points)
        if refused is None:
            split_point = _find_invalid_split(model, learnable, batch, profile, split_points, context)
            if split_point is None:
                return _build_partition(profile, split_points, True in kinds)
            problem = "what follows needs more of what came before than the tensor that is handed on"
            remedy = "let blocks hand on one tensor, and derive masks and positions from the inputs; or use ddp or fsdp"
            refused = split_point, PlanError("parallel.pipeline", split_point.module, problem, remedy)
        split_point, rejection = refused
        if wanted is not None:
            raise rejection
        profile = _remove_split_point(profile, split_point)


def _find_invalid_split(
    model: nn.Module,
    learnable: TaskProtocol,
    batch: Any,
    profile: SplitProfile,
    split_points: Sequence[SplitPoint],
    context: Callable[[], Any],
) -> SplitPoint | None:
    """The first split point after which the model's results differ; None when the stages compute the same.

    Every stage runs with the parameters of all others, and the results of skipped calls, set to NaN: once as in an
    evaluation, whose results are known, and once as in training, where modules may depend on more.
    """
    with eval_mode(model), context():  # with gradients, as the stages run: else torch's layers take other kernels
        expected = _stack_metrics(learnable, model(*learnable.inputs(batch)), batch)
    gated = StageForward(model, build_stage_slices(profile.calls, split_points))
    gated.filler = float("nan")
    try:
        with eval_mode(model), context():
            refused, compared = _run_in_stages(gated, learnable, batch, profile, split_points)
        if refused is None:
            with preserve_module(model), preserve_rng(), context():
                refused, _ = _run_in_stages(gated, learnable, batch, profile, split_points)
    finally:
        gated.remove()
    if refused is not None:
        return refused
    return None if torch.allclose(compared, expected, rtol=1e-3, atol=1e-5) else split_points[-1]


def _run_in_stages(
    gated: StageForward, learnable: TaskProtocol, batch: Any, profile: SplitProfile, split_points: Sequence[SplitPoint]
) -> tuple[SplitPoint | None, Tensor]:
    """The first split point after which a result is NaN or fails; and the numbers by which the model is compared."""
    inputs = learnable.inputs(batch)
    stages = _map_parameters_to_stages(profile, split_points)
    handed: Any = None
    compared = torch.zeros(())
    for stage, split_point in enumerate([None, *split_points]):
        received = None if split_point is None else handed.detach().requires_grad_()
        with mask_parameters(gated.model, {name for name, users in stages.items() if stage not in users}, float("nan")):
            try:
                handed = gated.run(stage, inputs, received)
                compared = _stack_metrics(learnable, handed, batch) if stage == len(split_points) else handed
            except RuntimeError:  # a result or shape depends on missing values
                if split_point is None:
                    raise
                return split_point, compared
        if split_point is not None and compared.isnan().any():
            return split_point, compared
    return None, compared


def _stack_metrics(learnable: TaskProtocol, outputs: Any, batch: Any) -> Tensor:
    """The numbers by which a model is compared: the loss and the metrics."""
    return torch.stack(
        [get_value(each).detach().double() for each in compute_loss_and_metrics(learnable, outputs, batch).values()]
    )


def _remove_split_point(found: SplitProfile, refused: SplitPoint) -> SplitProfile:
    """The profile with two parts merged."""
    place = found.split_points.index(refused)
    (forward_s, backward_s), (more_forward_s, more_backward_s) = found.cost_s[place : place + 2]
    together = (forward_s + more_forward_s, backward_s + more_backward_s)

    def merged(part: int) -> int:
        return part - (part > place)

    return SplitProfile(
        found.calls,
        [split_point for split_point in found.split_points if split_point != refused],
        found.inner,
        {name: sorted({merged(part) for part in parts}) for name, parts in found.parameters.items()},
        {name: merged(part) for name, part in found.buffers.items()},
        [*found.cost_s[:place], together, *found.cost_s[place + 2 :]],
        found.unfit,
        {name: sorted({merged(part) for part in parts}) for name, parts in found.changed.items()},
    )


def _map_parameters_to_stages(profile: SplitProfile, split_points: Sequence[SplitPoint]) -> dict[str, list[int]]:
    stage = _map_segments_to_stages(profile, split_points)
    return {name: sorted({stage[part] for part in parts}) or [0] for name, parts in profile.parameters.items()}


def _map_segments_to_stages(profile: SplitProfile, split_points: Sequence[SplitPoint]) -> list[int]:
    begins = [split_point.call for split_point in split_points]
    return [0, *(bisect_right(begins, split_point.call) for split_point in profile.split_points)]


def _build_partition(profile: SplitProfile, split_points: list[SplitPoint], has_mean_loss: bool) -> StagePartition:
    stage = _map_segments_to_stages(profile, split_points)
    costs = [[0.0, 0.0] for _ in range(len(split_points) + 1)]
    for part, (forward_s, backward_s) in enumerate(profile.cost_s):
        costs[stage[part]][0] += forward_s
        costs[stage[part]][1] += backward_s
    blocks: dict[str, int] = {}
    for part, split_point in enumerate(profile.split_points, start=1):
        blocks.setdefault(split_point.module, stage[part])
    return StagePartition(
        profile.calls,
        split_points,
        blocks,
        _map_parameters_to_stages(profile, split_points),
        {name: stage[part] for name, part in profile.buffers.items()},
        [forward_s for forward_s, _ in costs],
        [backward_s for _, backward_s in costs],
        has_mean_loss,
    )


def _trace_buffer_changes(
    model: nn.Module, run: Callable[[], Tensor], names: set[str], split_points: Sequence[SplitPoint]
) -> dict[str, list[int]]:
    """The parts that change one of these buffers, by its name; unchanged ones are not listed.

    run: one pass, with the modules in their own modes
    """
    found: dict[str, list[int]] = {}
    places = {split_point.call for split_point in split_points}
    part = num_calls = 0
    values = {name: buffer.clone() for name, buffer in model.named_buffers() if name in names}

    def inspect() -> None:
        for name, buffer in model.named_buffers():
            if name in values and not _are_equal(values[name], buffer):
                found.setdefault(name, []).append(part)
                values[name] = buffer.clone()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal part, num_calls
        if num_calls in places:
            inspect()
            part += 1
        num_calls += 1

    with preserve_module(model), preserve_rng(), torch.enable_grad():
        with hook_modules(model, enter):
            run()
        inspect()
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN equals NaN


def find_shared_buffer(
    profile: SplitProfile, stages: Sequence[int], split_points: Sequence[SplitPoint]
) -> tuple[SplitPoint, PlanError] | None:
    """The first split point between two stages that would change the same buffer, or one that stores it; and the
    error. None when each buffer belongs to one stage.

    stages: of each part
    """
    for name, parts in profile.changed.items():
        users = sorted({stages[part] for part in [*parts, profile.buffers[name]]})
        if len(users) > 1:
            problem = f"the buffer {name} would be changed by stage {users[1]}, too, and lie with stage {users[0]}"
            remedy = "cut where no layer with such a buffer is called on both sides, or use ddp or fsdp"
            split_point = split_points[users[1] - 1]
            return split_point, PlanError("parallel.pipeline", split_point.module, problem, remedy)
    return None
