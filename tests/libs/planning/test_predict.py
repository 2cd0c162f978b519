"""What is predicted for a plan: equal to what one process takes, spread over ranks; and it leaves no trace."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.cost import CostTable
from shoal.data import Data
from shoal.errors import DataError, PlanError
from shoal.libs.planning.predict.fake_process_group import NotYetSent, SimulatedRanks, fake_world
from shoal.libs.planning.predict.predict import _extrapolate, measure_transfer, predict_cost
from shoal.libs.planning.predict.rank_step import RankStep, StageTimes
from shoal.libs.planning.predict.simulate_pipeline import TransferTime
from shoal.libs.planning.predict.single_device import profile_single_device, watch_silent_modules
from shoal.parallel.comm.shm_p2p import ShmP2P
from shoal.train import Task, TrainSpec
from training.test_cost_meter import BATCH, PARAMETERS, WIDTH, Blocks

STATES = dict.fromkeys(("memory_parameters", "memory_optimizer", "memory_average", "memory_activations"), 1.0)


@pytest.fixture(autouse=True)
def _whatever_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes here decides nothing in these tests."""
    monkeypatch.setattr("shoal.libs.planning.predict.predict.BUDGET_S", 1e6)


def table(*words: str, **args: Any) -> CostTable:
    return predict_cost(Blocks(**args), TrainSpec(batch_size=BATCH).override(words))


def test_one_process_by_hand() -> None:
    found = table()
    forward = 2 * (3 * WIDTH * WIDTH + 4 * WIDTH)
    assert found["parameters"] == found["parameters_rank"] == PARAMETERS
    assert found["flops_forward_sample"] == forward
    assert found["flops_step"] == BATCH * (3 * forward - 2 * WIDTH * WIDTH)  # nothing asks for the inputs' gradient
    assert found["memory_gradients"] == found["memory_parameters"] == 4 * PARAMETERS
    assert found["memory_optimizer"] == 2 * 4 * PARAMETERS + 8 * 4  # a step of 4 bytes for each of 8 tensors
    assert found["memory_activations"] >= 4 * BATCH * 3 * WIDTH
    assert found["memory_peak"] > found["memory_parameters"] + found["memory_optimizer"] + found["memory_activations"]
    assert (found["sent_bytes"], found.unknown, found.notes) == (0, (), ())
    assert found["latency_s"] > 0
    assert found["step_s"] > 0


@pytest.mark.parametrize(
    ("plan", "sent", "held"),
    [
        pytest.param("ddp", 4 * PARAMETERS, 1.0, marks=pytest.mark.soak),  # 2 (n - 1)/n of the gradients
        ("fsdp", 4 * PARAMETERS * 1.5, 0.5),  # half is gathered twice, and half of the gradients scattered
        ("pipeline", 4 * BATCH * WIDTH, 0.7),  # what the first stage hands on
    ],
)
def test_plans_spread_what_one_process_takes(plan: str, sent: float, held: float) -> None:
    whole, found = table(), table(f"parallel={plan}", "workers=2")
    assert found["flops_step"] == whole["flops_step"]
    assert found["parameters"] == PARAMETERS
    assert found["parameters_rank"] <= held * PARAMETERS
    assert found["sent_bytes"] == pytest.approx(sent, rel=0.15)
    assert found["memory_activations"] < whole["memory_activations"]
    assert len(found.placement_rows) >= 1
    assert (found.cuts == ("3",)) == (plan == "pipeline") == (0 < found["bubble"] < 1)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", pytest.param("zbv", marks=pytest.mark.soak)])
def test_stages_that_wait_for_each_other_both_ways_are_played(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "pipeline_cuts", lambda self: ["1", "3", "5"])
    found = table("parallel=pipeline", "workers=2", f"parallel.schedule={schedule}")
    assert found["flops_step"] == table()["flops_step"]
    assert found["sent_bytes"] > 4 * BATCH * WIDTH


def test_large_batches_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = table("batch_size=256", samples=256)
    monkeypatch.setattr("shoal.libs.planning.predict.predict._choose_sizes", lambda *_: (64, 128))
    scaled = table("batch_size=256", samples=256)
    assert scaled.notes
    for name in ("flops_step", "memory_peak", "memory_activations", "memory_optimizer"):
        assert scaled[name] == pytest.approx(exact[name], rel=0.1), name


def test_a_step_is_never_predicted_to_take_less_than_one_of_fewer_samples() -> None:
    """Other load on the machine slowed the smaller of two steps."""
    small, large = (
        RankStep({"step_s": step_s, "memory_peak": peak} | STATES, times=StageTimes(busy_s={(0, "forward"): busy_s}))
        for step_s, peak, busy_s in ((0.9, 10.0, 0.4), (0.8, 12.0, 0.3))
    )
    found = _extrapolate(small, large, 31.0)
    assert (found.values["step_s"], found.values["memory_peak"]) == (0.8, 72.0)
    assert found.times.busy_s == {(0, "forward"): 0.3}


