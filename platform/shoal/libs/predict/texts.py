"""Texts of `shoal predict`, for models that write: reads them, asks for all at once, shows the answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Column

from shoal.client import Client, StreamedText
from shoal.errors import DataError, InferenceError
from shoal.extend.cli import make_literal_console, make_table, print_json
from shoal.extend.serve import summarize_error

MAX_AT_ONCE = 32  # the endpoint computes them together


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
        make_literal_console(soft_wrap=not sys.stdout.isatty()).print(table)
    return {number for each in answers for number, _ in each.spans}, took_s
