"""States of eight bits: sharded they learn as in one process, any plan goes on from a checkpoint, the loss falls."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import global_batch, share
from torch import Tensor, nn

from learnable import Classifier
from programs import run_ranks
from shoal.checkpoint.checkpointer import Checkpointer
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
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
