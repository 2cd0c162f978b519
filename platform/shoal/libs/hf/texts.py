"""Texts as rows of tokens: records of a file, tokenised once, padded or packed into batches.

    {"text": ...}                          every token is learnt
    {"prompt": ..., "completion": ...}     the completion is learnt
    {"messages": [{"role", "content"}]}    what the assistant says is learnt; written by the tokenizer's chat template
    {"text": ..., "label": ...}            a class, by its name or number
    {"tokens": [...], "labels": [...]}     a class for each word

Called by the Tasks. Knows no model. Legend: B rows, T tokens.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError, needs_extra

IGNORED = -100  # the label of what is not learnt, as torch's cross_entropy has it
_CHUNK = 1000
_TEXTS = ("text", "prompt", "completion")  # fields and columns that are texts
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Record:
    """One sample of a file, and where it is: for errors."""

    where: str
    values: Mapping[str, Any]

    def make_error(self, problem: str, remedy: str = "") -> DataError:
        return DataError("data", self.where, problem, remedy)

    def make_field_error(self, remedy: str) -> DataError:
        """Make one of fields that are missing, or are no texts."""
        for name in _TEXTS:
            if name in self.values and not isinstance(self.values[name], str):
                value = self.values[name]
                problem = "is null" if value is None else f"is of type {type(value).__name__}, and no text"
                return self.make_error(f"{name} {problem}", f"{remedy}, or remove it")
        return self.make_error(f"has {', '.join(self.values) or 'nothing'}", remedy)


def read_records(path: Path) -> list[Record]:
    """The samples of a file of JSON lines, CSV or Parquet, or the lines of a .txt file. Raises DataError."""
    if not path.is_file():
        raise DataError("data", str(path), "is no file", f"paths are looked up from {Path.cwd()}")
    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".parquet"):
            rows: list[tuple[int, Any]] = list(enumerate(_read_table(path, suffix), 1))
        elif suffix in (".jsonl", ".json", ".ndjson", ".txt"):
            rows = _read_lines(path, suffix)
        else:
            raise DataError("data", str(path), "is of no known kind", "give .jsonl, .txt, .csv or .parquet")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("data", str(path), f"cannot be read: {error}", "give a file of UTF-8") from error
    records = [Record(f"{path}:{number}", values) for number, values in rows]
    if not records:
        raise DataError("data", str(path), "is empty", "give it samples")
    for each in records:
        if not isinstance(each.values, dict):
            raise each.make_error("is no JSON object", 'write {"text": ...}')
    return records


def _read_lines(path: Path, suffix: str) -> list[tuple[int, Any]]:
    """What each line holds, with its number; of a .json file that is one array its elements, counted from 1.

    Lines end at \\n only: a JSON string may have other separators in it.
    """
    number = 0
    try:
        if suffix == ".json" and (text := path.read_text(encoding="utf-8-sig")).lstrip().startswith("["):
            return list(enumerate(json.loads(text), 1))
        rows: list[tuple[int, Any]] = []
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append((number, {"text": line.rstrip("\r\n")} if suffix == ".txt" else json.loads(line)))
        return rows
    except json.JSONDecodeError as error:
        remedy = "give a JSON object a line" if number else "give one array of JSON objects, or a JSON object a line"
        raise DataError("data", f"{path}:{number or error.lineno}", f"is no JSON: {error}", remedy) from error


def _read_table(path: Path, suffix: str) -> list[dict[str, Any]]:
    with needs_extra("data"):
        from pyarrow import csv, lib, parquet, string
    # "12" and "NA" are texts; an empty cell is null, but for "" in quotes
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys((*_TEXTS, "label"), string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    parse = csv.ParseOptions(newlines_in_values=True)
    try:
        if suffix == ".csv":
            table = csv.read_csv(path, parse_options=parse, convert_options=convert)
        else:
            table = parquet.read_table(path)
    except lib.ArrowException as error:
        raise DataError("data", str(path), f"cannot be read: {error}") from error
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def split_records(records: Sequence[Record], share: float) -> tuple[list[Record], list[Record]]:
    """Samples for training, and a share of at least one for validation, the same each time."""
    if len(records) < 2:
        raise DataError("validation", share, f"cannot be taken from {len(records)} sample", "give more samples")
    chosen = np.random.default_rng(0).permutation(len(records))[: max(1, round(share * len(records)))]
    held_out = set(chosen.tolist())
    train = [each for index, each in enumerate(records) if index not in held_out]
    if not train:
        raise DataError("validation", share, "leaves nothing to train on", "give a smaller share")
    return train, [records[index] for index in sorted(held_out)]


@dataclass(frozen=True)
class TokenSample:
    """The tokens of a sample, and what is to be predicted at each: [T] both; or one class of the sample."""

    tokens: Ints
    labels: Ints | int


@dataclass(frozen=True)
class TextSpec:
    """How texts become samples.

    tokenizer:  of transformers, a fast one
    max_length: tokens of a sample, at most; truncate: cut longer ones instead of rejecting them
    vocabulary: tokens that the model has; None: not known
    """

    tokenizer: Any
    max_length: int
    truncate: bool
    vocabulary: int | None = None

    def encode(self, texts: Sequence[Any], **options: Any) -> list[Any]:
        """The encodings of all texts, with the characters of each token."""
        encodings: list[Any] = []
        for begin in range(0, len(texts), _CHUNK):
            chunk = list(texts[begin : begin + _CHUNK])
            encodings += self.tokenizer(chunk, return_attention_mask=False, verbose=False, **options).encodings
        return encodings

    def limit(self, record: Record, tokens: Sequence[int], labels: Sequence[int]) -> tuple[Ints, Ints]:
        """Raises DataError for a sample that is empty, too long, or has tokens that the model does not have."""
        if not tokens:
            raise record.make_error("has no tokens", "remove it")
        if self.vocabulary is not None and max(tokens) >= self.vocabulary:
            problem = f"has token {max(tokens)}, and the model's vocab_size is {self.vocabulary}"
            raise record.make_error(problem, "give the model the tokenizer that it was trained with")
        if len(tokens) > self.max_length and not self.truncate:
            problem = f"has {len(tokens)} tokens, more than max_length={self.max_length}"
            raise record.make_error(problem, "raise max_length, or give truncate=true")
        size = self.max_length
        return np.asarray(tokens[:size], np.int64), np.asarray(labels[:size], np.int64)


def _check_learnt(record: Record, labels: Ints) -> None:
    """Raises DataError for a sample of whose tokens none is learnt."""
    if (labels == IGNORED).all():
        problem = f"has nothing to learn in its first {len(labels)} tokens"
        raise record.make_error(problem, "remove it, or raise max_length")


Spans = list[tuple[int, int]]


def encode_language(records: Sequence[Record], spec: TextSpec, _: object = None) -> list[TokenSample]:
    """Samples whose labels are the tokens that follow. Raises DataError."""
    written = [_write_text(each, spec.tokenizer) for each in records]
    end = spec.tokenizer.eos_token_id
    samples: list[TokenSample] = []
    for is_chat in (False, True):
        chosen = [index for index, each in enumerate(written) if each[2] is is_chat]
        encodings = spec.encode([written[index][0] for index in chosen], add_special_tokens=not is_chat)
        for index, each in zip(chosen, encodings, strict=True):
            spans = written[index][1]
            tokens = list(each.ids)
            taken = [any(first < stop and last > start for start, stop in spans) for first, last in each.offsets]
            if not is_chat and end is not None:  # some tokenizers add it themselves
                has_end = bool(tokens) and tokens[-1] == end
                tokens, taken = (tokens, [*taken[:-1], True]) if has_end else ([*tokens, end], [*taken, True])
            following = [
                token if is_learnt else IGNORED for token, is_learnt in zip(tokens[1:], taken[1:], strict=True)
            ]
            cut, labels = spec.limit(records[index], tokens, [*following, IGNORED])
            labels[-1] = IGNORED  # what followed may have been cut off
            _check_learnt(records[index], labels)
            samples.append(TokenSample(cut, labels))
    return samples


def _write_text(record: Record, tokenizer: Any) -> tuple[str, Spans, bool]:
    """The text, the characters that are learnt, and whether it is a chat, which has its special tokens in it."""
    values = record.values
    if isinstance(values.get("messages"), list):
        return _write_chat(record, values["messages"], tokenizer)
    for names in (("prompt", "completion"), ("text",)):
        if all(isinstance(values.get(name), str) for name in names):
            text = "".join(values[name] for name in names)
            begin = len(values["prompt"]) if len(names) == 2 else 0
            return text, [(begin, len(text))], False
    remedy = 'write {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
    raise record.make_field_error(remedy)


def _write_chat(record: Record, messages: list[Any], tokenizer: Any) -> tuple[str, Spans, bool]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise record.make_error("has messages, and the tokenizer no chat template", "write prompt and completion")
    for index, each in enumerate(messages):
        has_role = isinstance(each, dict) and isinstance(each.get("role"), str)
        if not has_role or not (isinstance(each.get("content"), str | list) or each.get("tool_calls")):
            remedy = 'write {"messages": [{"role": ..., "content": ...}]}'
            raise record.make_error(f"message {index} has not a role and a content", remedy)
    if not messages:
        raise record.make_error("has no messages", "remove it")
    spans: Spans = []
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        for index, each in enumerate(messages):
            if each["role"] != "assistant":
                continue
            before = _write_before(messages, index, tokenizer)
            through = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
            if not (text.startswith(through) and through.startswith(before)):
                problem = f"message {index} cannot be found in what the chat template writes"
                raise record.make_error(problem, "write prompt and completion")
            spans.append((len(before), len(through)))
    except (TemplateError, TypeError, KeyError, IndexError) as error:
        raise record.make_error(f"is refused by the chat template: {error}", "give role and content") from error
    if not spans:
        raise record.make_error("has no message of the assistant, so nothing is learnt", "remove it")
    return text, spans, True


def _write_before(messages: list[Any], index: int, tokenizer: Any) -> str:
    """What comes before the answer of a message: of the first one, all through the prompt for an answer, if any."""
    if index:
        return str(tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True))
    text: str = tokenizer.apply_chat_template(messages[:1], tokenize=False)
    longer: str = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    prompt = longer.removeprefix(text)
    return text[: text.find(prompt) + len(prompt)] if prompt in text else ""


def encode_text_classes(records: Sequence[Record], spec: TextSpec, labels: Mapping[str, int]) -> list[TokenSample]:
    """Samples with one class each. Raises DataError."""
    for each in records:
        if not isinstance(each.values.get("text"), str) or "label" not in each.values:
            raise each.make_field_error('write {"text": ..., "label": ...}')
    encodings = spec.encode([each.values["text"] for each in records])
    return [
        TokenSample(spec.limit(record, each.ids, each.ids)[0], find_label(record, record.values["label"], labels))
        for record, each in zip(records, encodings, strict=True)
    ]


def encode_token_classes(records: Sequence[Record], spec: TextSpec, labels: Mapping[str, int]) -> list[TokenSample]:
    """Samples with a class at the first token of each word. Raises DataError."""
    for each in records:
        words, classes = each.values.get("tokens"), each.values.get("labels")
        if not isinstance(words, list) or not isinstance(classes, list) or len(words) != len(classes):
            raise each.make_error("has not a label for each of its tokens", 'write {"tokens": [...], "labels": [...]}')
        if wrong := [word for word in words if not isinstance(word, str)]:
            raise each.make_error(f"has {wrong[0]!r} among its tokens, which is no text", "give tokens as strings")
    encodings = spec.encode([each.values["tokens"] for each in records], is_split_into_words=True)
    samples = []
    for record, each in zip(records, encodings, strict=True):
        classes = [find_label(record, label, labels) for label in record.values["labels"]]
        words = [None, *each.word_ids]
        own = [IGNORED if word is None or word == before else classes[word] for before, word in pairwise(words)]
        sample = TokenSample(*spec.limit(record, each.ids, own))
        _check_learnt(record, np.asarray(sample.labels))
        samples.append(sample)
    return samples


def find_label(record: Record, label: object, labels: Mapping[str, int]) -> int:
    """The number of a class, by its name, or by its number where no name is a number. Raises DataError."""
    name = str(label) if isinstance(label, str | int) else ""
    if name in labels:
        return labels[name]
    if name.isdecimal() and int(name) < len(labels) and not any(map(_NUMBER.fullmatch, labels)):
        return int(name)
    problem = f"label {label!r} is none of the model's {len(labels)}: {', '.join(list(labels)[:8])}"
    raise record.make_error(problem, "give labels, a list of the names, or correct it")


class TokenRows:
    """A dataset of rows of tokens, each of one sample or of several that are packed.

    A batch: input_ids [B, T] int64, padded to its longest row; labels [B, T], or [B] where each row has one class; and
    attention_mask [B, T], or for packed rows position_ids [B, T], which begin at 0 for each sample.
    """

    def __init__(self, samples: Sequence[TokenSample], pad: int, row_length: int | None = None, file: str = "") -> None:
        """row_length: pack samples into rows of at most so many tokens; None: a row for each"""
        self._samples = samples
        self._pad = pad
        self._is_packed = row_length is not None
        self.file = file or type(self).__name__
        lengths = [len(each.tokens) for each in samples]
        self._rows = [[index] for index in range(len(samples))] if row_length is None else pack(lengths, row_length)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(sum(len(self._samples[each].tokens) for each in row) for row in self._rows)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = [[self._samples[each] for each in self._rows[index]] for index in indices]
        width = max(sum(len(each.tokens) for each in row) for row in rows)
        tokens = np.full((len(rows), width), self._pad, np.int64)
        labels = np.full((len(rows), width), IGNORED, np.int64)
        positions = np.zeros((len(rows), width), np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for row, samples in enumerate(rows):
            at = 0
            for each in samples:
                end = at + len(each.tokens)
                tokens[row, at:end], mask[row, at:end] = each.tokens, 1
                labels[row, at:end] = each.labels
                positions[row, at:end] = np.arange(end - at)
                at = end
            positions[row, at:] = np.arange(width - at)
        if not isinstance(rows[0][0].labels, np.ndarray):
            labels = np.array([row[0].labels for row in rows], np.int64)
        extra = ("position_ids", positions) if self._is_packed else ("attention_mask", mask)
        arrays = {"input_ids": tokens, extra[0]: extra[1], "labels": labels}
        return {name: torch.from_numpy(each) for name, each in arrays.items()}


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of samples, none longer than `row_length`: each sample, the longest first, into the fullest row that has
    capacity for it."""
    free: list[tuple[int, int]] = []  # (free tokens, row), in order
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        at = bisect.bisect_left(free, (lengths[index], -1))
        capacity, row = free.pop(at) if at < len(free) else (row_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (capacity - lengths[index], row))
    return rows
