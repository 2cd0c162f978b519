"""A network that answers a new table of two to twenty rows at once, because it has seen a million tables like it.

    shoal run few_rows                                         # a cluster, the job and a live picture
    shoal run few_rows args.prior.noise='[0.02, 1.0]'          # for tables with less noise
    shoal run few_rows parallel=ddp workers=2                  # two workers share each batch
    ray job submit --working-dir . -- python jobs/few_rows.py  # the same on a cluster that is up
    python -m shoal.train task=few_rows                        # in this process, without Ray
    shoal run serve_apps/registered_model.py models=few-rows@champion

Training draws tables from `shoal.libs.tables.prior`, and stores none. The network that it registers is then
frozen: a user's table is its input, and nothing is fitted to it. See docs/libs/tables.md.

`log_loss` is minus the log density of the held-out targets, in units of their deviation; `log_loss_closed_form` is that
of the mixture of Bayesian regressors that the network begins with. Tensor ranks and pipelines would wait for each
other: its layers are small.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor, nn

from shoal.data import Data
from shoal.libs.tables.network import (
    QUANTILES,
    PriorFittedNetwork,
    log_density,
    student_log_masses,
    summarise,
)
from shoal.libs.tables.prior import PriorSpec, TablePrior
from shoal.libs.tables.tables import MAX_COLUMNS, MAX_LABELLED, check_tables
from shoal.registry import Signature, TensorSignature
from shoal.train import Task, TrainSpec

MAX_UNLABELLED, NUM_QUERIES = 16, 16


class FewRowsTask(Task):
    """Densities of targets at query rows, given a context of few rows.

    prior:       the mixture of tables, as fields of `PriorSpec`
    tables:      of an epoch
    validation:  tables, drawn once
    """

    parts: ClassVar = {"rows attend": {"depth": 0}, "cells attend": {"cell_depth": 0}}

    def __init__(
        self,
        *,
        prior: Mapping[str, Any] | None = None,
        tables: int = 65_536,
        validation: int = 2_048,
        width: int = 64,
        depth: int = 3,
        cell_width: int = 16,
        cell_depth: int = 1,
    ) -> None:
        self.prior = PriorSpec.parse(dict(prior or {}))
        self.tables, self.validation = tables, validation
        self.sizes = {"width": width, "depth": depth, "cell_width": cell_width, "cell_depth": cell_depth}

    def model(self) -> nn.Module:
        return PriorFittedNetwork(**self.sizes)

    def data(self) -> Data:
        return Data(
            GeneratedTables(self.prior, self.tables, deterministic=False),
            validation=GeneratedTables(self.prior, self.validation, deterministic=True),
        )

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self._log_loss(outputs, batch)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        start = student_log_masses().to(outputs["logits"]).expand_as(outputs["logits"])
        answer = summarise({name: values.numpy(force=True) for name, values in outputs.items()})
        y = batch[-1]
        low, high = (torch.from_numpy(answer["quantiles"][..., at]).to(y) for at in (0, -1))
        return {
            "log_loss": self._log_loss(outputs, batch),
            "log_loss_closed_form": self._log_loss({**outputs, "logits": start}, batch),
            "coverage_90": ((low <= y) & (y <= high)).float().mean(),
        }

    def _log_loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Tensor:
        y = batch[-1]  # [B, Q, T]
        unit = y.std(1, keepdim=True).clamp_min(1e-6 * y.abs().amax(1, keepdim=True).clamp_min(1e-6))
        densities: Tensor = log_density(outputs, y) + unit.log()
        return -densities.clamp_min(-20.0).mean()

    # -- the endpoint: tables of any size, with NaN where a value is missing

    def signature(self) -> Signature:
        inputs = [TensorSignature(name=name, datatype="FP64", shape=[-1, -1, -1]) for name in ("x", "y", "x_query")]
        mean = TensorSignature(name="mean", datatype="FP64", shape=[-1, -1, -1])
        quantiles = TensorSignature(name="quantiles", datatype="FP64", shape=[-1, -1, -1, len(QUANTILES)])
        return Signature(inputs=inputs, outputs=[mean, quantiles])

    def preprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return check_tables(arrays)

    def postprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return summarise(arrays)


class GeneratedTables:
    """Batches of tables of one shape: x, y with NaN, x_query, y_query, see `PriorFittedNetwork`.

    Numbers of labelled rows, unlabelled rows, columns and targets are drawn for each batch.
    deterministic: whether a batch follows from its indices alone, as for validation; otherwise from torch's generator
    """

    def __init__(self, prior: PriorSpec, num_tables: int, *, deterministic: bool) -> None:
        self.prior, self.num_tables, self.deterministic = prior, num_tables, deterministic

    def __len__(self) -> int:
        return self.num_tables

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(values[0] for values in self.batch(np.array([range(len(self))[index]])))

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        seed = int(indices[0]) if self.deterministic else int(torch.randint(2**62, ()))
        generator = Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        num_labelled = min(draw(1, MAX_LABELLED), draw(2, MAX_LABELLED + 10))
        num_context = num_labelled + (draw(1, MAX_UNLABELLED) if draw(0, 2) == 0 else 0)
        num_columns, num_targets = draw(1, MAX_COLUMNS), 2 if draw(0, 3) == 0 else 1
        prior = TablePrior(self.prior, generator)
        x, y = prior.sample(len(indices), num_context + NUM_QUERIES, num_columns, num_targets)
        known = y[:, :num_context].clone()
        known[:, num_labelled:, 0] = torch.nan  # the rows of other targets have labels of their own
        has_label = torch.rand(known[..., 1:].shape, generator=generator) < 0.7
        has_label[:, 0] = True
        has_label[:, MAX_LABELLED:] = False
        known[..., 1:] = torch.where(has_label, known[..., 1:], torch.nan)
        return x[:, :num_context], known, x[:, num_context:], y[:, num_context:]


def spec() -> TrainSpec:
    """The recipe: a million tables. The rate is constant and the averaged weights are registered, so that a run may be
    resumed with a later `stop`: more tables are never wrong."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "few-rows",
            "batch_size": 128,
            "threads": 1,  # its operations are too small to share
            "optimizer": {"name": "adamw", "learning_rate": 1.5e-3, "weight_decay": 0.01},
            "clip_norm": 1.0,
            "average": 0.995,
            "stop": {"epochs": 16},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
