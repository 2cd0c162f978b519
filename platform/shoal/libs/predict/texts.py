"""Texts of `shoal predict`, for models that write: reads them, asks for all at once, shows the answers."""

from __future__ import annotations

import json
import sys
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
    found: list[str | list[Any]] = []
    for text in given:
        if not text.startswith("@"):
            found.append(text)
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
            found.append(value)
    return found


def read_fields(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where VALUE is JSON or a text."""
    fields: dict[str, Any] = {}
    for name, _, value in (each.partition("=") for each in given):
        fields[name] = value
        with suppress(ValueError):
            fields[name] = json.loads(value)
    return fields


def write_texts(client: Client, model: str, texts: Sequence[Any], **options: Any) -> list[StreamedText]:
    """Answers; without a chat template, texts are continued. Raises InferenceError that names the text."""
    has_chat = client.has_chat(model.partition("@")[0])

    def write(number: int, text: Any) -> StreamedText:
        ask = client.chat if has_chat or not isinstance(text, str) else client.generate
        try:
            return ask(model, text, **options).read()
        except InferenceError as error:
            raise InferenceError(error.status, f"text {number}: {error.message}", field=error.field) from None

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return list(pool.map(write, range(len(texts)), texts))


def show_texts(answers: Sequence[StreamedText], output: str) -> None:
    """As a table, or JSON."""
    if output == "json":
        names = ("text", "finish", "spans", "num_prompt_tokens", "num_new_tokens")
        print_json([{name: getattr(each, name) for name in names} for each in answers])
        return
    cells = ((str(row), each.text, each.finish, str(each.num_new_tokens)) for row, each in enumerate(answers))
    columns = [Column("row", justify="right"), Column("text", overflow="fold"), Column("finish"), Column("tokens")]
    make_literal_console(soft_wrap=not sys.stdout.isatty()).print(make_table(*columns, rows=cells))
