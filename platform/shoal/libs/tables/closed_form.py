"""Twenty Bayesian regressors in closed form, each a Gaussian process with one kernel and one signal-to-noise ratio.

For a table of at most some dozens of rows all of them are a few batched Cholesky factorisations. They are the first
layer of the network, which has no parameters: the later ones weigh and correct what they predict.

Each has y = f(x) + noise, with f of the kernel `ratio * k + (1 + ratio)` in units of the noise's variance, and an
inverse-gamma prior of that variance, so that predictions have Student's t distribution (Rasmussen and Williams, 2006,
sections 2.2, 2.7 and 5.4). Every quantity depends on rows and columns as sets.

Legend: B tables, C rows of the context, R rows of context and queries, D columns, E regressors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LINEAR, SMOOTH, WIDE, STEPS = range(4)  # kernels; the second half of the stack weighs columns by their correlation
REGRESSORS: tuple[tuple[int, float], ...] = (
    (LINEAR, 0.0),  # the mean
    *((LINEAR, ratio) for ratio in (0.1, 1.0, 10.0, 1e2, 1e5)),
    *((LINEAR + 4, ratio) for ratio in (1.0, 10.0, 100.0)),
    *((SMOOTH, ratio) for ratio in (1.0, 10.0, 1e2)),
    *((WIDE, ratio) for ratio in (30.0, 3e3)),
    *((SMOOTH + 4, ratio) for ratio in (10.0, 100.0)),
    *((STEPS, ratio) for ratio in (1.0, 10.0)),
    *((STEPS + 4, ratio) for ratio in (3.0, 30.0)),
)
NUM_REGRESSORS = len(REGRESSORS)
EXTRAPOLATES = torch.tensor([kind % 4 in (LINEAR, WIDE) for kind, _ in REGRESSORS])
PRIOR_ROWS = 2.0  # how many rows the prior of the noise's variance is worth


class RegressorPredictions(NamedTuple):
    """Of each regressor, in units of the given targets. Labelled rows are predicted without their own label."""

    mean: Tensor  # [B, E, R]
    scale: Tensor  # [B, E, R] of the predicted value with its noise
    weight: Tensor  # [B, E] posterior probability of the regressor; of two rows, only of those that return to the mean


def predict_closed_form(x: Tensor, column_exists: Tensor, y: Tensor, is_labelled: Tensor) -> RegressorPredictions:
    """Fit and predict.

    x:             float64 [B, R, D], standardised, 0 where missing; the first C rows are the context
    column_exists: bool [B, D]
    y:             float64 [B, C], standardised, 0 where there is no label
    is_labelled:   bool [B, C]
    """
    C = y.shape[1]
    kernel, ratio = torch.tensor([kind for kind, _ in REGRESSORS]), x.new_tensor([each for _, each in REGRESSORS])
    size = ratio.view(-1, 1, 1)
    stack, own = _compute_kernels(x, column_exists, y, is_labelled)
    known = is_labelled[:, None, None, :]  # [B, 1, 1, C]
    covariance = (stack[:, kernel.to(x.device)] * size + 1 + size) * known  # [B, E, R, C]
    variance = own[:, kernel.to(x.device)] * size[:, 0] + 1 + size[:, 0] + 1  # [B, E, R], with the noise
    square = covariance[:, :, :C] * is_labelled[:, None, :, None]
    factor = torch.linalg.cholesky(square + torch.eye(C, dtype=x.dtype, device=x.device))
    inverse = torch.cholesky_inverse(factor)  # [B, E, C, C]
    solved = (inverse @ y[:, None, :, None]).squeeze(-1)  # [B, E, C]
    mean = (covariance @ solved.unsqueeze(-1)).squeeze(-1)
    explained = ((covariance @ inverse) * covariance).sum(-1)
    num_rows = is_labelled.sum(1, keepdim=True).to(x.dtype)  # [B, 1]
    prior = PRIOR_ROWS / (1 + ratio)
    residual = (solved * y.unsqueeze(1)).sum(-1) + prior  # [B, E]
    noise = residual / (num_rows + PRIOR_ROWS)
    log_determinant = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # half of it
    evidence = PRIOR_ROWS / 2 * prior.log() - log_determinant - (num_rows + PRIOR_ROWS) / 2 * residual.log()
    evidence = evidence.masked_fill(EXTRAPOLATES.to(x.device) & (num_rows <= 2), -torch.inf)  # two rows show no slope
    without = inverse.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12)  # [B, E, C]: equations 5.10 to 5.12
    labelled = is_labelled.unsqueeze(1)
    left_out = torch.where(labelled, y.unsqueeze(1) - solved / without, mean[..., :C])
    spread = torch.where(labelled, 1 / without, (variance - explained)[..., :C])
    scales = torch.cat([spread, (variance - explained)[..., C:]], -1).clamp_min(1e-9) * noise.unsqueeze(-1)
    return RegressorPredictions(torch.cat([left_out, mean[..., C:]], -1), scales.sqrt(), evidence.softmax(-1))


def correlate(x: Tensor, y: Tensor, is_labelled: Tensor) -> Tensor:
    """Pearson's correlation of each column with the target over the labelled rows: x [B, C, D], y [B, C] to [B, D]."""
    known = is_labelled.unsqueeze(-1).to(x.dtype)
    num_rows = known.sum(1, keepdim=True).clamp_min(1)
    columns = (x - (x * known).sum(1, keepdim=True) / num_rows) * known
    target = (y.unsqueeze(-1) - (y.unsqueeze(-1) * known).sum(1, keepdim=True) / num_rows) * known
    product = (columns * target).sum(1)
    return product / (columns.square().sum(1) * target.square().sum(1)).sqrt().clamp_min(1e-12)


def _compute_kernels(x: Tensor, column_exists: Tensor, y: Tensor, is_labelled: Tensor) -> tuple[Tensor, Tensor]:
    """All kernels between rows and context [B, 8, R, C], and of each row with itself [B, 8, R]."""
    C = y.shape[1]
    exists = column_exists.to(x.dtype)
    num_columns = exists.sum(1, keepdim=True).clamp_min(1)
    num_rows = is_labelled.sum(1, keepdim=True)
    relevance = (correlate(x[:, :C], y, is_labelled).square() + 1 / (num_rows + 1)) * exists
    relevance = relevance / relevance.sum(1, keepdim=True).clamp_min(1e-12)
    distance = (x[:, :, None] - x[:, None, :C]).abs()  # [B, R, C, D]
    closeness = torch.exp(-distance.float()).to(x.dtype)
    kernels, own = [], []
    for weight in (exists / num_columns, relevance):
        scaled = x * weight.unsqueeze(1)
        norm = (scaled * x).sum(-1)  # [B, R]
        linear = scaled @ x[:, :C].transpose(1, 2)
        squared = (norm.unsqueeze(2) + norm[:, None, :C] - 2 * linear).clamp_min(0)
        steps = (closeness @ weight[:, None, :, None]).squeeze(-1)
        kernels += [linear, torch.exp(-squared / 2), torch.exp(-squared / 12), steps]
        own += [norm, *[torch.ones_like(norm)] * 2, weight.sum(1, keepdim=True).expand_as(norm)]
    return torch.stack(kernels, 1), torch.stack(own, 1)
