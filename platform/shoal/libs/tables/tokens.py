"""The tokens of the network: from a table to features of its cells and rows, without parameters.

Columns are standardised by the context, targets by their labels; the rows are predicted in closed form. All of it is
computed in float64, and from differences to the smallest value: a column of Unix seconds is as good as one of minutes.
NaN is a missing cell, or a missing label.

Legend: B tables, C context rows, Q queries, R = C + Q, D columns, T targets, E regressors. BT is B * T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.libs.tables.closed_form import NUM_REGRESSORS, RegressorPredictions, correlate, predict_closed_form

NUM_CELL_FEATURES, NUM_ROW_FEATURES = 8, 4 * NUM_REGRESSORS + 9
OWN_ROWS, OWN_SHARE = 0.05, 0.1  # see `scale_targets`
ROUNDING = 4 * torch.finfo(torch.float64).eps  # values that differ by less, relative to their size, are equal


class TableTokens(NamedTuple):
    """Tokens of B * T problems, one for each target of each table."""

    cells: Tensor  # [BT, R, columns, NUM_CELL_FEATURES]; the other targets are columns too
    rows: Tensor  # [BT, R, NUM_ROW_FEATURES]
    is_context: Tensor  # bool [BT, C]
    column_exists: Tensor  # bool [BT, columns]
    centre: Tensor  # [BT, Q] of the mixture of the regressors, in the target's units, of the dtype of the targets
    scale: Tensor  # [BT, Q]


@torch.no_grad()
def prepare(x: Tensor, y: Tensor, x_query: Tensor) -> TableTokens:
    """Standardise, predict in closed form, and describe cells and rows."""
    (_, C, D), T = x.shape, y.shape[2]
    everything = torch.cat([x, x_query], 1).double()
    values, is_known, exists = standardise_columns(everything, C)  # [B, R, D], [B, D]
    is_labelled = ~y.isnan()  # [B, C, T]
    location, unit = scale_targets(y.double())  # [B, 1, T]
    standard = torch.where(is_labelled, (y.double() - location) / unit, 0.0)
    is_context = exists_row = (is_known[:, :C] & exists.unsqueeze(1)).any(-1) | is_labelled.any(-1)
    is_context = is_context | ~exists_row.any(1, keepdim=True)

    def by_problem(values: Tensor) -> Tensor:  # [B, rows, T] to [BT, rows]
        return values.transpose(1, 2).flatten(0, 1)

    flat, labelled = by_problem(standard), by_problem(is_labelled)
    many, column_exists = values.repeat_interleave(T, 0), exists.repeat_interleave(T, 0)
    predictions = RegressorPredictions(
        *(each.float() for each in predict_closed_form(many, column_exists, flat, labelled))
    )
    rows, centre, scale = describe_rows(predictions, flat.float(), labelled, column_exists)
    units = by_problem(unit)
    features = torch.cat([many, add_other_targets(standard, values.shape[1])], -1)
    known = torch.cat([is_known.repeat_interleave(T, 0), add_other_targets(is_labelled, values.shape[1])], -1)
    all_columns = torch.cat([column_exists, known[:, :C, D:].any(1)], 1)
    cells = describe_cells(features.float(), known, flat.float(), labelled, num_columns=D)
    nothing = ~all_columns.any(1, keepdim=True)  # a table whose columns are all constant: attention needs a key
    return TableTokens(
        cells,
        rows,
        is_context.repeat_interleave(T, 0),
        all_columns | nothing,
        (by_problem(location) + centre * units)[:, C:].to(y.dtype),
        (scale * units)[:, C:].to(y.dtype),
    )


def find_range(values: Tensor, is_known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find for known values [B, N, F] the smallest, its distance to the largest, and whether they differ: [B, 1, F]."""
    low = values.masked_fill(~is_known, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~is_known, -torch.inf).amax(1, keepdim=True)
    has_any = is_known.any(1, keepdim=True)
    low, high = torch.where(has_any, low, 0.0), torch.where(has_any, high, 0.0)
    return low, high - low, high - low > ROUNDING * torch.maximum(low.abs(), high.abs())


