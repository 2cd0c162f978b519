"""Libraries on a CUDA device: self-organising maps, and regression from few rows, as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.libs.som.network import Grid, draw_weights, find_units, fit_epoch, measure_errors
from shoal.libs.tables.network import PriorFittedNetwork, predict

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hexagonal", [False, True])
@pytest.mark.parametrize("features", [8, 300])  # the latter are screened first, on a CPU
def test_a_map_is_fitted_as_on_the_cpu(device: str, hexagonal: bool, features: int) -> None:
    """In float64, in which no row is as near to two units as rounding."""
    grid, generator = Grid(6, 8, hexagonal=hexagonal, toroidal=True), torch.Generator().manual_seed(0)
    rows = torch.randn(5000, features, generator=generator, dtype=torch.float64)
    maps = [torch.stack([draw_weights(rows, grid.num_nodes, seed) for seed in (0, 1)])]
    maps.append(maps[0].to(device))
    on_device = rows.to(device)
    for sigma in (2.0, 1.0, 0.5):
        maps = [
            fit_epoch(each, weights, grid, [sigma] * 2) for each, weights in zip((rows, on_device), maps, strict=True)
        ]
        torch.testing.assert_close(maps[1].cpu(), maps[0], rtol=1e-8, atol=1e-8, msg=f"{sigma}: {{}}".format)
    assert torch.equal(find_units(on_device, maps[1]).cpu(), find_units(rows, maps[0]))
    one, other = measure_errors(on_device, maps[1][0], grid), measure_errors(rows, maps[0][0], grid)
    assert one == pytest.approx(other, abs=1e-8)


def test_few_rows_are_answered_as_on_the_cpu(device: str) -> None:
    torch.manual_seed(0)
    network = PriorFittedNetwork(width=32, depth=1).eval()
    random = np.random.default_rng(0)
    X, query = random.standard_normal((9, 4)), random.standard_normal((5, 4))
    X[2, 1] = np.nan
    y = X[:, 0] * 2 + random.standard_normal(9) * 0.1
    y[3] = np.nan
    expected = predict(network, X, y, query)
    found = predict(network.to(device), X, y, query)
    for name in ("mean", "median"):
        # The network computes in float32: thousandths of the spread of the answers.
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=5e-3, err_msg=name)
