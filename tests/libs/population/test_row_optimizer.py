"""Optimizers over rows against torch.optim, each member with its own hyper-parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.libs.population.member_rows import MemberRows, RowLayout
from shoal.libs.population.row_optimizer import RowOptimizer

NUM_MEMBERS, NUM_STEPS = 3, 20
RATES, MOMENTA, DECAYS = [0.1, 0.01, 0.03], [0.9, 0.0, 0.5], [0.0, 0.1, 0.01]
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
