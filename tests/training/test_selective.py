"""Selective Backprop: what is chosen, when there are gradients and whose they are, and that it resumes exactly."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.json_state import decode, encode
from shoal.errors import ConfigError
from shoal.train.optim.selective_backprop import SelectiveBackprop, _compute_sample_losses
from shoal.train.spec import SelectiveSpec, TrainSpec
from shoal.train.task import Task


class _Squares(Task):
    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (outputs - batch[1]).square().mean()


class _Stored(_Squares):
    """Takes each sample's target as its loss."""

    def sample_losses(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[1].flatten()


class _Named(NamedTuple):
    x: Tensor
    y: Tensor


class _ByName(Task):
    def inputs(self, batch: _Named) -> tuple[Tensor]:
        return (batch.x,)

    def loss(self, outputs: Tensor, batch: _Named) -> Tensor:
        return (outputs - batch.y).square().mean()


class _Whole:
    """As much of a ParallelModel as is asked for here, on one of `num_data_ranks` ranks of which all others wait."""

    def __init__(self, task: Task, num_data_ranks: int = 1, others_ready: int = 0) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.modules = [self.module]
        self.data_rank = 0
        self.num_data_ranks = num_data_ranks
        self.others_ready = others_ready
        self.task, self.stepped = task, []

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def train_step(self, batch: Any, step: int) -> Tensor:
        self.stepped.append((step, batch))
        self.module.zero_grad()
        loss = self.task.loss(self.module(*self.task.inputs(batch)), batch)
        loss.backward()
        return loss.detach()

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        return values + self.others_ready


def _made(spec: SelectiveSpec, task: Task, **ranks: int) -> tuple[_Whole, SelectiveBackprop]:
    model = _Whole(task, **ranks)
    return model, SelectiveBackprop(spec, model, task, seed=1)  # type: ignore[arg-type]


def _batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    numbers = torch.arange(count * size, dtype=torch.float32).reshape(count, size, 1)
    return [(torch.randn(size, 2), numbers[index]) for index in range(count)]


def test_samples_are_chosen_by_the_percentile_of_their_loss() -> None:
    _, selective = _made(SelectiveSpec(beta=2.0, history=1000), _Stored())
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(1000)
    num_draws = 400
    for _ in range(num_draws):
        counts[selective._choose(losses)] += 1
    expected = (losses.argsort().argsort() + 1).double() / 1000  # once the history holds these losses alone
    error = counts.double() / num_draws - expected**2
    assert float(error.abs().max()) < 5 * 0.5 / num_draws**0.5  # five standard errors of a coin
    assert float(counts.sum()) / num_draws / 1000 == pytest.approx(1 / 3, abs=0.01)


def test_it_takes_every_seed_that_a_run_takes() -> None:
    largest = 2**63 - 1
    assert TrainSpec(seed=largest).seed == largest
    model = _Whole(_Stored())
    made = SelectiveBackprop(SelectiveSpec(), model, _Stored(), seed=largest)  # type: ignore[arg-type]
    made.train_step(_batches(1)[0], 0)


def test_the_weights_move_when_a_whole_batch_was_chosen_and_by_its_samples_alone() -> None:
    model, selective = _made(SelectiveSpec(beta=1.0), _Stored())
    for step, batch in enumerate(_batches(40)):
        before = len(model.stepped)
        loss = selective.train_step(batch, step)
        assert float(loss) == pytest.approx(float(batch[1].mean()))
        has_gradients = [parameter.grad is not None for parameter in model.module.parameters()]
        assert all(has_gradients) if len(model.stepped) > before else not any(has_gradients)
    assert all(len(batch[0]) == len(batch[1]) == 8 for _, batch in model.stepped)
    seen = torch.cat([batch[1] for _, batch in model.stepped]).flatten().tolist()
    assert seen == sorted(set(seen))  # each at most once, in order
    # These losses rise for ever, so that each batch is the highest of the history: nearly all are chosen.
    assert len(model.stepped) > 30


def test_looking_at_losses_leaves_no_trace_in_the_model_or_in_chance() -> None:
    model, selective = _made(SelectiveSpec(beta=50.0), _Squares())
    model.module[2].eval()  # a part that is frozen on purpose
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    batches = _batches(3, size=64)
    random = torch.get_rng_state()
    for step, batch in enumerate(batches):
        selective.train_step(batch, step)
    assert not model.stepped
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in model.module] == [True, True, False, True]


