"""A prior-fitted network for regression from one to twenty rows: a table in, predicted densities out, in one forward.

The idea is that of arXiv:2112.10510: a transformer, trained on tables drawn from a prior, approximates the posterior
predictive distribution, and needs no fitting to a table of the user's. Here its inputs are cells, as in
arXiv:2511.03634, and the predictions of Bayesian regressors in closed form; its output is a density in bins around the
mixture of these. Fresh weights give that mixture with the tails of Student's t.

Rows of a table are its context, labelled or not, and its queries. All rows attend to the context alone, so a prediction
depends neither on other queries nor on a label that is to be predicted; nothing encodes the position of a row or
column. NaN is a missing cell, or a missing label. A row, or a column, of the context with NaN only is padding.

Called by the Task of jobs/few_rows.py, which trains it on `shoal.libs.tables.prior`, and by endpoints.
Legend: B tables, C context rows, Q queries, R = C + Q, D columns, T targets, E regressors, S bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shoal.libs.tables.tables import build_tables, check_tables
from shoal.libs.tables.tokens import NUM_CELL_FEATURES, NUM_ROW_FEATURES, prepare

NUM_BINS, REACH = 80, 4.0  # bins of equal width in u = asinh((y - centre) / scale), from -REACH to REACH
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class PriorFittedNetwork(nn.Module):
    """Densities of several targets at query rows.

    width, depth, heads: of the transformer over rows
    cell_width, cell_depth: of the one over cells, which alternates between rows of a column and columns of a row
    """

    def __init__(
        self, width: int = 64, depth: int = 3, heads: int = 4, cell_width: int = 16, cell_depth: int = 1
    ) -> None:
        super().__init__()
        self.cell = nn.Linear(NUM_CELL_FEATURES, cell_width)
        self.cell_blocks = nn.ModuleList(CellBlock(cell_width) for _ in range(cell_depth))
        self.row = nn.Linear(NUM_ROW_FEATURES + cell_width, width)
        self.row_blocks = nn.ModuleList(RowBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BINS)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(student_log_masses())

    def forward(self, x: Tensor, y: Tensor, x_query: Tensor) -> dict[str, Tensor]:
        """x [B, C, D], y [B, C, T], x_query [B, Q, D], with NaN where a value is missing.

        Each float32 or float64. Returns `logits` [B, Q, T, S] of the bins; `centre` and `scale` [B, Q, T], in the
        units of y and of its dtype.
        """
        num_targets = y.shape[2]
        table = prepare(x, y, x_query)
        cells = self.cell(table.cells)  # [B * T, R, columns, width]
        for block in self.cell_blocks:
            cells = block(cells, table.is_context, table.column_exists)
        exists = table.column_exists[:, None, :, None].to(cells.dtype)
        pooled = (cells * exists).sum(2) / exists.sum(2).clamp_min(1)
        rows = self.row(torch.cat([table.rows, pooled], -1))
        for block in self.row_blocks:
            rows = block(rows, table.is_context)
        logits = self.head(self.norm(rows[:, x.shape[1] :]))

        def by_target(values: Tensor) -> Tensor:
            by_table: Tensor = values.unflatten(0, (-1, num_targets))
            return by_table.transpose(1, 2)

        return {"logits": by_target(logits), "centre": by_target(table.centre), "scale": by_target(table.scale)}


class ContextAttention(nn.Module):
    """Queries of all rows, keys and values of the first ones: [N, R, width] and a mask [N, C] to [N, R, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(values)
        query = self.query(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        source = self.key_value(normed[:, : mask.shape[1]]).unflatten(-1, (2, self.heads, -1))
        key, value = source.permute(2, 0, 3, 1, 4).unbind(0)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        update: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return values + update


class RowFeedForward(nn.Sequential):
    """[..., width] to itself."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class RowBlock(nn.Module):
    """Rows attend to the context: [B, R, width] with is_context [B, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = ContextAttention(width, heads), RowFeedForward(width)

    def forward(self, rows: Tensor, is_context: Tensor) -> Tensor:
        rows = self.attention(rows, is_context)
        update: Tensor = self.feed_forward(rows)
        return rows + update


class CellBlock(nn.Module):
    """Cells attend to the context's cells of their column, then to the cells of their row: [B, R, D, width]."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.rows, self.columns = ContextAttention(width, heads), ContextAttention(width, heads)
        self.feed_forward = RowFeedForward(width)

    def forward(self, cells: Tensor, is_context: Tensor, column_exists: Tensor) -> Tensor:
        B, R, D, width = cells.shape
        by_column = cells.transpose(1, 2).reshape(B * D, R, width)
        by_column = self.rows(by_column, is_context.repeat_interleave(D, 0))
        by_row = by_column.unflatten(0, (B, D)).transpose(1, 2).reshape(B * R, D, width)
        by_row = self.columns(by_row, column_exists.repeat_interleave(R, 0))
        cells = by_row.view(B, R, D, width)
        update: Tensor = self.feed_forward(cells)
        return cells + update


# -- densities


def student_log_masses(degrees: float = 5.0) -> Tensor:
    """Log probabilities [S] of the bins under Student's t with variance 1."""
    scale = math.sqrt((degrees - 2) / degrees)
    fine = torch.linspace(-REACH, REACH, 100 * NUM_BINS + 1, dtype=torch.float64)
    middle = (fine[1:] + fine[:-1]) / 2
    density = (1 + (middle.sinh() / scale).square() / degrees) ** (-(degrees + 1) / 2) * middle.cosh()
    masses = density.view(NUM_BINS, 100).sum(1)
    return (masses / masses.sum()).log().float()


def log_density(outputs: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """Compute it of y [B, Q, T], in its units; NaN where y is. The outermost bins stand for all values beyond them."""
    u = torch.asinh((y - outputs["centre"]) / outputs["scale"]).to(outputs["logits"].dtype)
    width = 2 * REACH / NUM_BINS
    bins = ((u + REACH) / width).nan_to_num(0.0).long().clamp(0, NUM_BINS - 1)
    mass = outputs["logits"].log_softmax(-1).gather(-1, bins.unsqueeze(-1)).squeeze(-1)
    return mass - math.log(width) - u.cosh().log() - outputs["scale"].log()


def summarise(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What an endpoint answers: `mean` [B, Q, T], and `quantiles` [B, Q, T, 5] at QUANTILES, of the centre's dtype."""
    edges = np.linspace(-REACH, REACH, NUM_BINS + 1)
    logits = outputs["logits"].astype(np.float64)
    masses = np.exp(logits - logits.max(-1, keepdims=True))
    masses /= masses.sum(-1, keepdims=True)
    cumulative = np.cumsum(masses, -1)
    centre, scale = (outputs[name].astype(np.float64)[..., None] for name in ("centre", "scale"))
    inner = np.diff(np.cosh(edges)) / np.diff(edges)  # the mean of sinh(u) within each bin
    mean = (masses * inner).sum(-1, keepdims=True)
    levels = []
    for level in QUANTILES:
        at = np.minimum((cumulative < level).sum(-1), NUM_BINS - 1)[..., None]
        mass = np.take_along_axis(masses, at, -1)
        below = np.take_along_axis(cumulative, at, -1) - mass
        levels.append(np.sinh(edges[at] + (level - below) / mass * (edges[1] - edges[0])))
    quantiles = np.concatenate(levels, -1)
    answer = {"mean": (centre + scale * mean)[..., 0], "quantiles": centre + scale * quantiles}
    return {name: values.astype(outputs["centre"].dtype) for name, values in answer.items()}


# -- for users


class FewRowsPrediction(NamedTuple):
    """Of each query, float64 [Q], or [Q, T] if y was a table or frame."""

    mean: np.ndarray
    median: np.ndarray
    interval_50: tuple[np.ndarray, np.ndarray]  # lower and upper end
    interval_90: tuple[np.ndarray, np.ndarray]


def predict(model: nn.Module, X: Any, y: Any, X_query: Any) -> FewRowsPrediction:
    """Answer one table in one forward.

    X: [C, D], y: [C] or [C, T] with NaN at rows without a label, X_query: [Q, D]. Frames are aligned by the names of
    their columns. Raises DataError as `build_tables` and `check_tables`.
    """
    arrays = dict(check_tables(build_tables(X, y, X_query)))
    device = next(model.parameters()).device
    with torch.no_grad():
        outputs = model(*(torch.from_numpy(values).to(device) for values in arrays.values()))
    answer = summarise({name: values.numpy(force=True) for name, values in outputs.items()})
    shape = (...,) if np.ndim(y) == 2 else (..., 0)
    low, lower, median, upper, high = (answer["quantiles"][0, ..., index][shape] for index in range(len(QUANTILES)))
    return FewRowsPrediction(answer["mean"][0][shape], median, (lower, upper), (low, high))
