"""The averaged weights against their formula; swapping them in and out; sharded by FSDP; and histograms."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.train.loop.step_reports import compute_histogram
from shoal.train.optim.ema import WeightAverage


class _Whole:
    """As much of a ParallelModel as is asked for here."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [module]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.modules[0].named_parameters()

    def model_state(self) -> dict[str, Any]:
        return self.modules[0].state_dict()


@pytest.fixture
def mesh(group_of_one: dist.ProcessGroup) -> Any:
    return init_device_mesh("cpu", (1,))


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _disturb(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape))


def test_it_is_the_average_that_the_formula_says() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(_Whole(module), decay=0.2)  # type: ignore[arg-type]
    expected = module.weight.detach().numpy().astype(np.float64)
    for decay in (1 / 10, 2 / 11, 0.2, 0.2):  # it begins low
        _disturb(module)
        average.update()
        expected = decay * expected + (1 - decay) * module.weight.detach().numpy()
    live = module.weight.detach().clone()
    with average.apply():
        np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-6, atol=1e-6)  # float32
    assert torch.equal(module.weight, live)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_averaged_although_a_step_is_less_than_they_can_hold(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 2, dtype=dtype)
    decay = 0.999
    num_steps = 3000
    average = WeightAverage(_Whole(module), decay)  # type: ignore[arg-type]
    nn.init.ones_(module.weight)
    average.reset()
    average.num_updates = 9 * num_steps  # past the low beginning
    nn.init.constant_(module.weight, 1.5)
    for step in range(num_steps):
        average.update()
        if step % 100 == 0:
            with average.apply():  # rounds the weights, and not the averages
                pass
    assert (module.weight == 1.5).all()
    expected = 1.5 - 0.5 * decay**num_steps
    with average.apply():
        assert module.weight[0, 0].item() == pytest.approx(expected, rel=2**-8)  # of bfloat16's eight bits
    assert (module.weight == 1.5).all()
    torch.testing.assert_close(average.state_dict()["weights"]["weight"], torch.full((2, 3), expected))


def test_complex_weights_are_averaged_too() -> None:
    module = nn.Module()
    module.turn = nn.Parameter(torch.tensor([1 + 2j]))
    average = WeightAverage(_Whole(module), decay=0.05)  # type: ignore[arg-type]
    with torch.no_grad():
        module.turn.fill_(3 - 2j)
    average.update()
    with average.apply():
        torch.testing.assert_close(module.turn.detach(), torch.tensor([0.05 * (1 + 2j) + 0.95 * (3 - 2j)]))


def test_the_weights_come_back_to_the_bit_also_after_an_error_and_buffers_stay() -> None:
    module = _network()
    average = WeightAverage(_Whole(module), decay=0.9)  # type: ignore[arg-type]
    _disturb(module)
    module(torch.randn(8, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def fail_within() -> None:
        with average.apply():
            assert not torch.equal(module[0].weight, before["0.weight"])
            assert torch.equal(module[1].running_mean, before["1.running_mean"])
            raise ValueError

    with pytest.raises(ValueError):
        fail_within()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_checkpoint_of_it_goes_on_alike() -> None:
    first, second = (WeightAverage(_Whole(_network()), decay=0.5) for _ in range(2))  # type: ignore[arg-type]
    for average, num_steps in ((first, 3), (second, 1)):
        torch.manual_seed(1)
        for _ in range(num_steps):
            _disturb(average._model.modules[0])
            average.update()
    second._model.modules[0].load_state_dict(first._model.modules[0].state_dict())
    second.load_state_dict(first.state_dict())
    for average in (first, second):
        torch.manual_seed(2)
        _disturb(average._model.modules[0])
        average.update()
    ours, theirs = first.state_dict(), second.state_dict()
    assert int(ours["num_updates"]) == int(theirs["num_updates"]) == 4
    assert all(torch.equal(value, theirs["weights"][name]) for name, value in ours["weights"].items())


def test_sharded_weights_are_averaged_in_their_shards(mesh: Any) -> None:
    plain, sharded = _network(), _network()
    fully_shard(sharded, mesh=mesh)
    averages = [WeightAverage(_Whole(module), decay=0.9) for module in (plain, sharded)]  # type: ignore[arg-type]
    inputs = torch.randn(8, 3)
    for module, average in zip((plain, sharded), averages, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(inputs).square().sum().backward()
            optimizer.step()
            average.update()
    assert all(isinstance(value, DTensor) for value in averages[1].state_dict()["weights"].values())
    outputs = []
    for module, average in zip((plain, sharded), averages, strict=True):
        module.eval()
        with torch.no_grad():
            live = module(inputs)  # FSDP keeps the root's whole weights after this
            with average.apply():
                outputs.append(module(inputs))
            assert torch.equal(module(inputs), live)
        assert not torch.allclose(outputs[-1], live)
    torch.testing.assert_close(outputs[0], outputs[1])


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([float("nan"), float("inf")])])
    found = compute_histogram(values, 32)
    assert found is not None
    counts, edges = found
    expected, _ = np.histogram(values[:1000].numpy(), bins=edges)
    assert counts.sum() == 1000
    assert np.abs(counts - expected).sum() <= 2  # a value on an edge may fall on either side
    assert compute_histogram(torch.tensor([float("nan")])) is None
    assert compute_histogram(torch.zeros(0)) is None
    constant = compute_histogram(torch.full((7,), 3.0))
    assert constant[0].sum() == 7


def test_a_histogram_of_complex_values_has_both_parts_and_of_a_sparse_gradient_its_values() -> None:
    table = nn.Embedding(100, 2, sparse=True)
    table(torch.tensor([3, 3, 7])).sum().backward()
    assert table.weight.grad is not None
    for values, expected in ((torch.tensor([1 - 1j, 3 + 2j]), 4), (table.weight.grad, 4)):
        found = compute_histogram(values)
        assert found[0].sum() == expected
    found = compute_histogram(torch.tensor([1 - 1j, 3 + 2j]))
    assert (found[1][0], found[1][-1]) == (-1.0, 3.0)


def test_a_bin_holds_more_values_than_can_be_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, histc = 16, torch.histc  # as if float32 were full at 16 in place of 2**24
    monkeypatch.setattr("shoal.train.loop.step_reports.CHUNK_SIZE", limit)
    monkeypatch.setattr(torch, "histc", lambda *arguments: histc(*arguments).clamp(max=limit))
    found = compute_histogram(torch.cat([torch.zeros(100), torch.ones(37)]), 2)
    assert found[0].dtype == np.int64
    assert found[0].tolist() == [100, 37]
