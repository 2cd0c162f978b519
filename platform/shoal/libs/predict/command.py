"""`shoal predict`: send requests to a model of an endpoint from the shell.

Parse, call, print; `input_readers` reads. The answer goes to standard output, its model and version to standard error.
For models that write, all texts are asked for at once.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import numpy as np
from rich.table import Column

from shoal.client import Answer, Client, StreamedText
from shoal.client.discovery import find_endpoint
from shoal.errors import ConfigError, DataError, InferenceError
from shoal.extend.cli import (
    EndpointName,
    Key,
    ModelName,
    Positive,
    Texts,
    ca_option,
    make_literal_console,
    make_table,
    print_json,
    verb,
)
from shoal.extend.registry import Registry, split_ref
from shoal.extend.runs import format_number
from shoal.extend.serve import ArrayLike, has_batch_first, is_integer, summarize_error
from shoal.libs.predict import input_readers as read
from shoal.open_inference.messages import ModelMetadata, TensorMetadata

_Reader = Callable[[Sequence[TensorMetadata]], dict[str, ArrayLike]]
MAX_ROWS_SHOWN = 50
FEW_VALUES = 12
_WHITE = "a white pixel was sent as 1; --white 255 if the model takes pixels of 0 to 255"
MAX_AT_ONCE = 32  # the endpoint computes them together


@verb(work="waiting for the answers")
@ca_option
def predict(
    model: ModelName,
    rows: Annotated[Texts, "[ROW]..."] = (),
    *,
    arguments: Annotated[
        Texts,
        "--input X=1,2,3",
        "Numbers, a text, or a JSON list for an input; repeated, for the others and for more rows.",
    ] = (),
    json_file: Annotated[str | None, "--json FILE", "A JSON file of inputs or rows; - is standard input."] = None,
    table: Annotated[Path | None, "--csv --parquet", "A table: a row for each prediction."] = None,
    columns: Annotated[Texts, "--columns [X=]A,B,C", "The columns of an input."] = (),
    images: Annotated[tuple[Path, ...], "--image", "A picture; may be repeated."] = (),
    white: Annotated[float | None, "The number of a white pixel.  [default: 1; 255 for integers]"] = None,
    arrays: Annotated[Texts, "--npy [X=]FILE", "A NumPy array [rows, ...], or .npz of inputs."] = (),
    texts: Annotated[Texts, "--text TEXT|@FILE", "For a language model; @FILE: on each line."] = (),
    fields: Annotated[Texts, "--with NAME=VALUE", "Of texts: max_tokens=60, temperature=0."] = (),
    rows_per_request: Positive = 64,
    deadline_s: Annotated[
        float | None, "How long an answer is useful; the endpoint rejects a request that would be late."
    ] = None,
    sticky: Annotated[str, "--sticky KEY", "Always use the same side of a canary."] = "",
    track: Annotated[str, "--track stable|candidate", "Use one side of a canary."] = "",
    output: Literal["table", "json"] = "table",
    endpoint: EndpointName = None,
    key: Key = "",
) -> None:
    """Send requests to a model of an endpoint: as rows, words, JSON, a table, images, arrays or texts.

    A ROW is a JSON object with a field for each column, or for each input. null is a value that is not known.

    Prints a row for each row of input; to a model without a batch, each row is a request. NAME@3 requests this
    version, if it is loaded; an alias, as in NAME@champion, requests its version in the registry of this machine.

    \b
    Examples:
      shoal predict customers '{"age": 72, "plan": "basic", "since": "2025-05-31", "balance": null}'
      shoal predict cartpole --input 0.1,0,-0.1,0
      shoal predict words --input "one row, with its comma" --input another
      shoal predict cartpole --json observations.json --output json
      shoal predict tabular --csv patients.csv --columns radius,texture,area
      shoal predict fashion --image shoe.png --white 255
      shoal predict fashion@4 --npy images.npy --deadline-s 0.5
      shoal predict smollm --text "What is a shoal?" --with max_tokens=60 --with temperature=0
      shoal predict smollm --text @questions.jsonl --output json
    """
    for file in (json_file, table, *images, *arrays):
        if file not in (None, "-"):
            read.require_file(str(file))
    name, ref = model.partition("@")[0], re.sub("^[^:@]*:", "", model)  # as requested, and as registered: an adapter's
    version = None if not (word := split_ref(ref)[1]) else int(word) if word.isdigit() else Registry().get(ref).version
    kinds: dict[str, tuple[object, _Reader]] = {
        "ROW": (rows, partial(read.from_rows, rows)),
        "--input": (arguments, partial(read.parse_arguments, arguments)),
        "--json": (json_file, lambda inputs: read.from_json(json_file or "-", inputs, has_rows=has_rows)),
        "--csv or --parquet": (table, partial(read.from_table, table or Path(), columns)),
        "--image": (images, partial(read.from_images, images, white)),
        "--npy": (arrays, partial(read.from_arrays, arrays)),
        "--text": (texts, lambda _: {}),
    }
    given = [kind for kind, (value, _) in kinds.items() if value]
    if len(given) != 1:
        raise ConfigError("inputs", " ".join(given), "is not one kind of input", f"give one of {', '.join(kinds)}")
    target = find_endpoint(endpoint, name.partition(":")[0])
    with target.connect(key) as client:
        options = {"deadline_s": deadline_s, "sticky": sticky, "track": track, "version": version}
        if texts:
            return _show_versions(name, *predict_texts(client, name, texts, fields, output, options))
        has_rows = all(map(has_batch_first, (signature := client.metadata(name)).inputs))
        inputs = _read_inputs(client, signature, has_rows, kinds[given[0]][1])
        begun_s = time.monotonic()
        answers = _request_predictions(client, name, inputs, rows_per_request if has_rows else 0, options)
        took_s = time.monotonic() - begun_s
    _show(signature, answers, output)
    _show_versions(name, {answer.version for answer in answers}, took_s)
    if images and white is None and not is_integer(signature.inputs[0]):
        click.secho(_WHITE, dim=True, err=True)


def _read_inputs(client: Client, signature: ModelMetadata, has_rows: bool, reader: _Reader) -> dict[str, ArrayLike]:
    """Raises DataError; for a model that writes text, with what to do."""
    try:
        return reader(signature.inputs if has_rows else read.add_rows(signature.inputs))
    except DataError as error:
        with suppress(InferenceError):
            client.has_chat(signature.name)
            raise DataError(error.field, error.value, error.problem, "texts are given by --text TEXT") from None
        raise


def _show_versions(name: str, versions: Collection[int], took_s: float) -> None:
    shown = ", ".join(map(str, sorted(versions)))
    click.secho(f"{name} version {shown}, {took_s * 1000:.1f} ms", dim=True, err=True)


def _request_predictions(
    client: Client, model: str, inputs: dict[str, ArrayLike], rows_per_request: int, options: dict[str, Any]
) -> list[Answer]:
    """One request after the other, of so many rows each; 0: of one, which is the whole request. Raises
    InferenceError."""
    parts = read.split_requests(inputs, rows_per_request or 1)
    try:
        if rows_per_request:
            return [client.infer(model, part, **options) for part in parts]
        answers = [client.infer(model, {name: rows[0] for name, rows in part.items()}, **options) for part in parts]
        return [replace(each, outputs={name: array[None] for name, array in each.outputs.items()}) for each in answers]
    except InferenceError as error:
        most = max(len(rows) for part in parts for rows in part.values())
        has_many_rows = error.status == 422 and re.search(r"\b1 to \d+ rows", error.message)
        if most == 1 or not (has_many_rows or error.status == 413):
            raise
        remedy = f"the requests had up to {most} rows each; --rows-per-request sends fewer"
        raise InferenceError(error.status, f"{error.message}. {remedy}") from None


def _show(signature: ModelMetadata, answers: Sequence[Answer], output: str) -> None:
    specs = [spec for spec in signature.outputs if spec.name in answers[0].outputs]
    names = [spec.name for spec in specs]
    columns_by_name = {spec.name: spec.columns if len(spec.shape) == 2 else [] for spec in specs}
    outputs = {name: [row for answer in answers for row in answer[name]] for name in names}
    versions = [answer.version for answer in answers for _ in range(len(answer[names[0]]))]
    if output == "json":
        rows = [
            {name: _to_json_value(values[row], columns_by_name[name]) for name, values in outputs.items()}
            | {"version": version}
            for row, version in enumerate(versions)
        ]
        print_json(rows)
        return
    console = make_literal_console(soft_wrap=False)
    limit = MAX_ROWS_SHOWN if console.is_terminal else len(versions)
    columns = [Column("row", justify="right"), *(Column(name, overflow="fold") for name in names)]
    shown = range(min(limit, len(versions)))
    cells = (
        (str(row), *(_format_value(values[row], columns_by_name[name]) for name, values in outputs.items()))
        for row in shown
    )
    console.print(make_table(*columns, rows=cells))
    if len(versions) > limit:
        console.print(f"and {len(versions) - limit} more rows: --output json has them all", style="dim")


def _to_json_value(value: Any, columns: Sequence[str] = ()) -> Any:
    """Convert to JSON: non-finite numbers become null, bytes text, values of named columns an object."""
    if columns:
        return {name: _to_json_value(each) for name, each in zip(columns, value, strict=True)}
    if isinstance(value, np.ndarray):
        return [_to_json_value(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.floating):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def _format_value(value: Any, columns: Sequence[str] = ()) -> str:
    """Format for people: a few digits; of many values the first ones, and the index of the largest."""
    if columns:
        return ", ".join(f"{name} {_format_value(each)}" for name, each in zip(columns, value, strict=True))
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return format_number(float(value)) if value.dtype.kind == "f" else str(value)
    flat = value.ravel()
    shown = " ".join(_format_value(each) for each in flat[:FEW_VALUES])
    if flat.size > FEW_VALUES:
        shown += f" ... ({flat.size} values)"
    if flat.dtype.kind == "f" and value.ndim == 1 and flat.size > 2 and np.isfinite(flat).all():
        shown += f"  (largest: {int(flat.argmax())})"
    return shown


def read_texts(given: Sequence[str]) -> list[str | list[Any]]:
    """Texts, or @FILE with one on each line: as it is, or as JSON with `prompt` or `messages`. Raises DataError."""
    texts: list[str | list[Any]] = []
    for text in given:
        if not text.startswith("@"):
            texts.append(text)
            continue
        try:
            lines = (sys.stdin.read() if text == "@-" else Path(text[1:]).read_text(encoding="utf-8")).split("\n")
            rows = [json.loads(line) if line.startswith("{") else line for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise DataError("text", text, f"cannot be read: {summarize_error(error)}") from None
        for row in rows:
            value = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
            if not isinstance(value, str | list):
                raise DataError("text", text, "has a line without prompt and messages", '{"prompt": "..."}')
            texts.append(value)
    return texts


def read_fields(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where VALUE is JSON or a text."""
    fields: dict[str, Any] = {}
    for name, _, value in (each.partition("=") for each in given):
        fields[name] = value
        with suppress(ValueError):
            fields[name] = json.loads(value)
    return fields


