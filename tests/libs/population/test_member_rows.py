"""Rows of members: views by name, copies, ordinary state dicts; and optimizers over rows against torch.optim."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError, SpecMismatch
from shoal.libs.population.member_rows import MemberRows, RowLayout
from shoal.libs.population.row_optimizer import RowOptimizer


class Tied(nn.Module):
    """Two names of one weight, a frozen parameter, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.convolution = nn.Conv2d(2, 4, 3)
        self.scale = nn.Parameter(torch.rand(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.rand(2), persistent=False)


def make_rows(num_members: int = 3, device: str = "cpu") -> tuple[MemberRows, list[Tied]]:
    models = [Tied() for _ in range(num_members)]
    rows = MemberRows(RowLayout(models[0], torch.device(device)), num_members, ["momentum"])
    for row, model in enumerate(models):
        model.norm.num_batches_tracked.fill_(row + 5)
        rows.load_model(row, model)
    return rows, models


def test_a_member_leaves_as_the_state_dict_that_it_came_from() -> None:
    rows, models = make_rows()
    for row, model in enumerate(models):
        state = rows.state_dict(row)
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value)
            assert state[name].is_contiguous()
        Tied().load_state_dict(state)
        assert torch.equal(rows.buffers["hidden"][row], model.hidden)


def test_tensors_of_a_cuda_device_are_aligned_and_saved_as_those_of_a_cpu() -> None:
    rows, _ = make_rows(device="cuda")  # its layout, in host memory
    for views in (rows.parameters, rows.gradient_views, rows.buffers):
        for name, view in views.items():
            assert all(view[row].storage_offset() * view.element_size() % 16 == 0 for row in range(3)), name
    rows.slots["momentum"].normal_()
    plain, _ = make_rows()
    plain.load_packed_state(rows.packed_state())
    for row in range(3):
        for name, value in plain.state_dict(row).items():
            assert torch.equal(value, rows.state_dict(row)[name])
    assert {name: each.shape for name, each in plain.state().items()} == {
        name: each.shape for name, each in rows.packed_state().items()
    }
    again, _ = make_rows(device="cuda")
    again.load_packed_state(plain.packed_state())
    for name, each in again.packed_state().items():
        assert torch.equal(each, plain.state()[name])


def test_copy_takes_everything_of_a_member_and_nothing_of_others() -> None:
    rows, _ = make_rows()
    rows.slots["momentum"].normal_()
    rows.steps.copy_(torch.arange(3.0))
    before = {name: each.clone() for name, each in rows.state().items()}
    rows.copy(2, 0)
    for name, each in rows.state().items():
        assert torch.equal(each, before[name][[2, 1, 2]])


def test_a_loaded_member_forgets_its_optimizer() -> None:
    rows, models = make_rows()
    rows.slots["momentum"].fill_(1)
    rows.steps.fill_(9)
    rows.load_state_dict(1, models[0].state_dict())
    assert rows.slots["momentum"].sum(1).tolist() == [rows.layout.num_parameters, 0, rows.layout.num_parameters]
    assert rows.steps.tolist() == [9, 0, 9]


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    rows, models = make_rows()
    before = rows.weights.clone()
    state = models[0].state_dict()
    with pytest.raises(SpecMismatch, match=r"first.weight is \[2, 3\]"):
        rows.load_state_dict(1, {**state, "first.weight": torch.zeros(2, 3)})
    del state["scale"]
    with pytest.raises(SpecMismatch, match="missing \\['scale'\\]"):
        rows.load_state_dict(1, state)
    assert torch.equal(rows.weights, before)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.ReLU(), "no parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "float64"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameters"),
    ],
)
def test_models_that_are_no_rows_are_refused(model: nn.Module, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RowLayout(model)


NUM_MEMBERS, NUM_STEPS = 3, 20
RATES = [0.1, 0.01, 0.03]
MOMENTA = [0.9, 0.0, 0.5]
DECAYS = [0.0, 0.1, 0.01]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32: sums in another order


def make_oracle(name: str, member: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": RATES[member], "weight_decay": DECAYS[member]}
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=MOMENTA[member], **options)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, **options)


@pytest.mark.parametrize("width", [4, 300])  # small rows, and rows that are updated one by one
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_every_member_equals_torch(name: Any, width: int) -> None:
    optimizer, model = RowOptimizer(name), nn.Linear(width, width)
    rows = MemberRows(RowLayout(model), NUM_MEMBERS, optimizer.slots)
    generator = torch.Generator().manual_seed(1)
    rows.weights.normal_(generator=generator)
    solo = [nn.Parameter(row.clone()) for row in rows.weights]
    oracles = [make_oracle(name, member, [each]) for member, each in enumerate(solo)]
    names = ("learning_rate", "momentum", "weight_decay")
    columns = {key: torch.tensor(each).unsqueeze(1) for key, each in zip(names, (RATES, MOMENTA, DECAYS), strict=True)}
    for _ in range(NUM_STEPS):
        rows.gradients.normal_(generator=generator)
        for member, (parameter, oracle) in enumerate(zip(solo, oracles, strict=True)):
            parameter.grad = rows.gradients[member].clone()
            oracle.step()
        optimizer.update(rows, columns)
    torch.testing.assert_close(rows.weights, torch.stack([each.detach() for each in solo]), **TOLERANCE)


@pytest.mark.parametrize("width", [4, 300])
def test_a_member_that_joins_late_counts_its_own_steps(width: int) -> None:
    """Adam corrects its means by the number of steps: a fresh member's first step is a first step."""
    optimizer, model = RowOptimizer("adam"), nn.Linear(width, 1, bias=False)
    rows = MemberRows(RowLayout(model), 2, optimizer.slots)
    columns = {"learning_rate": torch.tensor([[0.1], [0.1]]), "weight_decay": torch.zeros(2, 1)}
    for _ in range(5):
        rows.gradients.fill_(1)
        optimizer.update(rows, columns)
    rows.load_state_dict(1, {"weight": torch.zeros(1, width)})
    rows.gradients.fill_(1)
    optimizer.update(rows, columns)
    torch.testing.assert_close(rows.weights[1], torch.full((width,), -0.1), **TOLERANCE)
    assert rows.steps.tolist() == [6, 1]