def test_losses_of_single_samples_have_the_loss_of_the_batch_as_their_mean() -> None:
    torch.manual_seed(0)
    outputs, batch = torch.randn(6, 1), (torch.randn(6, 2), torch.randn(6, 1))
    losses = _compute_sample_losses(_Squares(), outputs, batch, 6)
    np.testing.assert_allclose(losses.numpy(), (outputs - batch[1]).square().flatten().numpy(), rtol=1e-6)


def test_a_resumed_run_chooses_the_same_samples() -> None:
    spec = SelectiveSpec(beta=1.0, history=32)
    task = _Squares()
    batches = _batches(20)
    undisturbed, selective = _made(spec, task)
    for step, batch in enumerate(batches):
        selective.train_step(batch, step)
    first, before = _made(spec, task)
    for step in range(9):
        before.train_step(batches[step], step)
    second, after = _made(spec, task)
    second.module.load_state_dict(first.module.state_dict())
    after.load_state_dict(decode(encode(before.state_dict(), "selective")))
    for step in range(9, 20):
        after.train_step(batches[step], step)
    resumed = first.stepped + second.stepped
    assert [step for step, _ in resumed] == [step for step, _ in undisturbed.stepped]
    for (_, ours), (_, theirs) in zip(resumed, undisturbed.stepped, strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_a_resumed_run_gives_its_task_named_tuples_as_before() -> None:
    spec = SelectiveSpec(beta=1.0)
    task = _ByName()
    batches = [_Named(*batch) for batch in _batches(20)]
    _, before = _made(spec, task)
    for step in range(9):
        before.train_step(batches[step], step)
    saved = before.state_dict()
    assert len(saved["waiting"].x) > 0
    model, after = _made(spec, task)
    after.load_state_dict(decode(encode(saved, "selective")))
    for step in range(9, 20):
        after.train_step(batches[step], step)
    assert model.stepped
    assert all(isinstance(batch, _Named) for _, batch in model.stepped)
    held, first = saved["waiting"].x, model.stepped[0][1].x
    assert torch.equal(first[: len(held)], held)  # the oldest are still the first


def test_a_rank_that_is_ready_waits_for_the_others_and_keeps_two_batches_at_most() -> None:
    model, selective = _made(SelectiveSpec(beta=0.0), _Stored(), num_data_ranks=2, others_ready=0)
    batches = _batches(6)
    for step in range(5):
        selective.train_step(batches[step], step)
    assert not model.stepped
    model.others_ready = 1
    selective.train_step(batches[5], 5)
    assert [step for step, _ in model.stepped] == [5]
    assert torch.equal(model.stepped[0][1][1], batches[4][1])  # the older ones were let go


def test_losses_that_are_not_one_a_sample_are_refused_with_the_remedy() -> None:
    class Wrong(_Squares):
        def sample_losses(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            return outputs.mean()

    batch = _batches(1)[0]
    with pytest.raises(ConfigError, match=r"Wrong.*shape \(\).*write Task\.sample_losses"):
        _compute_sample_losses(Wrong(), batch[1], batch, 8)
    with pytest.raises(ConfigError, match="do not have a row a sample"):
        _compute_sample_losses(_Squares(), torch.zeros(3), batch, 8)


@pytest.mark.parametrize("parallel", ["pipeline", {"pipeline": 2}])
def test_a_pipeline_refuses_it(parallel: object) -> None:
    with pytest.raises(ConfigError, match="does not go with a pipeline"):
        TrainSpec.parse({"parallel": parallel, "selective_backprop": {}})