def predict_texts(
    client: Client, model: str, given: Sequence[str], fields: Sequence[str], output: str, options: dict[str, Any]
) -> tuple[set[int], float]:
    """Show an answer to each text; without a chat template, texts are continued. Returns the versions that wrote them,
    and how many seconds it took. Raises DataError, InferenceError that names the text."""
    texts, has_chat = read_texts(given), client.has_chat(model)
    more, begun_s = {**options, **read_fields(fields)}, time.monotonic()
    version = more.pop("version")
    named = model if version is None else f"{model}@{version}"

    def write(number: int, text: Any) -> StreamedText:
        ask = client.chat if has_chat or not isinstance(text, str) else client.generate
        try:
            return ask(named, text, **more).read()
        except InferenceError as error:
            raise InferenceError(error.status, f"text {number}: {error.message}", field=error.field) from None

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        answers = list(pool.map(write, range(len(texts)), texts))
    took_s = time.monotonic() - begun_s
    if output == "json":
        names = ("text", "finish", "spans", "num_prompt_tokens", "num_new_tokens")
        print_json([{name: getattr(each, name) for name in names} for each in answers])
    else:
        cells = ((str(row), each.text, each.finish, str(each.num_new_tokens)) for row, each in enumerate(answers))
        table = make_table(
            Column("row", justify="right"), Column("text", overflow="fold"), "finish", "tokens", rows=cells
        )
        make_literal_console(soft_wrap=False).print(table)
    return {number for each in answers for number, _ in each.spans}, took_s
