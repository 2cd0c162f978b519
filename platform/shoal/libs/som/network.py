"""A self-organising map by Kohonen's batch rule: grid, search of best-matching units, epochs, and the map as a network.

    T. Kohonen, Self-Organizing Maps, 3rd ed., Springer, 2001, section 3.6 (the batch map)

An epoch finds each row's best-matching unit, sums rows and counts by unit, and smooths both sums over the grid:
w_k = sum_j h(j, k) S_j / sum_j h(j, k) n_j. The sums are all that data-parallel ranks exchange. Pure functions of
tensors, but for `SelfOrganisingMap`. Called by jobs/som.py and by endpoints; never reads data.

Legend: N rows, B rows of a tile, D features, M maps, K nodes of a map, R and C rows and columns of the grid, F values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import DataError

TILE = 512  # rows: scores against 900 nodes take 1.8 MB, and stay in the cache
CUDA_TILE = 16_384
RANKS = (40, 80, 160)  # of the screen's subspace
MIN_FEATURES, MIN_ROWS = 256, 4096  # below, the screen costs more than it saves
PAIRS = 128  # candidates that are compared at once
LARGEST_NUMBER = 1e100
PAIR_COST = 120.0  # of a feature of a gathered candidate, in multiply-adds of a matrix product
SumOverRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Grid:
    """The nodes' places, one apart from their neighbours; node k is in row k // columns, column k % columns.

    hexagonal: odd rows are shifted by half a column, and rows lie sqrt(3)/2 apart
    toroidal:  the first row and column are neighbours of the last; a hexagonal grid then needs an even number of rows
    """

    rows: int
    columns: int
    hexagonal: bool = False
    toroidal: bool = False

    @property
    def num_nodes(self) -> int:
        return self.rows * self.columns

    @property
    def default_sigma(self) -> float:
        """Half of half the shorter side, as fastersom has it."""
        return math.ceil(min(self.rows, self.columns) / 2) / 2

    @property
    def row_distance(self) -> float:
        return math.sqrt(0.75) if self.hexagonal else 1.0

    def squared_distances(self, nodes: Tensor, others: Tensor) -> Tensor:
        """Squared distances on the grid, float64, of pairs of nodes: int64 of one shape."""
        ys, xs = [], []
        for each in (nodes, others):
            row, column = each // self.columns, each % self.columns
            ys.append(row.double() * self.row_distance)
            xs.append(column.double() + (0.5 * (row % 2) if self.hexagonal else 0.0))
        return self._wrap(ys[0] - ys[1], self.rows * self.row_distance) + self._wrap(xs[0] - xs[1], self.columns)

    def are_adjacent(self, nodes: Tensor, others: Tensor) -> Tensor:
        """Whether pairs of nodes are neighbours: the 8 around a node, or the 6 of a hexagonal grid."""
        return self.squared_distances(nodes, others) < (1.5 if self.hexagonal else 2.5)

    def find_neighbours(self) -> tuple[Tensor, Tensor]:
        """Pairs of adjacent nodes, int64 [2, pairs]: every pair in both orders."""
        node = torch.arange(self.num_nodes)
        steps = torch.arange(-1, 2)
        down, right = torch.cartesian_prod(steps, steps).T.unsqueeze(2)  # [9, 1] each
        row = node // self.columns + down  # [9, K]
        column = node % self.columns + right
        if self.toroidal:
            row, column = row % self.rows, column % self.columns
        is_inside = (row == row.clamp(0, self.rows - 1)) & (column == column.clamp(0, self.columns - 1))
        pairs = torch.stack([node.expand_as(row), row * self.columns + column])[:, is_inside].unique(dim=1)
        first, second = pairs[:, self.are_adjacent(*pairs) & (pairs[0] != pairs[1])]
        return first, second

    def smooth(self, sums: Tensor, sigma: float) -> Tensor:
        """sum_j h(j, k) sums_j, [K, F], with the Gaussian h(j, k) = exp(-d(j, k)^2 / 2 sigma^2).

        h is a product of a factor of the rows and one of the columns: two small matrix products. On a hexagonal grid
        the factor of the columns also depends on whether the two rows' parities differ: once for each target parity.
        """
        grid = sums.view(self.rows, self.columns, -1)
        across = {shift: self._kernel(self.columns, 1.0, sigma, grid, shift) for shift in (-0.5, 0.0, 0.5)}
        down = self._kernel(self.rows, self.row_distance, sigma, grid)
        if not self.hexagonal:
            return (down @ (across[0.0] @ grid).view(self.rows, -1)).view(self.num_nodes, -1)
        smoothed = torch.empty_like(grid)
        for parity in (0, 1):
            moved = torch.empty_like(grid)
            for source in (0, 1):
                moved[source::2] = across[(parity - source) / 2] @ grid[source::2]
            smoothed[parity::2] = (down[parity::2] @ moved.view(self.rows, -1)).view(-1, *grid.shape[1:])
        return smoothed.view(self.num_nodes, -1)

    def _kernel(self, size: int, distance: float, sigma: float, like: Tensor, shift: float = 0.0) -> Tensor:
        """[size, size]: the Gaussian along one axis; `shift` moves the targets."""
        position = torch.arange(size, device=like.device, dtype=torch.float64) * distance
        squared = self._wrap(position[:, None] + shift - position, size * distance)
        return (squared / (-2 * sigma**2)).exp().to(like.dtype)

    def _wrap(self, difference: Tensor, period: float) -> Tensor:
        """Squared; on a torus the shorter way round."""
        if self.toroidal:
            difference = difference - period * (difference / period).round()
        return difference.square()


def compute_sigma(epoch: int, epochs: int, first: float, last: float) -> float:
    """The neighbourhood's width: exponential decay from `first`, towards `last` after the final epoch."""
    return first * math.pow(last / first, epoch / epochs)