def standardise_columns(x: Tensor, num_context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale by mean and deviation over the context. Beyond three deviations values grow by their logarithm.

    Returns values [B, R, D], 0 where missing; whether a cell is known [B, R, D]; whether a column says anything [B, D].
    """
    is_known = ~x.isnan()
    known = is_known[:, :num_context]
    low, span, varies = find_range(x[:, :num_context], known)
    scaled = (x - low) / torch.where(varies, span, 1.0)  # 0 to 1 in the context: no square overflows
    context, weight = scaled[:, :num_context].nan_to_num(0.0), known.to(x.dtype)
    count = weight.sum(1, keepdim=True).clamp_min(1)
    mean = (context * weight).sum(1, keepdim=True) / count
    variance = ((context - mean).square() * weight).sum(1, keepdim=True) / count
    scaled = (scaled - mean) / torch.where(varies, variance.sqrt(), 1.0)
    scaled = scaled.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
    size = scaled.abs()
    scaled = torch.where(size > 3, scaled.sign() * (3 + torch.log1p((size - 3).clamp_min(0))), scaled)
    return torch.where(is_known & varies, scaled, 0.0), is_known, varies.squeeze(1)


def scale_targets(y: Tensor) -> tuple[Tensor, Tensor]:
    """Location and unit [B, 1, T] of y [B, C, T] with NaN: the mean, and a deviation with shrinkage.

    The deviation of one row, or of equal values, is zero. So a deviation of OWN_SHARE of the targets' size (of 1 if
    all are 0) counts as OWN_ROWS of a row. But n different labels are not close together by chance: where that is
    more than 40 / (n - 1) of their deviations, the size is an offset, which says nothing of the deviation.
    """
    is_known = ~y.isnan()
    low, span, differ = find_range(y, is_known)
    span = torch.where(differ, span, 1.0)
    count = is_known.sum(1, keepdim=True).to(y.dtype)
    above = torch.where(is_known, (y - low) / span, 0.0)  # 0 to 1: no square overflows
    mean = above.sum(1, keepdim=True) / count.clamp_min(1)
    squares = torch.where(is_known, (above - mean).square(), 0.0).sum(1, keepdim=True)
    deviation, location = (squares / count.clamp_min(1)).sqrt(), low + mean * span
    size = torch.hypot(location, deviation * span)
    own = torch.where(size == 0, 1.0, OWN_SHARE * size) / span
    own = torch.where(differ, torch.minimum(own, 40 / (count - 1).clamp_min(1) * deviation), own)
    unit = ((squares + OWN_ROWS * own.square()) / ((count - 1).clamp_min(0) + OWN_ROWS)).sqrt() * span
    return location, unit


def add_other_targets(values: Tensor, num_rows: int) -> Tensor:
    """Columns for the problem of each target: the other ones, [B, C, T] to [BT, R, T - 1]; zero at queries."""
    B, C, T = values.shape
    padded = torch.cat([values, values.new_zeros(B, num_rows - C, T)], 1)
    others = [torch.cat([padded[..., :own], padded[..., own + 1 :]], -1) for own in range(T)]
    return torch.stack(others, 1).flatten(0, 1)


def describe_cells(x: Tensor, is_known: Tensor, y: Tensor, is_labelled: Tensor, num_columns: int) -> Tensor:
    """[BT, R, columns, NUM_CELL_FEATURES]; the columns from `num_columns` on are other targets."""
    (B, R, D), C = x.shape, y.shape[1]
    label = torch.zeros_like(x[..., 0])
    label[:, :C] = y.clamp(-5, 5)
    has_label = torch.zeros_like(label)
    has_label[:, :C] = is_labelled.to(x.dtype)
    correlation = correlate(x[:, :C], y, is_labelled).unsqueeze(1).expand(B, R, D)
    is_target = (torch.arange(D, device=x.device) >= num_columns).to(x.dtype).expand(B, R, D)
    label, has_label = label.unsqueeze(-1).expand(B, R, D), has_label.unsqueeze(-1).expand(B, R, D)
    features = [x, (~is_known).to(x.dtype), label, has_label, x * label, correlation, correlation.square(), is_target]
    return torch.stack(features, -1)


def describe_rows(
    predictions: RegressorPredictions, y: Tensor, is_labelled: Tensor, column_exists: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [BT, R, NUM_ROW_FEATURES], and the mixture's mean and deviation [BT, R] in standard units."""
    mean, deviation, weight = predictions
    (B, E, R), C = mean.shape, y.shape[1]
    centre = (weight.unsqueeze(-1) * mean).sum(1)
    second = (weight.unsqueeze(-1) * (deviation.square() + (mean - centre.unsqueeze(1)).square())).sum(1)
    scale = second.sqrt()
    has_label, label = torch.zeros_like(centre), torch.zeros_like(centre)
    has_label[:, :C], label[:, :C] = is_labelled.to(y.dtype), y
    errors = (label.unsqueeze(1) - mean) / deviation * has_label.unsqueeze(1)
    num_rows = is_labelled.sum(1, keepdim=True).to(y.dtype).expand(B, R)
    is_query = (torch.arange(R, device=y.device) >= C).to(y.dtype).expand(B, R)
    single = [
        label.clamp(-5, 5), ((label - centre) / scale * has_label).clamp(-5, 5), has_label, is_query, scale.log(),
        centre.clamp(-5, 5), num_rows.log1p(), num_rows / 20, column_exists.sum(1, keepdim=True).expand(B, R) / 10,
    ]  # fmt: skip
    several = [
        ((mean - centre.unsqueeze(1)) / scale.unsqueeze(1)).clamp(-5, 5),
        (deviation / scale.unsqueeze(1)).log().clamp(-5, 5),
        errors.clamp(-5, 5),
        weight.unsqueeze(-1).expand(B, E, R).clamp_min(1e-4).log() / 3,
    ]
    return torch.cat([torch.stack(single, -1), *(each.transpose(1, 2) for each in several)], -1), centre, scale
