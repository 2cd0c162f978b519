"""Random small regression tables: the prior of `shoal.libs.tables.network`, as a typed and versioned spec.

The mixture is what the network knows before it sees a table: five families of functions (linear, Gaussian processes,
small networks, trees, common factors) over columns of mixed kinds, with irrelevant columns and noise from slight to
overwhelming. Called by the Task of jobs/few_rows.py, for batches of tables of one shape. Draws from the generator that
it is given, and from nothing else.

Legend: B tables, R rows, D columns, T targets, K factors, M features of a kernel or units of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from shoal.config import Spec

Range = tuple[float, float]


class PriorSpec(Spec):
    """The mixture. A network is comparable with another one only if both have the same `version` and fields.

    linear ... factors: relative frequency of each family of functions
    relevant:           the range of the share of columns that a target depends on
    noise:              the range of the noise's standard deviation, relative to the function's; log-uniform
    heavy_tailed:       share of tables whose noise has Student's t distribution with three degrees of freedom
    heteroscedastic:    share of tables whose noise grows with one column
    levels:             share of columns with two to five values only, as of a category
    skewed:             share of tables whose target is a convex function of the drawn one
    rounded:            share of tables whose target has a few values only
    """

    version: Literal[1] = 1
    linear: float = Field(default=3.0, ge=0)
    gaussian_process: float = Field(default=2.0, ge=0)
    network: float = Field(default=2.0, ge=0)
    trees: float = Field(default=1.5, ge=0)
    factors: float = Field(default=2.5, ge=0)
    relevant: Range = (0.2, 1.0)
    noise: Range = (0.02, 2.5)
    heavy_tailed: float = Field(default=0.2, ge=0, le=1)
    heteroscedastic: float = Field(default=0.1, ge=0, le=1)
    levels: float = Field(default=0.2, ge=0, le=1)
    skewed: float = Field(default=0.15, ge=0, le=1)
    rounded: float = Field(default=0.08, ge=0, le=1)


class TablePrior:
    """Tables of a `PriorSpec`. Every draw comes from `generator`."""

    def __init__(self, spec: PriorSpec, generator: Generator) -> None:
        self.spec, self.generator = spec, generator

    def sample(self, num_tables: int, num_rows: int, num_columns: int, num_targets: int = 1) -> tuple[Tensor, Tensor]:
        """Features float32 [B, R, D] and noisy targets float32 [B, R, T], with units and offsets of their own."""
        factors, features = self._sample_features(num_tables, num_rows, num_columns)
        signals = self._sample_signals(features, factors, num_targets)
        targets = self._reshape(self._add_noise(signals, features))
        units = self._normal(num_tables, 1, num_columns, 2)
        features = features * (1.5 * units[..., 0]).exp() + 10 * units[..., 1] * self._chance(0.5, num_tables, 1, 1)
        return features, self._shift(targets)

    # -- columns

    def _sample_features(self, B: int, R: int, D: int) -> tuple[Tensor, Tensor]:
        """Common factors [B, R, 4] and standardised columns [B, R, D] that depend on them, more or less."""
        factors = self._normal(B, R, 4)
        clusters = 2 * self._normal(B, 3, 4).gather(1, self._integers(3, B, R, 1).expand(B, R, 4))
        factors = standardise(factors + clusters * self._chance(0.2, B, 1, 1))
        loadings = self._normal(B, 4, D) * self._chance(0.6, B, 4, 1)
        share = self._uniform(B, 1, 1)  # of a column that is its own
        latent = standardise(standardise(factors @ loadings) * (1 - share) + self._normal(B, R, D) * share)
        kind = self._uniform(B, 1, D)
        edges = [self.spec.levels, *(self.spec.levels + (1 - self.spec.levels) * at for at in (0.15, 0.35, 0.4, 0.45))]
        thresholds = self._integers(4, B, 1, D) + 1  # of a column with levels
        cutoffs = self._normal(B, 1, D, 4)
        active = torch.arange(4) < thresholds.unsqueeze(-1)
        leveled = ((latent.unsqueeze(-1) > cutoffs) & active).sum(-1).float()
        values = latent
        for edge, transformed in (
            (edges[4], latent**3),
            (edges[3], latent / (self._normal(B, R, D).abs() + 0.3)),
            (edges[2], (1.2 * latent).exp()),
            (edges[1], torch.special.ndtr(latent)),
            (edges[0], leveled),
        ):
            values = torch.where(kind < edge, transformed, values)
        return factors, standardise(values)

    # -- functions

    def _sample_signals(self, features: Tensor, factors: Tensor, T: int) -> Tensor:
        """Standardised functions [B, R, T] of the columns; several targets of a table share a part."""
        spec, (B, R, D) = self.spec, features.shape
        families: list[tuple[float, Callable[[Tensor], Tensor]]] = [
            (spec.linear, self._linear),
            (spec.gaussian_process, self._gaussian_process),
            (spec.network, self._network),
            (spec.trees, self._trees),
            (spec.factors, self._linear),
        ]
        frequencies = torch.tensor([frequency for frequency, _ in families])
        family = torch.multinomial(frequencies, B, replacement=True, generator=self.generator)
        low, high = self.spec.relevant
        share = low + (high - low) * self._uniform(B, 1, 1)
        relevant = self._uniform(B, 1, D) < share
        relevant |= torch.arange(D) == self._integers(D, B, 1, 1)
        inputs = features * relevant
        if D < 4:
            inputs = torch.cat([inputs, features.new_zeros(B, R, 4 - D)], -1)
        signals = features.new_empty(B, R, T)
        for index, (_, function) in enumerate(families):
            rows = (family == index).nonzero().squeeze(1)
            if len(rows):
                own = factors[rows] if index == 4 else inputs[rows]
                signals[rows] = torch.cat([standardise(function(own)) for _ in range(T)], -1)
        angle = self._uniform(B, 1, 1) * math.pi / 2  # how much later targets share with the first
        sign = 1 - 2 * self._chance(0.3, B, 1, 1)
        shared = signals[..., :1] * angle.cos() * sign
        return torch.cat([signals[..., :1], standardise(shared + signals[..., 1:] * angle.sin())], -1)

    def _linear(self, x: Tensor) -> Tensor:
        """Heavy-tailed weights; for some tables bent, or with a product or a square: [B, R, D] to [B, R, 1]."""
        B, _, D = x.shape
        weights = self._normal(B, D, 1) / (self._normal(B, D, 1).abs() + 0.2) ** self._uniform(B, 1, 1)
        values = standardise(x @ weights)
        squares = standardise((x @ self._normal(B, D, 1)) * (x @ self._normal(B, D, 1)))
        values = values + squares * self._uniform(B, 1, 1) * self._chance(0.25, B, 1, 1)
        return self._mix(0.15, (2 * values).tanh(), values)

    def _gaussian_process(self, x: Tensor, M: int = 64) -> Tensor:
        """Random features (Rahimi and Recht, 2007) of kernels with normal to Cauchy spectra, over all columns together
        or each alone: [B, R, D] to [B, R, 1]."""
        B, _, D = x.shape
        scale = (0.7 * self._normal(B, D, 1) - 0.3).exp() / math.sqrt(D) ** 0.7
        tail = (self._normal(B, 1, M).abs() + 0.05) ** self._chance(0.4, B, 1, 1)
        frequencies = self._normal(B, D, M) * scale / tail
        alone = torch.nn.functional.one_hot(self._integers(D, B, M), D).transpose(1, 2)
        frequencies = self._mix(0.3, frequencies * alone * math.sqrt(D), frequencies)
        waves = (x @ frequencies + 2 * math.pi * self._uniform(B, 1, M)).cos()
        return waves @ self._normal(B, M, 1)

    def _network(self, x: Tensor, M: int = 16) -> Tensor:
        """Two sparse layers of tanh, ReLU, absolute values or waves: [B, R, D] to [B, R, 1]."""
        B, _, D = x.shape
        kind = self._uniform(B, 1, 1)
        values = x
        for width in (D, M):
            weights = self._normal(B, width, M) * self._chance(0.6, B, width, M)
            sums = standardise(values @ weights) * (0.5 + self._uniform(B, 1, 1)) + 0.7 * self._normal(B, 1, M)
            values = sums.tanh()
            for edge, bent in ((0.6, sums.relu()), (0.25, sums.abs()), (0.12, (2 * sums).sin())):
                values = torch.where(kind < edge, bent, values)
        return values @ self._normal(B, M, 1)

    def _trees(self, x: Tensor, num_trees: int = 6, depth: int = 3) -> Tensor:
        """A sum of trees that split at values of rows, each level by one column: [B, R, D] to [B, R, 1]."""
        B, R, D = x.shape
        S = num_trees * depth
        columns = self._integers(D, B, 1, S).expand(B, R, S)
        values = x.gather(2, columns)
        thresholds = values.gather(1, self._integers(R, B, 1, S))
        is_used = self._chance(0.7, B, 1, S) > 0
        bits = ((values > thresholds) & is_used).view(B, R, num_trees, depth)
        leaf = (bits * 2 ** torch.arange(depth)).sum(-1)  # [B, R, trees]
        heights = self._normal(B, num_trees, 2**depth) * self._chance(0.5, B, num_trees, 1)
        heights[:, 0] = self._normal(B, 2**depth)
        return heights.gather(2, leaf.transpose(1, 2)).sum(1).unsqueeze(-1)

    # -- targets

    def _add_noise(self, signals: Tensor, features: Tensor) -> Tensor:
        B, R, T = signals.shape
        low, high = (math.log(edge) for edge in self.spec.noise)
        size = (low + (high - low) * self._uniform(B, 1, T)).exp()
        noise = self._normal(B, R, T)
        tails = (self._normal(B, R, T, 3).square().mean(-1)).sqrt().clamp_min(0.1)
        noise = self._mix(self.spec.heavy_tailed, noise / tails, noise)
        growth = (0.7 * features[..., :1]).clamp(-2, 2).exp()
        return signals + size * noise * growth ** self._chance(self.spec.heteroscedastic, B, 1, 1)

    def _reshape(self, targets: Tensor) -> Tensor:
        """Give some tables a skewed target, or one with a few values only."""
        B = len(targets)
        targets = standardise(targets)
        bent = (targets.clamp(-5, 5) * (0.3 + 0.7 * self._uniform(B, 1, 1))).exp()
        targets = self._mix(self.spec.skewed, bent, targets)
        step = 0.5 + 1.5 * self._uniform(B, 1, 1)
        rounded = (targets / step).round()
        return self._mix(self.spec.rounded, rounded, targets)

    def _shift(self, targets: Tensor) -> Tensor:
        """Units and offsets: most tables have targets far from zero, relative to their spread."""
        B, _, T = targets.shape
        offset = (1.0 + 1.2 * self._normal(B, 1, T)).exp() * self._chance(0.85, B, 1, T)
        sign = 1 - 2 * self._chance(0.5, B, 1, T)
        return (targets * sign + offset) * (2 * self._normal(B, 1, T)).exp() * (1 - 2 * self._chance(0.1, B, 1, T))

    # -- draws

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _integers(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.generator)

    def _chance(self, probability: float, *shape: int) -> Tensor:
        """Ones and zeros, float32."""
        return (self._uniform(*shape) < probability).float()

    def _mix(self, probability: float, some: Tensor, others: Tensor) -> Tensor:
        """Of each table [B, ...] the one or the other."""
        return torch.where(self._chance(probability, len(others), 1, 1) > 0, some, others)


def standardise(values: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the rows of [B, R, D]; constant columns are 0."""
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6)
