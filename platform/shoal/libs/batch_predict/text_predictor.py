"""A language model as a function of tables: an answer for the text, or the messages, in a column of each row.

Called by each process of a batch prediction. A block's rows share the steps of one engine. Knows no file and no Ray.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shoal.errors import ConfigError, InferenceError
from shoal.extend.serve import ModelOptions, Predictor, RegisteredModel
from shoal.libs.batch_predict.table_predictor import ERROR_COLUMN, SKIP_ERRORS_HINT, VERSION_COLUMN, keep_columns
from shoal.plugins.find import find_extension

COLUMNS = ("answer", "finish_reason", "new_tokens")


def find_texts(name: str) -> Any:
    """What writes texts, `local`, or checks a version for them, `check`. Raises ConfigError."""
    try:
        return find_extension(name, "shoal.texts", {})
    except ValueError as error:
        raise ConfigError("text", name, str(error), "install the library language of Shoal") from None


class TextPredictor:
    """Answers tables with one version of a language model.

    column:   of texts, or of lists of messages
    generate: fields of the HTTP API, for each row
    keep, skip_errors: as TablePredictor has them

    Raises ConfigError, WeightsError when the model cannot be loaded, or writes no text.
    """

    def __init__(
        self,
        source: RegisteredModel,
        version: int,
        options: ModelOptions,
        column: str,
        generate: Mapping[str, Any],
        *,
        keep: Sequence[str] | None = None,
        skip_errors: bool = False,
        torch_threads: int = 1,
    ) -> None:
        package = source.load_package(version)
        assert package.snapshot is not None, "a registered version has weights"
        options = options.update({"warm_up": False})  # an example says nothing of texts
        predictor = Predictor(package.factory, package.signature, options, torch_threads)
        self._texts = find_texts("local")(source.name, source.registry, options, predictor.load(package.snapshot))
        predictor.set_torch_threads()
        self._version, self._column, self._generate = version, column, generate
        self._keep, self._skip_errors = keep, skip_errors

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the copied columns, the answers and the version, a row for each row. Raises InferenceError."""
        rows: list[tuple[str | None, str | None, int | None]] = [(None, None, None)] * len(table)
        errors: list[str | None] = [None] * len(table)
        given = table[self._column].to_pylist()
        for row, outcome in self._texts.answer_all(given, self._generate):
            if not isinstance(outcome, InferenceError):
                rows[row] = outcome.text, outcome.finish, len(outcome.tokens)
            elif self._skip_errors:
                errors[row] = str(outcome)
            else:
                problem = f"{outcome.message}, in the row {reprlib.repr(given[row])}"
                raise InferenceError(outcome.status, f"{problem}. {SKIP_ERRORS_HINT}", field=outcome.field)
        added = [*COLUMNS, VERSION_COLUMN, *[ERROR_COLUMN] * self._skip_errors]
        output = keep_columns(table, self._keep, added)
        values = zip(*rows, strict=True) if rows else ((), (), ())
        for name, column, kind in zip(COLUMNS, values, (pa.string(), pa.string(), pa.int64()), strict=True):
            output = output.append_column(name, pa.array(column, kind))
        output = output.append_column(VERSION_COLUMN, pa.array(np.full(len(table), self._version, np.int64)))
        return output.append_column(ERROR_COLUMN, pa.array(errors, pa.string())) if self._skip_errors else output
