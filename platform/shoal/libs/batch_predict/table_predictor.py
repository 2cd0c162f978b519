"""A model as a function of tables: takes some columns, and adds its outputs and its version as columns. One of
language answers the text, or the messages, in a column of each row; its rows share the steps of one engine.

Called by each process of a batch prediction. Uses the endpoint's own Predictor, so that a row gets the same outputs as
from the endpoint. Rows whose lists differ in length share a batch if the model's options allow it (`ragged`). Knows no
file and no Ray.
"""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from shoal.errors import ConfigError, DataError, InferenceError
from shoal.extend.serve import ModelOptions, ModelPackage, Predictor, RegisteredModel
from shoal.open_inference.tables import build_inputs, choose_columns, column_type, split_by_length, to_column
from shoal.plugins.find import find_in_library

# The number of rows, with their outputs, or None and the error of a failed one.
OutputPart = tuple[int, dict[str, np.ndarray] | None, str | None]
VERSION_COLUMN = "model_version"
ERROR_COLUMN = "error"
SKIP_ERRORS_HINT = "--skip-errors goes on without outputs for such rows"
TEXT_SCHEMA = pa.schema(
    [
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
        ("new_tokens", pa.int64()),
        (VERSION_COLUMN, pa.int64()),
        (ERROR_COLUMN, pa.string()),
    ]
)


@dataclass
class _TableRequest:
    """Consecutive rows as one request, and what they have got, once it is answered."""

    inputs: dict[str, np.ndarray]
    num_rows: int
    parts: list[OutputPart] = field(default_factory=list)

    def slice(self, start: int, stop: int) -> _TableRequest:
        """Some of the rows."""
        return _TableRequest({name: values[start:stop] for name, values in self.inputs.items()}, stop - start)


def keep_columns(table: pa.Table, keep: Sequence[str] | None, added: Sequence[str]) -> pa.Table:
    """The columns to keep, None for all, beside those to add. Raises ConfigError for one that is there twice."""
    output = table if keep is None else table.select(list(keep))
    # A table that has the target already: both are wanted, for comparison.
    output = output.rename_columns([f"input_{name}" if name in added else name for name in output.column_names])
    if twice := [name for name in output.column_names if output.column_names.count(name) > 1]:
        remedy = "choose the columns to keep with --keep"
        raise ConfigError("keep", twice[0], "is a column of the input and of the output", remedy)
    return output


