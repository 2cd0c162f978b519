"""Decoders of transformers, split between tensor ranks by their own plans, train as in one process."""

from typing import Any

import pytest
import torch

from known_configs import CONFIGS, WITH_PLAN, make_batch, make_planned
from learnable import Classifier
from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.tensor.plan import find_tensor_plan

SAMPLES, STEPS = 4, 2


def _train(family: str, world: World, **degrees: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    spec = ParallelSpec(**degrees)
    dims = spec.resolve_dims(world.size)
    model = CONFIGS[family]() if family in CONFIGS else make_planned(family)
    data_rank = dims.coordinates(world.rank).data

    def share(seed: int) -> tuple[torch.Tensor, ...]:
        return tuple(each.chunk(dims.data)[data_rank] for each in make_batch("llama", SAMPLES, seed))

    parallel = parallelize(model, Classifier(), spec, dims, world, share(0))
    optimizer = torch.optim.SGD([each for _, each in parallel.named_parameters()], 0.5)
    losses = []
    for step in range(STEPS):
        loss = parallel.train_step(share(step), step)
        losses.append(float(parallel.sum_over_data_ranks(loss) / dims.data))
        optimizer.step()
        parallel.on_optimizer_step()
    parallel.close()
    return losses, parallel.full_weights()


Cases = list[tuple[str, dict[str, Any]]]
SPLIT: Cases = [(family, {"data": 1, "tensor": 2}) for family in WITH_PLAN]
FOUR: Cases = [("Qwen3", {"tensor": 2, "shard": True}), ("Qwen3", {"data": 1, "tensor": 2, "pipeline": 2})]
UNSPLIT: Cases = [(family, plan) for family in ("gpt2", "bert") for plan in ({}, {"shard": True})]


def _train_all(world: World, cases: Cases) -> list[Any]:
    return [_train(family, world, **degrees) for family, degrees in cases]


@pytest.mark.parametrize(("size", "cases"), [(2, SPLIT), (4, FOUR), pytest.param(2, UNSPLIT, marks=pytest.mark.soak)])
def test_they_train_as_in_one_process(size: int, cases: Cases) -> None:
    """The gradients of what lies between split layers (normalisations of heads) are summed over the ranks."""
    pytest.importorskip("transformers")
    ranks = run_ranks(_train_all, size, cases)
    for index, (family, _) in enumerate(cases):
        losses, weights = _train(family, World.single("cpu"))
        for found in (rank[index] for rank in ranks):
            assert any(found[0])
            if found[0][0]:  # the ranks of a pipeline's last stage have the loss
                assert found[0] == pytest.approx(losses, rel=1e-4), family
        gathered = ranks[0][index][1]
        assert gathered.keys() == weights.keys()
        for name, expected in weights.items():
            torch.testing.assert_close(gathered[name], expected, rtol=2e-4, atol=2e-5, msg=f"{family}: {name}")


def test_their_own_plan_is_read() -> None:
    pytest.importorskip("transformers")
    batch = make_batch("llama", SAMPLES, 0)
    qwen = find_tensor_plan(make_planned("Qwen3"), Classifier(), 2, batch)
    assert qwen.styles["lm_head"] == "column_gathered"  # the search leaves so small a layer out
    assert qwen.styles["model.layers.1.self_attn.o_proj"] == "row"
    norms = {f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in ("q", "k")}
    assert qwen.summed == norms
    phi = find_tensor_plan(make_planned("Phi3"), Classifier(), 2, batch)
    assert phi.styles["model.layers.0.self_attn.qkv_proj"] == "column_gathered"
    assert phi.styles["model.layers.0.self_attn.o_proj"] == "row_split"
    assert "padding_idx" in phi.unsplit["model.embed_tokens"]
