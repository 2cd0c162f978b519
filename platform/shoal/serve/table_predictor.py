"""A model as a function of tables: some columns in, its outputs and its version as further columns out.

Called by batch prediction, in as many processes as that has; uses the endpoint's own Predictor, so that a row gets the
outputs that the endpoint would give it. Knows no file and no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from shoal.errors import ConfigError, DataError, InferenceError
from shoal.serve.options import ModelOptions
from shoal.serve.predictor import ModelPackage, Predictor
from shoal.serve.table import choose_columns, column_of, column_type, inputs_of

Part = tuple[int, dict[str, np.ndarray] | None]  # so many rows, and their outputs; None for one that failed
VERSION_COLUMN = "model_version"
ERROR_COLUMN = "error"


class TablePredictor:
    """Answers tables with one version of a model.

    said:        the columns of each input, where they do not follow from the names
    keep:        the columns that go from input to output; None for all
    skip_errors: a row that makes no input, or that the model fails on, has no outputs and a word in the column `error`;
                 else it ends everything

    Raises ConfigError, WeightsError when the model cannot be built or loaded.
    """

    def __init__(
        self,
        package: ModelPackage,
        options: ModelOptions,
        *,
        said: Mapping[str, Sequence[str]] | None = None,
        keep: Sequence[str] | None = None,
        skip_errors: bool = False,
        torch_threads: int = 1,
    ) -> None:
        assert package.snapshot is not None, "a registered version has weights"
        self.signature = package.signature
        self._said, self._keep, self._skip_errors = said or {}, keep, skip_errors
        self._max_rows = options.max_batch_size
        predictor = Predictor(package.factory, package.signature, options, torch_threads)
        self._model = predictor.load(package.snapshot)
        predictor.enter_thread()

    def __call__(self, table: pa.Table) -> pa.Table:
        """The kept columns, the outputs and the version, a row for each row. Raises DataError, InferenceError."""
        chosen = choose_columns(self.signature.inputs, table.column_names, self._said)
        parts: list[Part] = []
        errors: list[str | None] = []
        self._answer_table(table, chosen, parts, errors)
        kept = table if self._keep is None else table.select(list(self._keep))
        named = [*(spec.name for spec in self.signature.outputs), VERSION_COLUMN]
        if twice := sorted(set(named) & set(kept.column_names)):
            remedy = "choose the columns to keep with --keep"
            raise ConfigError("keep", twice[0], "is a column of the input and an output of the model", remedy)
        for name, column in self._columns(parts).items():
            kept = kept.append_column(name, column)
        kept = kept.append_column(VERSION_COLUMN, pa.array(np.full(len(table), self._model.version, np.int64)))
        return kept.append_column(ERROR_COLUMN, pa.array(errors, pa.string())) if self._skip_errors else kept

    def _answer_table(
        self, table: pa.Table, chosen: Mapping[str, Sequence[str]], parts: list[Part], errors: list[str | None]
    ) -> None:
        """Append the outputs of these rows; where some make no input, each half is tried alone."""
        try:
            inputs = inputs_of(table, self.signature.inputs, chosen)
        except DataError as error:
            if not self._skip_errors:
                raise
            if len(table) == 1:
                parts.append((1, None))
                errors.append(str(error))
                return
            half = len(table) // 2
            self._answer_table(table.slice(0, half), chosen, parts, errors)
            self._answer_table(table.slice(half), chosen, parts, errors)
            return
        for start in range(0, len(table), self._max_rows):
            of_part = {name: rows[start : start + self._max_rows] for name, rows in inputs.items()}
            self._answer(of_part, min(self._max_rows, len(table) - start), parts, errors)

    def _answer(
        self, inputs: dict[str, np.ndarray], num_rows: int, parts: list[Part], errors: list[str | None]
    ) -> None:
        """Append the outputs of these rows; of rows that fail together, each half is tried alone."""
        try:
            parts.append((num_rows, self._model.predict_batch([inputs])[0]))
            errors.extend([None] * num_rows)
        except Exception as raised:
            error = raised
            if not isinstance(error, InferenceError):  # the model's own, which may mean nothing where it is read
                error = InferenceError(500, f"the model raised {type(raised).__name__}: {raised}")
            if not self._skip_errors:
                raise error from raised
            if num_rows == 1:
                parts.append((1, None))
                errors.append(str(error))
                return
            half = num_rows // 2
            self._answer({name: rows[:half] for name, rows in inputs.items()}, half, parts, errors)
            self._answer({name: rows[half:] for name, rows in inputs.items()}, num_rows - half, parts, errors)

    def _columns(self, parts: Sequence[Part]) -> dict[str, pa.ChunkedArray]:
        columns = {}
        for spec in self.signature.outputs:
            kind = column_type(spec)
            chunks = [
                pa.nulls(count, kind) if outputs is None else column_of(spec, outputs[spec.name])
                for count, outputs in parts
            ]
            columns[spec.name] = pa.chunked_array(chunks, kind)
        return columns
