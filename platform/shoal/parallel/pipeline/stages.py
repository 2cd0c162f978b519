"""One rank's stages as torch.distributed.pipelining runs them, and their computing seconds.

Called by `pipeline`. A stage computes the model's own forward, see `stage_forward`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shoal.batch_tree import tensors_of
from shoal.parallel.comm.shm_p2p import ShmP2P
from shoal.parallel.layers.batch_norm import DataGroup
from shoal.parallel.layers.dropout import DropoutRng, mix_seed
from shoal.parallel.pipeline.schedules import SCHEDULE_CLASSES, SINGLE_STAGE
from shoal.parallel.pipeline.split_points import ModuleCall, SplitPoint
from shoal.parallel.spec import ScheduleName

# (stage, micro-batch, output of the stage before) -> its output, or the loss to be differentiated
StageCompute = Callable[[int, int, Tensor | None], Tensor]


@dataclass
class StageClock:
    """Seconds by `now_s`: of whole schedules, and of this rank's computations in them, by stage."""

    now_s: Callable[[], float] = time.perf_counter
    total_s: float = 0.0
    forward_s: dict[int, float] = field(default_factory=dict)
    backward_s: dict[int, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.total_s = 0.0
        self.forward_s.clear()
        self.backward_s.clear()

    @property
    def busy_s(self) -> float:
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


class StageModule(nn.Module):
    """A stage for torch: its parameters, and its computation of one micro-batch."""

    def __init__(self, stage: int, parameters: list[nn.Parameter], compute: StageCompute) -> None:
        super().__init__()
        self._stage = stage
        self._stage_parameters = parameters
        self._compute = compute
        self.micro_batch = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this stage: the modules belong to the model, of which other stages run other parts."""
        return iter(self._stage_parameters)

    def forward(self, received: Tensor) -> Tensor:
        """received: from the stage before; unused on the first stage."""
        if self._stage == 0:
            return self._compute(0, self.micro_batch, None)
        received = received.view_as(received)
        if received.requires_grad:
            received.register_hook(lambda gradient: gradient.contiguous())  # sending requires it
        return self._compute(self._stage, self.micro_batch, received)


class TimedStage(PipelineStage):
    """A stage that passes the micro-batch's number to its module, and times it."""

    clock: StageClock
    submod: StageModule
    messages: ShmP2P | None = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._redirect_ops(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._redirect_ops(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._redirect_ops(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._redirect_ops(super().get_bwd_send_ops(bwd_chunk_id))

    def _redirect_ops(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return self.messages.redirect_ops(ops) if self.messages is not None else ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id
        return self._time_call(self.clock.forward_s, super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self._time_call(self.clock.backward_s, super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self._time_call(self.clock.backward_s, super().backward_weight_one_chunk, *args, **kwargs)

    def _time_call(self, spent_s: dict[int, float], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began_s = self.clock.now_s()
        result = function(*args, **kwargs)
        spent_s[self.stage_index] = spent_s.get(self.stage_index, 0.0) + self.clock.now_s() - began_s
        return result


class StageDropoutRng(DropoutRng):
    """Random numbers in stages: dropout draws the same masks as in one process with the same micro-batches."""

    def __init__(
        self,
        seed: int,
        data_rank: int,
        num_data_ranks: int,
        device: torch.device,
        calls: list[ModuleCall],
        split_points: list[SplitPoint],
    ) -> None:
        super().__init__(seed, data_rank, num_data_ranks, device)
        self._calls_before = [
            Counter(crc32(call.module.encode()) for call in calls[: split_point.call]) for split_point in split_points
        ]

    def begin_stage(self, stage: int, step: int, micro_step: int, num_samples: int) -> None:
        """Assign the following draws to this stage's part of a micro-step."""
        self.begin_micro_step(step, micro_step, num_samples)
        if stage > 0:
            torch.manual_seed(mix_seed(self.seed, step, micro_step, self.data_rank, stage))
            for layer, count in self._calls_before[stage - 1].items():  # calls of earlier stages
                self._calls[(*self._key, layer)] = count - 1


def build_schedule(
    name: ScheduleName,
    modules: dict[int, StageModule],
    shapes: dict[int, Tensor],
    num_stages: int,
    num_micro_batches: int,
    device: torch.device,
    group: dist.ProcessGroup,
    clock: StageClock,
    messages: ShmP2P | None,
) -> Any:
    """The schedule over this rank's stages, for tensors of these shapes.

    shapes:   by stage, an empty tensor like its output
    messages: the transport; None uses the group
    """
    index, loss = torch.empty(1, dtype=torch.int64), torch.empty((), device="meta", requires_grad=True)
    stages = []
    for stage, module in sorted(modules.items()):
        takes = shapes[stage - 1] if stage else index
        gives = shapes[stage] if stage < num_stages - 1 else loss
        made = TimedStage(module, stage, num_stages, device, takes, gives, group=group)
        made.clock, made.messages = clock, messages
        stages.append(made)
    # The last stage computes the loss, so that outputs may have any form; torch's loss function returns it unchanged.
    # Gradients are scaled there, too.
    first = stages[0] if name in SINGLE_STAGE else stages
    return SCHEDULE_CLASSES[name](first, num_micro_batches, loss_fn=lambda output, _: output, scale_grads=False)


MAX_SCHEDULES = 32  # each has memory for the inputs of its stages, of all micro-batches

ShapeKey = tuple[tuple[torch.Size, torch.dtype], ...]


def shape_key(batch: Any) -> ShapeKey:
    """Shapes and types: the key of a schedule."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(batch))


class ScheduleCache:
    """Schedules with the outputs of their stages. The ranks of one pipeline see the same forms, and so cache the same.

    ranks: data ranks that gather each other's parameters, and must run the model equally often; None otherwise
    """

    def __init__(self, ranks: DataGroup | None, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._schedules: OrderedDict[ShapeKey, tuple[Any, dict[int, Tensor]]] = OrderedDict()

    def __contains__(self, form: ShapeKey) -> bool:
        return form in self._schedules

    def is_missing(self, form: ShapeKey) -> bool:
        """Whether one of the data ranks lacks a schedule for its input; `form` is this rank's. Collective."""
        is_new = form not in self._schedules
        if self._ranks is None:
            return is_new
        return bool(self._ranks.gather(torch.tensor([is_new], device=self._ranks.control_device(self._device))).any())

    def put(self, form: ShapeKey, schedule: Any, handed: dict[int, Tensor]) -> None:
        """Add a schedule; when there are too many, replace the least recently used."""
        self._schedules[form] = schedule, handed
        if len(self._schedules) > MAX_SCHEDULES:
            self._schedules.popitem(last=False)

    def get(self, form: ShapeKey) -> tuple[Any, dict[int, Tensor]]:
        """The schedule, and the outputs of its stages. It must be cached."""
        self._schedules.move_to_end(form)
        return self._schedules[form]

    def clear(self) -> None:
        """Release all of them."""
        self._schedules.clear()
