"""Texts of `shoal predict`, for models that write: reads them, asks the endpoint for all, shows the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Column

from shoal.client import Client, StreamedText
from shoal.errors import DataError, InferenceError
from shoal.extend.cli import make_literal_console, make_table, print_json

MAX_AT_ONCE = 32  # the endpoint computes them together
Text = str | list[dict[str, Any]]  # a text, or messages


def read_texts(texts: Sequence[str], path: str | None) -> list[Text]:
    """Those given, or of a file: a text for each line, or JSON with `prompt` or `messages`. Raises DataError."""
    if path is None:
        return list(texts)
    found: list[Text] = []
    try:
        lines = (sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")).split("\n")
        for number, line in enumerate(lines, 1):
            if line.startswith("{") and not path.endswith(".txt"):
                value = json.loads(line)
                given = value.get("prompt", value.get("messages"))
                if not isinstance(given, str | list):
                    raise DataError("texts", f"{path}:{number}", "has no prompt and no messages", '{"prompt": "..."}')
                found.append(given)
            elif line.strip():
                found.append(line.rstrip("\r"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError("texts", path, f"cannot be read: {error}", "give a text, or JSON, on each line") from None
    if not found:
        raise DataError("texts", path, "has no text", "give one on each line")
    return found


def write_texts(client: Client, model: str, texts: Sequence[Text], **options: Any) -> list[StreamedText]:
    """The answers, or continuations where the model has no chat template. Raises InferenceError that names the text."""
    has_chat = client.has_chat(model.partition("@")[0])

    def write(number: int) -> StreamedText:
        text = texts[number]
        try:
            if has_chat or not isinstance(text, str):
                return client.chat(model, text, **options).read()
            return client.generate(model, text, **options).read()
        except InferenceError as error:
            raise InferenceError(error.status, f"text {number}: {error.message}", field=error.field) from None

    with ThreadPoolExecutor(min(MAX_AT_ONCE, len(texts))) as pool:
        return list(pool.map(write, range(len(texts))))


def show_texts(answers: Sequence[StreamedText], output: str) -> None:
    """As a table, or JSON."""
    if output == "json":
        names = ("text", "finish", "spans", "num_prompt_tokens", "num_new_tokens")
        print_json([{name: getattr(each, name) for name in names} for each in answers])
        return
    cells = ((str(row), each.text, each.finish, str(each.num_new_tokens)) for row, each in enumerate(answers))
    columns = [Column("row", justify="right"), Column("text", overflow="fold"), Column("finish"), Column("tokens")]
    make_literal_console(soft_wrap=not sys.stdout.isatty()).print(make_table(*columns, rows=cells))
