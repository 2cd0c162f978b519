"""A language model as a function of tables: an answer for the text, or the messages, in a column of each row.

Called by each process of a batch prediction. Rows share the steps of one engine. Knows no file and no Ray.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from shoal.errors import InferenceError
from shoal.extend.serve import ModelOptions, Predictor, RegisteredModel
from shoal.libs.batch_predict.table_predictor import ERROR_COLUMN, SKIP_ERRORS_HINT, VERSION_COLUMN
from shoal.plugins.find import find_in_library

SCHEMA = pa.schema(
    [
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
        ("new_tokens", pa.int64()),
        (VERSION_COLUMN, pa.int64()),
        (ERROR_COLUMN, pa.string()),
    ]
)


def find_texts(name: str) -> Any:
    """What writes texts, `local`, or checks a version for them, `check`. Raises ConfigError."""
    return find_in_library(name, "shoal.texts", "language", "text", name)


class TextPredictor:
    """Answers columns with one version of a language model. generate: fields of the HTTP API, for each row.

    Raises ConfigError, WeightsError when the model cannot be loaded, or writes no text.
    """

    def __init__(
        self, source: RegisteredModel, version: int, options: ModelOptions, generate: Mapping[str, Any], threads: int
    ) -> None:
        package = source.load_package(version)
        assert package.snapshot is not None, "a registered version has weights"
        options = options.update({"warm_up": False})  # an example says nothing of texts
        predictor = Predictor(package.factory, package.signature, options, threads)
        self._texts = find_texts("local")(source.name, source.registry, options, predictor.load(package.snapshot))
        self._version, self._generate = version, generate

    def __call__(self, given: pa.ChunkedArray, skip_errors: bool) -> pa.Table:
        """A row for each text or list of messages. Raises InferenceError, unless `skip_errors`."""
        texts = given.to_pylist()
        rows: list[dict[str, Any]] = [{VERSION_COLUMN: self._version} for _ in texts]
        for row, answer in self._texts.answer_all(texts, self._generate):
            if not isinstance(answer, InferenceError):
                rows[row] |= {
                    "answer": answer.text,
                    "finish_reason": answer.finish,
                    "new_tokens": answer.num_new_tokens,
                }
            elif skip_errors:
                rows[row][ERROR_COLUMN] = str(answer)
            else:
                problem = f"{answer.message}, in the row {reprlib.repr(texts[row])}. {SKIP_ERRORS_HINT}"
                raise InferenceError(answer.status, problem, field=answer.field)
        table = pa.Table.from_pylist(rows, SCHEMA)
        return table if skip_errors else table.drop_columns(ERROR_COLUMN)