class TablePredictor:
    """Answers tables with one version of a model.

    said:        the columns of each input, where they do not follow from their names
    keep:        the columns copied from input to output; None for all
    skip_errors: a row that is no valid input, or on which the model fails, gets no outputs and an entry in the column
                 `error`; else it raises

    Raises ConfigError, WeightsError when the model cannot be built or loaded.
    """

    def __init__(
        self,
        package: ModelPackage,
        options: ModelOptions,
        *,
        columns_by_input: Mapping[str, Sequence[str]] | None = None,
        keep: Sequence[str] | None = None,
        skip_errors: bool = False,
        torch_threads: int = 1,
    ) -> None:
        self._columns_by_input = columns_by_input or {}
        self._keep = keep
        self._skip_errors = skip_errors
        predictor = Predictor(package.factory, package.signature, options, torch_threads)
        self.signature, self._max_rows = predictor.layout.signature, options.max_rows
        self._max_request_rows = 1 if predictor.layout.shared_inputs else options.max_rows  # each row has its own
        self._model, self._compute_bucket = predictor.load(package.snapshot), predictor.compute_bucket
        predictor.set_torch_threads()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the copied columns, the outputs and the version, a row for each row. Raises DataError,
        InferenceError."""
        chosen = choose_columns(self.signature.inputs, table.column_names, self._columns_by_input)
        requests = self._requests(table, chosen)
        for together in self._batches(requests):
            self._predict(together)
        parts = [part for request in requests for part in request.parts]
        added = [*(spec.name for spec in self.signature.outputs), VERSION_COLUMN, *[ERROR_COLUMN] * self._skip_errors]
        output = keep_columns(table, self._keep, added)
        is_table = any(spec.kind for spec in self.signature.inputs)
        for spec in self.signature.outputs:
            kind = column_type(spec)
            chunks = [
                pa.nulls(count, kind) if outputs is None else to_column(spec, outputs[spec.name])
                for count, outputs, _ in parts
            ]
            column = pa.chunked_array(chunks, kind)
            if is_table and spec.datatype == "BYTES":  # as texts of its input are
                column = column.cast(pa.string())
            output = output.append_column(spec.name, column)
        output = output.append_column(VERSION_COLUMN, pa.array(np.full(len(table), self._model.version, np.int64)))
        if not self._skip_errors:
            return output
        errors = [error for count, _, error in parts for _ in range(count)]
        return output.append_column(ERROR_COLUMN, pa.array(errors, pa.string()))

    def _requests(self, table: pa.Table, chosen: Mapping[str, Sequence[str]]) -> list[_TableRequest]:
        """Split the table, in order, into requests of equal shapes; where some rows are invalid, each half
        separately."""
        requests: list[_TableRequest] = []
        for rows in split_by_length(table, self.signature.inputs, chosen):
            try:
                inputs = build_inputs(rows, self.signature.inputs, chosen)
            except DataError as error:
                if not self._skip_errors:
                    raise self._locate_error(rows, chosen, error) from None
                half = len(rows) // 2
                if half:
                    requests += self._requests(rows.slice(0, half), chosen) + self._requests(rows.slice(half), chosen)
                else:
                    requests.append(_TableRequest({}, 1, [(1, None, str(error))]))
                continue
            request = _TableRequest(inputs, len(rows))
            for start in range(0, len(rows), self._max_request_rows):
                requests.append(request.slice(start, min(start + self._max_request_rows, len(rows))))
        return requests

    def _locate_error(self, rows: pa.Table, chosen: Mapping[str, Sequence[str]], error: DataError) -> DataError:
        """The error of the first invalid row alone. It has no row number, since it is one of a block."""
        for row in range(len(rows)):
            try:
                build_inputs(rows.slice(row, 1), self.signature.inputs, chosen)
            except DataError as alone:
                columns = dict.fromkeys(column for columns in chosen.values() for column in columns)
                values = reprlib.repr(rows.select([*columns]).slice(row, 1).to_pylist()[0])
                error = DataError(alone.field, alone.value, f"{alone.problem}, in the row {values}", alone.remedy)
                break
        remedy = "; ".join(filter(None, (error.remedy, SKIP_ERRORS_HINT)))
        return DataError(error.field, error.value, error.problem, remedy)

    def _batches(self, requests: Sequence[_TableRequest]) -> Iterator[list[_TableRequest]]:
        """Group requests that may share a batch, each of at most the model's largest batch."""
        open_batches: dict[Hashable, list[_TableRequest]] = {}
        for request in requests:
            if request.parts:
                continue
            bucket = self._compute_bucket(request.inputs)
            batch = open_batches.setdefault(bucket, [])
            if batch and sum(each.num_rows for each in batch) + request.num_rows > self._max_rows:
                yield open_batches.pop(bucket)
                open_batches[bucket] = batch = []
            batch.append(request)
        yield from open_batches.values()

    def _predict(self, requests: Sequence[_TableRequest]) -> None:
        """Compute the outputs of these requests; when rows fail together, try each half alone."""
        try:
            if (limits := self._model.size_limits) is not None:
                for request in requests:
                    limits.check(request.inputs)
            answers = self._model.predict_batch([request.inputs for request in requests])
        except Exception as raised:
            error = raised
            if not isinstance(error, InferenceError):  # the model's class may be unknown to the reader
                error = InferenceError(500, f"the model raised {type(raised).__name__}: {raised}")
            if not self._skip_errors:
                raise InferenceError(error.status, f"{error.message}. {SKIP_ERRORS_HINT}") from raised
            self._predict_halves(requests, str(error))
            return
        for request, outputs in zip(requests, answers, strict=True):
            request.parts.append((request.num_rows, outputs, None))

    def _predict_halves(self, requests: Sequence[_TableRequest], error: str) -> None:
        if len(requests) > 1:
            half = len(requests) // 2
            self._predict(requests[:half])
            self._predict(requests[half:])
            return
        (request,) = requests
        half = request.num_rows // 2
        if not half:
            request.parts.append((1, None, error))
            return
        for part in (request.slice(0, half), request.slice(half, request.num_rows)):
            self._predict([part])
            request.parts += part.parts


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
        table = pa.Table.from_pylist(rows, TEXT_SCHEMA)
        return table if skip_errors else table.drop_columns(ERROR_COLUMN)
