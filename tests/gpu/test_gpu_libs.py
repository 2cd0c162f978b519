"""Libraries on a CUDA device: self-organising maps, regression from few rows, and trees, as on the CPU."""

import copy

import numpy as np
import pytest
import torch

from shoal.libs.som.network import Grid, draw_weights, find_units, fit_epoch, measure_errors
from shoal.libs.tables.network import PriorFittedNetwork, predict
from shoal.libs.trees import (
    Cell,
    ChildSumLSTMCell,
    NaryLSTMCell,
    RecursiveCell,
    RecursiveTensorCell,
    TreeBatch,
    TreeRNN,
)

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


def grow(num_nodes: int, seed: int) -> list[int]:
    """The parents of a binary tree; node 0 is the root."""
    random = np.random.default_rng(seed)
    free = [0, 0]
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(free.pop(random.integers(len(free))))
        free += [node, node]
    return parents


CELLS = {
    "child-sum": lambda: ChildSumLSTMCell(5, 6),
    "n-ary": lambda: NaryLSTMCell(5, 6, 2),
    "recursive": lambda: RecursiveCell(5, 2),
    "tensor": lambda: RecursiveTensorCell(5),
}


@pytest.mark.parametrize("shape", ["trees", "chains"])
@pytest.mark.parametrize("name", CELLS)
def test_trees_have_the_values_and_gradients_of_the_cpu(device: str, name: str, shape: str) -> None:
    """In float64, where sums in another order differ by 1e-15 of the largest."""
    if shape == "chains" and name == "tensor":
        pytest.skip("its nodes have two children or none")
    torch.manual_seed(0)
    sizes = (1, 3, 17, 40)
    parents = [grow(2 * (n // 2) + 1, n) if shape == "trees" else [*range(1, n), -1] for n in sizes]
    if shape == "trees" and name == "tensor":
        parents = [full_binary(n) for n in sizes]
    trees = TreeBatch.from_parents(parents)
    cell = CELLS[name]().double()
    values = torch.randn(trees.num_nodes, 5, dtype=torch.float64)
    weights: torch.Tensor | None = None
    found = []
    for place in ("cpu", device):
        own: Cell = copy.deepcopy(cell).to(place)
        x = values.to(place).requires_grad_()
        outputs = trees.in_node_order(TreeRNN(own)(trees.arrange_inputs(x), trees))
        weights = torch.randn_like(outputs, device="cpu") if weights is None else weights
        (outputs * weights.to(place)).sum().backward()
        named = [("outputs", outputs), ("x", x.grad), *((each, value.grad) for each, value in own.named_parameters())]
        found.append({each: None if value is None else value.detach().cpu() for each, value in named})
    for each, expected in found[0].items():
        if expected is not None:
            torch.testing.assert_close(found[1][each], expected, rtol=1e-9, atol=1e-10, msg=f"{each}: {{}}".format)


def full_binary(num_splits: int) -> list[int]:
    """The parents of a tree whose nodes have two children or none."""
    random = np.random.default_rng(num_splits)
    leaves = [0]
    parents = [-1]
    for _ in range(num_splits):
        split = leaves.pop(random.integers(len(leaves)))
        leaves += [len(parents), len(parents) + 1]
        parents += [split, split]
    return parents
