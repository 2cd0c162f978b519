"""Models that are built on the meta device and sharded have the weights, and train, as if each rank had built them."""

from __future__ import annotations

import pytest
import torch

from known_configs import CONFIGS, KnownTask, make_batch
from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.deferred.build import build_deferred

RANKS, SAMPLES = 2, 4


def _train(
    name: str, world: World, num_steps: int, *, is_deferred: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model, deferred = build_deferred(CONFIGS[name]) if is_deferred else (CONFIGS[name](), None)
    spec = ParallelSpec(shard=True)

    def share(seed: int) -> tuple[torch.Tensor, ...]:
        return tuple(each.chunk(RANKS)[world.rank] for each in make_batch(name, SAMPLES, seed))

    parallel = parallelize(model, KnownTask(), spec, spec.resolve_dims(RANKS), world, share(0), 0, deferred)
    optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], 0.01)
    losses, state = [], torch.get_rng_state()
    for step in range(num_steps):
        losses.append(float(parallel.train_step(share(step), step)))
        optimizer.step()
    parallel.close()
    return [*losses, float(state.double().sum())], parallel.full_weights()


def _compare(world: World, num_steps: int) -> list[tuple[str, bool]]:
    found = []
    for name in CONFIGS:
        (expected, weights), (losses, others) = (
            _train(name, world, num_steps, is_deferred=is_deferred) for is_deferred in (False, True)
        )
        same = weights.keys() == others.keys() and all(torch.equal(weights[each], others[each]) for each in weights)
        found.append((name, same and losses == expected))
    return found


def test_ten_known_models_train_bit_for_bit_as_if_built_whole() -> None:
    pytest.importorskip("transformers")
    for rank in run_ranks(_compare, RANKS, 2):
        assert rank == [(name, True) for name in CONFIGS]
