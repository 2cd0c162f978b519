"""One rank of two: blocks of steps of a pipeline of two stages, and of one process alone, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.ours.stages SCHEDULE BLOCKS

Each rank has one core and one thread. While rank 0 takes its steps alone, rank 1 sleeps in a barrier. Says the seconds
of a step in each block, and how much of the pipeline's time was spent waiting, predicted and measured.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.talk import say
from shoal.libs.planning.predict.simulate_pipeline import simulate_step
from shoal.models.decoder import Decoder
from shoal.parallel import ParallelSpec, World
from shoal.parallel.pipeline.model import PipelineModel, build_pipeline
from shoal.parallel.pipeline.stages import StageClock

BATCH, MICRO_BATCHES, LENGTH, VOCABULARY = 128, 16, 64, 256
WIDTH, DEPTH, HEADS = 192, 8, 4
STEPS, WARM_BLOCKS = 1, 1


class NextToken:
    """What a pipeline asks of a task."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {}

    def tensor_plan(self) -> None:
        return None

    def pipeline_cuts(self) -> None:
        return None


def model() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS)


def main(schedule: str, num_blocks: int) -> None:
    """Take turns."""
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch, task = (tokens[:, :-1], tokens[:, 1:]), NextToken()
    spec = ParallelSpec.model_validate({"pipeline": 2, "schedule": schedule, "micro_batches": MICRO_BATCHES})
    pipeline = build_pipeline(model(), task, spec, spec.resolve_dims(2), world, batch, seed=0)
    assert isinstance(pipeline, PipelineModel)
    optimizer = torch.optim.Adam([parameter for _, parameter in pipeline.named_parameters()], fused=True)
    alone = model()
    by_hand = torch.optim.Adam(alone.parameters(), fused=True)
    ours_s: list[float] = []
    peer_s: list[float] = []
    for block in range(num_blocks + WARM_BLOCKS):
        if block == WARM_BLOCKS:
            pipeline.clock.reset()
        world.barrier()
        began_s = time.perf_counter()
        for step in range(STEPS):
            pipeline.train_step(batch, step)
            optimizer.step()
        world.barrier()
        ours_s.append((time.perf_counter() - began_s) / STEPS)
        began_s = time.perf_counter()
        for _ in range(STEPS if world.is_first else 0):
            by_hand.zero_grad()
            task.loss(alone(*task.inputs(batch)), batch).backward()
            by_hand.step()
        peer_s.append((time.perf_counter() - began_s) / STEPS)
    times = [_of_a_micro_batch(each, num_blocks) for each in world.gather(pipeline.clock)]
    forward_s, backward_s = ({**times[0][kind], **times[1][kind]} for kind in (0, 1))
    stages = range(len(forward_s))
    expected = simulate_step(
        spec.schedule, 2, MICRO_BATCHES, [forward_s[each] for each in stages], [backward_s[each] for each in stages]
    )
    idle_share = measure_idle_share(pipeline)
    if world.is_first:
        cuts = [cut.module for cut in pipeline.partition.split_points]
        found = {"ours": ours_s[WARM_BLOCKS:], "peer": peer_s[WARM_BLOCKS:], "cuts": cuts}
        say(**found, idle_share=idle_share, predicted_idle_share=expected.idle_share)
    world.close()


def measure_idle_share(pipeline: PipelineModel) -> float:
    """The share of the time of all schedules so far in which ranks of this pipeline have waited. Collective.

    The schedules lasted as long as on the rank that was in them for longest: others leave them before their end.
    """
    clock, group = pipeline.clock, pipeline._groups.pipeline
    busy_s, total_s = torch.tensor([clock.busy_s, clock.total_s], dtype=torch.float64).unbind()
    dist.all_reduce(busy_s, group=group)
    dist.all_reduce(total_s, dist.ReduceOp.MAX, group=group)
    return 1.0 - float(busy_s / total_s) / dist.get_world_size(group)


def _of_a_micro_batch(clock: StageClock, num_blocks: int) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds forward and backward, by stage."""
    times = STEPS * num_blocks * MICRO_BATCHES
    return (
        {stage: spent_s / times for stage, spent_s in clock.forward_s.items()},
        {stage: spent_s / times for stage, spent_s in clock.backward_s.items()},
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
