"""A training of a large decoder as PyTorch's documentation writes it: meta device, `fully_shard`, `to_empty`.

    torchrun --nproc-per-node 2 benchmarks/peers/fully_shard.py FOLDER WIDTH DEPTH STEPS BATCH [bf16]

Each rank draws its own shards, which are others than those of the whole model. It writes what
`benchmarks.ours.large_decoder` writes.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.ours.large_decoder import Notes, make_decoder, make_tokens, read_resident_bytes


class State:
    """What the notes read."""

    loss: torch.Tensor


def main() -> None:
    folder, width, depth, steps, batch_size, *words = sys.argv[1:]
    before_bytes = read_resident_bytes("VmRSS")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    with torch.device("meta"):
        model = make_decoder(int(width), int(depth))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in words else MixedPrecisionPolicy()
    for name, block in model.named_children():
        if name.startswith("block"):
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    tokens, notes, state = make_tokens(64), Notes(folder, before_bytes), State()
    share = int(batch_size) // size
    for step in range(int(steps)):
        batch = tokens[torch.arange(share) + share * (step * size + rank) % 64]
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        state.loss = loss.detach()
        notes.on_step(state)  # type: ignore[arg-type]
    dist.destroy_process_group()


if __name__ == "__main__":
    began_s = time.time()
    main()
