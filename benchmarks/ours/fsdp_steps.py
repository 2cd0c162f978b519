"""One rank of two: steps of a sharded decoder in bf16, by the platform and by a bare loop, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.ours.fsdp_steps STEPS

Both shard each block and the rest, gather weights in bf16, sum gradients in fp32 and step a fused AdamW. Each rank has
one core and one thread. Says the seconds of each step of each side, of our other precisions too, and the last losses.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.ours.stages import NextToken
from benchmarks.talk import say
from shoal.models.decoder import Decoder
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize

BATCH, LENGTH, VOCABULARY = 8, 64, 4096  # of both ranks
WIDTH, DEPTH, HEADS = 512, 8, 8  # 29.5 million parameters
OURS = ("bf16_params", "bf16", "fp32")
WARM_STEPS = 2
Step = Callable[[tuple[Tensor, Tensor], int], Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS)


def make_ours(precision: str, world: World, batch: tuple[Tensor, Tensor]) -> Step:
    spec = ParallelSpec.model_validate({"shard": True, "precision": precision})
    model = parallelize(make_model(), NextToken(), spec, spec.resolve_dims(world.size), world, batch)
    optimizer = torch.optim.AdamW([each for _, each in model.named_parameters()], fused=True)

    def step(batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = model.train_step(batch, index)
        optimizer.step()
        return loss

    return step


def make_bare(world: World) -> Step:
    model, mesh = make_model(), init_device_mesh("cpu", (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.children(), model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        optimizer.zero_grad()
        logits = model(batch[0]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main(num_steps: int) -> None:
    """Take turns."""
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(world.size)[world.rank]
    batch = (mine[:, :-1], mine[:, 1:])
    sides: dict[str, Step] = {each: make_ours(each, world, batch) for each in OURS}
    sides["bare"] = make_bare(world)
    spent_s: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for index in range(num_steps + WARM_STEPS):
        for name, step in sides.items() if index % 2 else reversed(sides.items()):
            if name not in (OURS[0], "bare") and index >= WARM_STEPS + num_steps // 3:
                continue  # which no bar is about
            world.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            losses[name] = float(step(batch, index))
            world.barrier()
            spent_s[name].append(time.perf_counter() - began_s)
            cpu_s[name].append(sum(world.gather(time.process_time() - began_cpu_s)))
    if world.is_first:
        after = {"spent_s": spent_s, "cpu_s": cpu_s}
        say(
            **{kind: {name: each[WARM_STEPS:] for name, each in of.items()} for kind, of in after.items()},
            losses=losses,
        )
    world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