# -- the search


class UnitSearch:
    """Finds the nearest of a map's nodes, exactly but for rounding, for tiles of rows.

    Scores are |w|^2 - 2 x.w, around the mean node. With many features they are screened first: in a subspace with the
    orthonormal basis V, in which nearly all of the nodes lie, scores are |w|^2 - 2 V'x.V'w, and by Cauchy-Schwarz they
    are off by no more than 2 |x'| |w'|, the lengths of what lies outside. Nodes that this leaves as candidates are
    compared by their true distances. Nodes are smooth over the grid: a wide neighbourhood makes them nearly low-rank.
    """

    def __init__(self, weights: Tensor, probe: Tensor, ranks: tuple[int, ...] = RANKS) -> None:
        """weights: [K, D]; probe: rows [B, D] by which the rank of the screen is chosen; ranks: () for none."""
        self.weights = weights
        num_nodes, num_features = weights.shape
        self.centre = weights.mean(0)
        self.nodes = weights - self.centre
        self.lengths = self.nodes.square().sum(1)  # [K]
        self.base = float(1 << num_nodes.bit_length())
        self.codes = torch.arange(num_nodes, device=weights.device).to(weights.dtype) + self.base
        self._scores = weights.new_empty(0, num_nodes)
        self.rank = num_features
        if ranks and num_features >= MIN_FEATURES and not weights.is_cuda:
            self._choose_screen(probe, ranks)

    def find(self, rows: Tensor) -> Tensor:
        """The best-matching units of rows [B, D]: int64 [B]."""
        moved = rows - self.centre
        if rows.is_cuda:
            return self._score(moved, self.nodes).argmin(1)
        is_screened = self.rank < rows.shape[1]
        if is_screened:
            hits = self._screen(moved, self.basis, self.shadows, self.slack)
        else:  # [B, K]: 1 where a node has the least score, else 0
            scores = self._score(moved, self.nodes)
            hits = torch.le(scores, scores.amin(1, keepdim=True), out=scores)
        # argmin takes four times as long as a minimum, a comparison and a product with a vector
        code = hits @ self.codes
        unit = (code - self.base).long()
        several = (code >= 2 * self.base).nonzero()[:, 0]
        if len(several):
            unit[several] = self._compare(rows, several, hits) if is_screened else hits[several].argmax(1)
        return unit

    def _screen(self, moved: Tensor, basis: Tensor, shadows: Tensor, slack: Tensor) -> Tensor:
        """[B, K]: 1 where a node may be the nearest, 0 where it cannot."""
        inside, length = moved @ basis, moved.square().sum(1)
        outside = (length - inside.square().sum(1)).clamp_(min=0).sqrt_()
        scores = self._score(inside, shadows)
        rounding = 8 * torch.finfo(scores.dtype).eps * (length + self.lengths.max())
        limit = scores.amin(1) + 4 * outside * slack + rounding
        return torch.le(scores, limit[:, None], out=scores)

    def _compare(self, rows: Tensor, several: Tensor, hits: Tensor) -> Tensor:
        """The nearest of the candidates of some rows, and of equal ones the first."""
        row, node = hits[several].nonzero(as_tuple=True)
        parts = zip(row.split(PAIRS), node.split(PAIRS), strict=True)  # a part's differences stay in the cache
        distances = torch.cat([(rows[several[at]] - self.weights[to]).square_().sum(1) for at, to in parts])
        nearest = distances.new_full((len(several),), math.inf).scatter_reduce_(0, row, distances, "amin")
        is_nearest = distances == nearest[row]
        first = node.new_full((len(several),), len(self.codes))
        return first.scatter_reduce_(0, row[is_nearest], node[is_nearest], "amin")

    def _score(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[B, K], in memory that the next call uses again: fresh memory would cost a page fault every 4 KiB."""
        if len(self._scores) < len(rows):
            self._scores = rows.new_empty(len(rows), len(nodes))
        return torch.addmm(self.lengths, rows, nodes.T, alpha=-2, out=self._scores[: len(rows)])

    def _choose_screen(self, probe: Tensor, ranks: tuple[int, ...]) -> None:
        """Take the rank with the least cost, by the candidates that it leaves in a tile; none if that is no gain."""
        num_nodes, num_features = self.weights.shape
        basis = find_subspace(self.nodes, max(ranks))
        best = float(num_nodes * num_features)
        for rank in sorted({min(rank, basis.shape[1]) for rank in ranks}):
            part = basis[:, :rank].contiguous()
            shadows = self.nodes @ part  # [K, rank]
            slack = (self.nodes - shadows @ part.T).norm(dim=1).max()
            remaining = self._screen(probe - self.centre, part, shadows, slack).sum().item() / len(probe)
            cost = rank * (num_features + num_nodes) + (remaining - 1) * num_features * PAIR_COST
            if cost < best:
                best = cost
                self.rank = rank
                self.basis = part
                self.shadows = shadows
                self.slack = slack


def find_subspace(nodes: Tensor, rank: int) -> Tensor:
    """An orthonormal basis [D, at most rank] of nearly all of the nodes [K, D], the longest directions first.

    Subspace iteration from a random start: N. Halko et al. (arXiv:0909.4061), algorithm 4.4. A worse basis makes the
    search slower, never wrong.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        _, _, basis = torch.svd_lowrank(nodes, min(rank, *nodes.shape))
    return basis


# -- epochs and errors


def require_scale(table: Tensor, names: Sequence[str], dtype: torch.dtype | None) -> None:
    """Check that squared distances between rows [N, D] neither overflow in `dtype` nor vanish; None: after each column
    has been scaled. Raises DataError naming the column with the largest numbers."""
    span = table.amax(0) - table.amin(0)
    at = int((largest := table.abs().amax(0)).argmax())
    if largest[at] > LARGEST_NUMBER:
        problem = f"has {float(largest[at]):g}, whose square overflows"
        raise DataError("column", names[at], problem, f"give it a unit with numbers below {LARGEST_NUMBER:g}")
    if dtype is None or not span.any():
        return
    at = int(span.argmax())
    total = float(span.square().sum())
    limits = torch.finfo(dtype)
    if not limits.tiny < total < limits.max / 4:
        fate = "vanish" if total < 1 else "overflow"
        problem = f"spans {float(span[at]):g}, and squared distances {fate} in {dtype}"
        raise DataError("column", names[at], problem, "use standardise=true, dtype=float64, or another unit")


def measure_columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [D] of float64 [N, D]; a deviation of 1 where all values are equal."""
    span = table.amax(0) - table.amin(0)
    width = torch.where(span > 0, span, 1.0)  # so that no square overflows or vanishes
    deviation = ((table - table.mean(0)) / width).std(0, correction=0) * width
    return table.mean(0), torch.where(span > 0, deviation, 1.0)


def draw_weights(rows: Tensor, num_nodes: int, seed: int) -> Tensor:
    """First weights [K, D]: randomly chosen rows, each at most once while there are enough."""
    random = torch.Generator().manual_seed(seed)
    if len(rows) >= num_nodes:
        return rows[torch.randperm(len(rows), generator=random)[:num_nodes]].clone()
    return rows[torch.randint(len(rows), (num_nodes,), generator=random)].clone()


def find_units(rows: Tensor, weights: Tensor, ranks: tuple[int, ...] = RANKS, tile: int = 0) -> Tensor:
    """The best-matching units of rows [N, D] in each of the maps [M, K, D]: int64 [M, N]."""
    tile = tile or (CUDA_TILE if rows.is_cuda else TILE)
    ranks = ranks if len(rows) >= MIN_ROWS else ()
    searches = [UnitSearch(each, rows[:tile], ranks) for each in weights]
    return torch.cat([torch.stack([search.find(part) for search in searches]) for part in rows.split(tile)], 1)


def fit_epoch(
    rows: Tensor,
    weights: Tensor,
    grid: Grid,
    sigmas: list[float],
    sum_over_ranks: SumOverRanks | None = None,
    ranks: tuple[int, ...] = RANKS,
) -> Tensor:
    """The weights [M, K, D] after an epoch over this rank's rows [N, D]; each map has its own sigma.

    sum_over_ranks: replaces sums and counts [M, K, D + 1] by those over all ranks. A node keeps its weights if no row
                    is in its neighbourhood (its share is 0 in these numbers).
    """
    units = find_units(rows, weights, ranks)
    sums = rows.new_zeros(*weights.shape[:2], rows.shape[1] + 1)
    for total, unit in zip(sums, units, strict=True):
        total[:, :-1] = torch.zeros_like(weights[0]).index_add_(0, unit, rows)
        total[:, -1] = torch.bincount(unit, minlength=grid.num_nodes)
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    smoothed = torch.stack([grid.smooth(each, sigma) for each, sigma in zip(sums, sigmas, strict=True)])
    share = smoothed[:, :, -1:]
    return torch.where(share > 0, smoothed[:, :, :-1] / share, weights)


def score_nodes(rows: Tensor, weights: Tensor) -> Tensor:
    """|w|^2 - 2 x.w around the mean node, [B, K], of rows [B, D] and a map [K, D]: the nearest node has the least."""
    centre = weights.mean(0)
    nodes = weights - centre
    return torch.addmm(nodes.square().sum(1), rows - centre, nodes.T, alpha=-2)


def measure_distances(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Find for rows [N, D] in a map [K, D] the best and second-best unit, int64 [2, N], and the best distance [N]."""
    both, distances = [], []
    for tile in rows.split(CUDA_TILE if rows.is_cuda else TILE):
        both.append(score_nodes(tile, weights).topk(2, dim=1, largest=False).indices.T)
        distances.append((tile - weights[both[-1][0]]).norm(dim=1))
    return torch.cat(both, 1), torch.cat(distances)


def measure_errors(rows: Tensor, weights: Tensor, grid: Grid) -> dict[str, float]:
    """Measure those of a map [K, D].

    quantisation_error: the mean distance of a row to its best-matching unit
    topographic_error:  the share of rows whose best and second-best unit are not adjacent on the grid
    dead_units:         the number of nodes that are no row's best-matching unit
    """
    (best, second), distances = measure_distances(rows, weights)
    is_adjacent = grid.are_adjacent(best.cpu(), second.cpu())
    return {
        "quantisation_error": float(distances.double().mean()),
        "topographic_error": 1.0 - float(is_adjacent.double().mean()),
        "dead_units": float(grid.num_nodes - len(best.unique())),
    }


def compute_u_matrix(weights: Tensor, grid: Grid) -> Tensor:
    """[R, C]: the mean distance of each node's weights [K, D] to those of its neighbours. Ridges separate clusters."""
    first, second = grid.find_neighbours()
    lengths = (weights[first] - weights[second]).norm(dim=1).double().cpu()
    total = torch.zeros(grid.num_nodes, dtype=torch.float64).index_add_(0, first, lengths)
    return (total / torch.bincount(first, minlength=grid.num_nodes)).view(grid.rows, grid.columns)


class SelfOrganisingMap(nn.Module):
    """A map as an endpoint serves it: rows of measurements in, places on the map out. It is not trained by gradients.

    Rows are shifted and scaled as those of the training were; `distance` is in these units.

    float64: whether shift and scale are, since a shift of Unix seconds has no seconds in float32; the map is float32
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        num_features: int,
        hexagonal: bool = False,
        toroidal: bool = False,
        float64: bool = False,
    ) -> None:
        super().__init__()
        dtype = torch.float64 if float64 else torch.float32
        self.grid = Grid(rows, columns, hexagonal, toroidal)
        self.register_buffer("weights", torch.zeros(self.grid.num_nodes, num_features))
        self.register_buffer("shift", torch.zeros(num_features, dtype=dtype))
        self.register_buffer("scale", torch.ones(num_features, dtype=dtype))
        self.weights: Tensor
        self.shift: Tensor
        self.scale: Tensor

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Find of rows [B, D] `row` and `column` of the best-matching unit, int64 [B], and the `distance` to it [B]."""
        scaled = ((rows - self.shift) / self.scale).float()
        unit = score_nodes(scaled, self.weights).argmin(1)
        distance = (scaled - self.weights[unit]).norm(dim=1)
        return {"row": unit // self.grid.columns, "column": unit % self.grid.columns, "distance": distance}