def test_it_leaves_no_trace() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    table("parallel=ddp", "workers=2")
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert torch.get_num_threads() == threads
    assert not dist.is_initialized()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError):
        table(samples=8)
    with pytest.raises(PlanError):
        table("parallel=tensor", "workers=3", "batch_size=15")
    assert not dist.is_initialized()


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("single", marks=pytest.mark.soak)])
def test_an_average_of_the_weights_takes_memory_too(plan: str) -> None:
    words = [f"parallel={plan}", f"workers={1 if plan == 'single' else 2}"]
    without, found = table(*words), table(*words, "average=0.9")
    assert without["memory_average"] == 0.0
    assert found["memory_average"] == 4 * found["parameters_rank"]
    assert found["memory_peak"] == without["memory_peak"] + found["memory_average"]


def test_a_message_takes_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time where it is taken in before the call that sends it returns."""
    threads, receive = threading.active_count(), ShmP2P.receive
    found = measure_transfer(8 << 20)
    assert 0 <= found.transit_s < 1
    assert min(found.send_s, found.take_s) > 0
    assert threading.active_count() == threads

    def late(self: ShmP2P, tensor: Tensor, sender: int) -> Any:
        time.sleep(0.03)
        return receive(self, tensor, sender)

    monkeypatch.setattr(ShmP2P, "receive", late)
    assert measure_transfer(0).transit_s > 0.03


@pytest.mark.soak
@pytest.mark.parametrize(
    ("transfer", "step_s"),
    [
        (TransferTime(transit_s=60.0), 4 * 60.0),  # there and back, twice: two are under way at a time
        (TransferTime(30.0, 0.0, 60.0), 30.0 + 4 * (60.0 + 30.0) + 60.0),  # the last rank, four times
    ],
)
def test_messages_lengthen_the_bubble(transfer: TransferTime, step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(
        "shoal.libs.planning.predict.predict.measure_transfer", lambda size: sizes.append(size) or transfer
    )
    found = table("parallel=pipeline", "workers=2")
    assert sizes == [4 * WIDTH * BATCH // 4]  # of each of four micro-batches
    assert found["step_s"] == pytest.approx(step_s, rel=0.01)


def test_a_stage_is_as_slow_as_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are timed one after the other: a core that others have for a while makes none of them the slower one."""
    loss = Blocks.loss

    def elsewhere(self: Blocks, outputs: Any, batch: Any) -> Tensor:
        time.sleep(0.03)
        return loss(self, outputs, batch)

    monkeypatch.setattr(Blocks, "loss", elsewhere)
    monkeypatch.setattr("shoal.libs.planning.predict.predict.measure_transfer", lambda _: TransferTime())
    assert table("parallel=pipeline", "workers=2")["step_s"] < 0.03  # of four micro-batches that slept as long


def test_ranks_that_are_played_in_turn_hear_what_was_said_before() -> None:
    play, value = SimulatedRanks(), torch.arange(3.0)
    with fake_world(0, 2, torch.device("cpu"), play) as world:
        assert world.broadcast("layout") == "layout"
        dist.send(value, group=dist.group.WORLD, group_dst=1)
    with fake_world(1, 2, torch.device("cpu"), play) as world:
        assert world.broadcast("ignored") == "layout"
        found = torch.zeros(3)
        dist.recv(found, group=dist.group.WORLD, group_src=0)
        assert found.equal(value)
        with pytest.raises(NotYetSent):
            dist.recv(found, group=dist.group.WORLD, group_src=0)
        with pytest.raises(NotYetSent):
            world.broadcast("more")
    with fake_world(0, 2, torch.device("cpu"), play) as world:
        assert world.broadcast("another") == "layout"  # a rank that is played again decides as before
    assert not dist.is_initialized()


class OnFrozen(nn.Module):
    """A frozen encoder, in evaluation mode and without gradients, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            encoded = self.encoder(values)
        output: Tensor = self.head(encoded)
        return output


class Frozen(Task):
    def model(self) -> nn.Module:
        return OnFrozen()

    def data(self) -> Data:
        features = torch.randn(8, 3, 8)
        return Data(TensorDataset(features, features[:, 0, 0]))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.mean()


def test_frozen_layers_are_looked_at_as_they_are_trained() -> None:
    task = Frozen()
    model = task.model()
    alone = profile_single_device(task, model, task.data(), 4, torch.device("cpu"))
    assert alone.unknown == ("aten._native_multi_head_attention",)  # the fast path of layers that are not trained
    assert model.training
    assert not any(each.training for each in model.encoder.modules())


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(inputs.detach()) @ np.asarray(weight.detach()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None


class InNumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = _Outside.apply(inputs, self.weight)
        return result


def test_a_module_that_computes_where_torch_does_not_see_it_is_named() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), InNumPy(), nn.Linear(4, 2), nn.LSTM(2, 2))
    with watch_silent_modules(model) as silent:
        model(torch.zeros(3, dtype=torch.int64))
    assert silent == ["1 (InNumPy)"]
