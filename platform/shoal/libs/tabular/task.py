"""A Task for tables: its data, encoders, loss and hooks; a network of one's own may stand in the default one's place.

    shoal run table data=customers.csv target=churned

Called by the recipe `jobs/table.py`, and subclassed by users. Legend: B rows, K members of an ensemble, C outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.extend.registry import Signature
from shoal.extend.runs import format_value
from shoal.extend.train import Callback, Hook, Registration, Task
from shoal.libs.tabular.dataset import Table, table
from shoal.libs.tabular.encoders import Encoders
from shoal.libs.tabular.network import TableNetwork
from shoal.libs.tabular.trees import LIMIT_S, TreesPeer

MAX_NAMED = 20  # of the categories of a column, which a registered version names


class TableTask(Task):
    """Predicts a column of a table from the others. A request is a row as it is in the table.

    data:       the file
    target:     the column that is predicted
    columns:    kinds that are not as inferred: number, word, truth, date, date:FORMAT
    leave_out:  columns that are no inputs
    validation: a share of the rows, or a file
    split:      the seed of this share
    order_by:   the column by which the last rows are this share
    unknown:    a word that no training row had: error, or other
    network:    arguments of `TableNetwork`: width, depth, members, dropout, embedding
    trees:      whether gradient-boosted trees of scikit-learn are fitted to the same rows, for comparison
    encoders:   as they were fitted when the run began; not to be given

    A subclass may write `table` for data of its own, and `model` for a network of its own, whose arguments are numbers
    [B, N] and categories [B, W], if there are any, and whose output is [B, C], or [B, K, C] of an ensemble.
    """

    def __init__(
        self,
        *,
        data: str = "",
        target: str | int = "",
        columns: Mapping[str, str] | None = None,
        leave_out: Sequence[str] = (),
        validation: str | float = 0.2,
        split: int = 0,
        order_by: str = "",
        unknown: str = "error",
        network: Mapping[str, Any] | None = None,
        trees: bool = True,
        encoders: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = data
        self._network = dict(network or {})
        self._trees = trees
        self._encoders = encoders
        self._setting = {
            "target": target,
            "columns": dict(_join_names(columns or {})),
            "leave_out": leave_out,
            "validation": validation,
            "split": split,
            "order_by": order_by,
            "unknown": unknown,
        }

    def table(self, **fitted: Any) -> Table:
        """The table. fitted: `encoders` of the run's beginning, to be passed on to `shoal.data.table`."""
        if not self._source:
            raise ConfigError("data", "", "is missing", "as in shoal run table data=customers.csv target=churned")
        return table(self._source, **self._setting, **fitted)  # type: ignore[arg-type]

    @cached_property
    def encoders(self) -> Encoders:
        """Those of the run's beginning, or fitted to the data."""
        return self._table.encoders if self._encoders is None else Encoders.parse(self._encoders)

    @cached_property
    def _table(self) -> Table:
        return self.table(encoders=self._encoders)

    def data(self) -> Table:
        said = [f"at the end, gradient-boosted trees get {LIMIT_S:g} s for the same rows; trees=false leaves them out"]
        return replace(self._table, notes=(*self._table.notes, *said * self._trees))

    def fit_args(self) -> Mapping[str, Any]:
        if self._encoders is not None:
            return {}
        return {"encoders": self.encoders.model_dump(mode="json", exclude_defaults=True)}

    def adopt_fitted(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"encoders": {**theirs["encoders"], "num_rows": self.encoders.num_rows}}

    def registration(self) -> Registration:
        encoders = self.encoders
        source = str(self._source)
        words = {each.name: each.vocabulary for each in encoders.columns if each.vocabulary}
        lineage: dict[str, Any] = {
            "file": source if "://" in source else source and str(Path(source).resolve()),
            "rows": encoders.num_rows,
            "target": encoders.target.name,
            "classes": encoders.target.classes,
            "categories": {name: format_value(each, MAX_NAMED) for name, each in words.items()},
        }
        return Registration(lineage={name: value for name, value in lineage.items() if value})

    def model(self) -> nn.Module:
        encoders = self.encoders
        return TableNetwork(encoders.num_numbers, encoders.category_sizes, encoders.num_outputs, **self._network)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean of the members' losses in training, and the loss of their mean in an evaluation, where that of a
        number is the share of the variance that is not explained: so versions with other training rows compare."""
        members = self._split_members(outputs)
        answers = batch[-1]
        is_class = bool(self.encoders.target.classes)
        if torch.is_grad_enabled():
            answers = answers[:, None].expand(members.shape[:2])
            if is_class:
                return nn.functional.cross_entropy(members.flatten(0, 1), answers.flatten())
            return nn.functional.mse_loss(members[..., 0], answers)
        if not is_class:
            return nn.functional.mse_loss(members[..., 0].mean(1), answers) / self._variance
        return nn.functional.nll_loss(self._log_probabilities(members), answers)

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        members = self._split_members(outputs)
        answers = batch[-1]
        target = self.encoders.target
        if target.classes:
            is_right = self._log_probabilities(members).argmax(1) == answers
            return {"accuracy": is_right.float().mean()}
        errors = members[..., 0].mean(1) - answers
        return {"r2": 1 - errors.square().mean() / self._variance, "mae": errors.abs().mean() * target.std}

    @cached_property
    def _variance(self) -> float:
        """Of the validation rows' targets, in units of the training rows' deviation; 1 where they are all the same."""
        return float(self._table.validation.tensors[-1].var(correction=0)) or 1.0  # type: ignore[union-attr]

    @staticmethod
    def _split_members(outputs: Tensor) -> Tensor:
        return outputs[:, None] if outputs.ndim == 2 else outputs  # [B, K, C]

    @staticmethod
    def _log_probabilities(members: Tensor) -> Tensor:
        summed: Tensor = members.log_softmax(-1).logsumexp(1)
        return summed - float(np.log(members.shape[1]))

    def callbacks(self) -> Sequence[Callback]:
        return [TreesPeer(lambda: self._table)] if self._trees else []

    # -- the endpoint: rows as they are ---------------------------------------------------------------------------

    def signature(self) -> Signature:
        return self.encoders.signature()

    @property
    def preprocess(self) -> Hook:  # type: ignore[override]
        return self.encoders.encode_request

    @property
    def example(self) -> Mapping[str, Any] | None:  # type: ignore[override]
        """A row of medians and of the most frequent words."""
        return self.encoders.make_example()

    def postprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self.encoders.decode_scores(next(iter(arrays.values())))


def _join_names(kinds: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    """The kinds by column: `columns.net.weight=word` names a field of a field, where the column has a dot."""
    for name, kind in kinds.items():
        yield from _join_names(kind, f"{start}{name}.") if isinstance(kind, Mapping) else [(f"{start}{name}", kind)]
