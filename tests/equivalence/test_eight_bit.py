"""States of eight bits under plans, and decoders of transformers under their own plan: as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import global_batch, share
from torch import Tensor, nn

from known_configs import CONFIGS, WITH_PLAN, make_batch, make_planned
from learnable import Classifier
from programs import run_ranks
from shoal.checkpoint.checkpointer import Checkpointer
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.parallel.tensor.plan import find_tensor_plan
from shoal.train.optim.optimizers import make_optimizer, restore_spec_settings
from shoal.train.spec import OptimizerSpec
from shoal.train.task import Task

pytest.importorskip("torchao")
EIGHT_BIT = OptimizerSpec(name="adamw_8bit", learning_rate=0.01, weight_decay=0.01)
STEPS = 3


def _make(spec: ParallelSpec, world: World, optimizer: OptimizerSpec) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Embedding(72, 64), nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 72))
    degrees = spec.resolve_dims(world.size)
    model = parallelize(layers, Classifier(), spec, degrees, world, share(global_batch(0), 0, degrees.data))
    return model, make_optimizer(Task(), optimizer, [each for _, each in model.named_parameters()])


def _learn(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = share(global_batch(step % 3), model.data_rank, model.num_data_ranks)
        losses.append(float(model.sum_over_data_ranks(model.train_step(batch, step)) / model.num_data_ranks))
        optimizer.step()
    return losses


Steps = tuple[list[float], dict[str, Tensor], int]


def _take_steps(world: World, plan: dict[str, Any], folder: Path, begin: int, *, is_copied: bool = True) -> Steps:
    """STEPS steps, from the checkpoint of step `begin` if that is above 0: losses, weights, values in eight bits.

    is_copied: what is saved, before it is written
    """
    model, optimizer = _make(ParallelSpec.parse(plan), world, EIGHT_BIT)
    if begin:
        state = {"model": model.model_state(), "optimizer": model.optimizer_state(optimizer, to_fill=True)}
        with Checkpointer(folder) as checkpointer:
            checkpointer.load(checkpointer.find(begin), state)
        model.load_model_state(state["model"])
        model.load_optimizer_state(optimizer, state["optimizer"])
        restore_spec_settings(optimizer, EIGHT_BIT)
    losses = _learn(model, optimizer, range(begin, begin + STEPS))
    if not begin:
        state = {"model": model.model_state(), "optimizer": model.optimizer_state(optimizer)}
        with Checkpointer(folder, asynchronous=is_copied) as checkpointer:
            checkpointer.save(STEPS, state)
        saved = [_list_codes(each["state"]) for each in state["optimizer"].values()]
        assert saved == [_list_codes(optimizer.state[each]) for _, each in model.named_parameters()]
    codes = [each for kept in optimizer.state.values() for each in _list_codes(kept)]
    return losses, model.full_weights(), sum(size for _, size in codes)


def _compare(world: World, folder: Path, is_copied: bool) -> tuple[list[float], Steps, Steps, Steps]:
    """The losses of one process; the steps of shards; of copies, and of one process, from their checkpoint."""
    alone = World.single("cpu")
    expected = _learn(*_make(ParallelSpec(), alone, EIGHT_BIT), range(2 * STEPS))
    shards = _take_steps(world, {"shard": True}, folder, 0, is_copied=is_copied)
    return expected, shards, _take_steps(world, {}, folder, STEPS), _take_steps(alone, {}, folder, STEPS)


def _list_codes(state: dict[str, Any]) -> list[tuple[int, int]]:
    """Address and size of the values in eight bits."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in state.values()]
    return [(each.codes.data_ptr(), each.codes.numel()) for each in local if hasattr(each, "codes")]


@pytest.mark.parametrize("is_copied", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_shards_learn_as_one_process_and_others_go_on_from_their_checkpoint(tmp_path: Path, is_copied: bool) -> None:
    for expected, (losses, _, sharded), (copied, others, _), (alone, weights, whole) in run_ranks(
        _compare, 2, tmp_path, is_copied
    ):
        torch.testing.assert_close(losses, expected[:STEPS], rtol=1e-4, atol=0.0)
        torch.testing.assert_close(alone, expected[STEPS:], rtol=2e-2, atol=0.0)  # quantised anew, in other blocks
        torch.testing.assert_close(copied, alone, rtol=1e-4, atol=0.0)
        for name, weight in others.items():
            torch.testing.assert_close(weight, weights[name], rtol=0.0, atol=1e-3)
        assert whole == 2 * (72 * 64 + 384 * 64 + 64 * 72)  # two states; biases are too small
        assert sharded == 2 * (384 * 64) // 2  # of half a matrix; half of the others is too small


def test_the_loss_falls_as_with_whole_states() -> None:
    ends = run_ranks(_regress, 1)[0]
    assert ends["adam"] < 0.05
    assert ends["adam_8bit"] == pytest.approx(ends["adam"], rel=0.1)
    assert ends["adamw_8bit"] == pytest.approx(ends["adamw"], rel=0.1)


def _regress(world: World) -> dict[str, float]:
    """The loss of a regression onto a rotation, of one matrix, after 40 steps of each optimiser."""
    torch.manual_seed(0)
    inputs, target = torch.randn(128, 64), torch.linalg.qr(torch.randn(64, 64)).Q
    ends: dict[str, float] = {}
    for name in ("adam", "adam_8bit", "adamw", "adamw_8bit"):
        layer = nn.Linear(64, 64, bias=False, device="cpu")
        nn.init.zeros_(layer.weight)
        optimizer = make_optimizer(Task(), OptimizerSpec(name=name, learning_rate=0.01), layer.parameters())
        for _ in range(40):
            optimizer.zero_grad()
            loss = (layer(inputs) - inputs @ target).square().mean()
            loss.backward()
            optimizer.step()
        ends[name] = float(loss.detach())
    return ends


# -- decoders of transformers, split between tensor ranks by their own plans


SAMPLES, NUM_STEPS = 4, 2


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
    for step in range(NUM_STEPS):
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
