"""`shoal.data.table`: a table as the data of a Task, encoded, with its split and the encoders that a model takes along.

Called by Tasks. Legend: B rows, N numbers, W words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError, DataError, needs_extra, suggest
from shoal.extend.data import Data
from shoal.frame import GAPS, MARKS
from shoal.libs.tabular.encoders import ColumnEncoder, Encoders, Target
from shoal.libs.tabular.reading import Values, choose_kinds, extract_values, find_unusable, read_table

with needs_extra("data"):
    import pyarrow as pa

Part = Literal["train", "validation"]
MAX_INTEGER_CLASSES = 10
MAX_EXAMPLE = 16  # characters
NUM_IDENTIFYING = 1000
MIN_EPOCH = 2048  # training rows; a smaller table is read several times in an epoch


class EncodedRows:
    """Encoded rows: a sample is (numbers [N], categories [W] where there are any, target).

    rows:    as they are, at most NUM_IDENTIFYING of them: to versions with other encoders or columns they are the same
    repeats: how often an epoch reads each row
    """

    def __init__(self, arrays: Sequence[np.ndarray], rows: pa.Table, repeats: int = 1) -> None:
        self.tensors = tuple(torch.from_numpy(each) for each in arrays)
        self.num_rows = len(arrays[-1])
        self.repeats = repeats
        self._rows = rows

    def fingerprint(self) -> str:
        return repr((self.num_rows, self._rows.to_pylist()))

    def __len__(self) -> int:
        return self.num_rows * self.repeats

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        at = range(len(self))[index] % self.num_rows
        return tuple(each[at] for each in self.tensors)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        at = torch.from_numpy(indices % self.num_rows)
        return tuple(each[at] for each in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Table(Data):
    """The data of a Task, and what its model takes along.

    encoders: fitted to the training rows
    values:   all rows as they are, by column, with the target: training, then validation
    num_training: of these rows
    notes:    its columns with kind, gaps and examples, and what was left out and why
    """

    encoders: Encoders
    values: Mapping[str, Values]
    num_training: int

    def select(self, part: Part) -> dict[str, Values]:
        """The rows of a part as they are, by column."""
        rows = slice(self.num_training) if part == "train" else slice(self.num_training, None)
        return {name: each[rows] for name, each in self.values.items()}


def table(
    data: Any,
    target: str | int,
    *,
    columns: Mapping[str, str] | None = None,
    leave_out: Sequence[str] = (),
    validation: Any = 0.2,
    split: int = 0,
    order_by: str = "",
    unknown: Literal["error", "other"] = "error",
    transformer: Any = None,
    encoders: Encoders | Mapping[str, Any] | None = None,
) -> Table:
    """A table as data: its columns become inputs, by encoders that are fitted to the training rows alone.

    data:        a file (CSV, TSV, Parquet), a URL of the store, a DataFrame of pandas, an Arrow table, columns by name
    target:      the column to predict: a class (words, truths, at most ten integers) or a number
    columns:     kinds that are not as inferred, by name: number, word, date, truth; or date:%d.%m.%Y, and number:, or
                 number:. of texts with that decimal sign
    leave_out:   columns that are no inputs; constants, ids and texts are left out anyway, unless `columns` has them
    validation:  a share of the rows, each class in proportion, or another table
    split:       the seed by which validation rows are drawn
    order_by:    a column; the validation rows are the last by it, as requests come later than training
    unknown:     a word that no training row has is an error, or counts as "other"
    transformer: a ColumnTransformer or Pipeline of scikit-learn in the place of the encoders, not yet fitted
    encoders:    those of an earlier call, or their JSON: nothing is fitted, and rows that were added since are not read

    Raises ConfigError and DataError, which name the column.
    """
    given = encoders if isinstance(encoders, Encoders) or encoders is None else Encoders.parse(encoders)
    target = str(target)
    order_by = str(order_by)
    leave_out = [str(each) for each in leave_out]
    explicit = {str(name): kind for name, kind in (columns or {}).items()}
    named = [target, *explicit, *leave_out, *([order_by] if order_by else [])]
    held_back = None if isinstance(validation, int | float) else read_table(validation, "validation", named)
    full = read_table(data, known=named)
    full = full if given is None else _take_known_rows(full, given)
    num_rows = len(full)
    full = full if held_back is None else _append(full, held_back)
    if not target:
        raise DataError("target", "", "is missing", f"give one of {', '.join(full.column_names)}")
    _require_columns(full, named)
    chosen = choose_kinds(full, full.column_names, explicit)
    kinds = {name: kind for name, (kind, _) in chosen.items() if kind and name not in (target, *leave_out)}
    if given is not None:
        kinds = {each.name: each.full_kind for each in given.columns}
        _require_columns(full, [*kinds])
    values = {name: extract_values(name, full.column(name), kind) for name, kind in kinds.items()}
    notes = list[str]()
    if given is None:
        remarks = {name: note for name, (_, note) in chosen.items() if note} | dict.fromkeys(leave_out, "left out")
        remarks |= {
            name: f"left out: it {reason}; {quote(f'columns.{name}={kind}')} takes it in"
            for name, kind in kinds.items()
            if name not in explicit and (reason := find_unusable(name, values[name][:num_rows], kind))
        }
        all_kinds = kinds | {target: chosen[target][0]}
        notes = _describe_columns(full, values, all_kinds, remarks | {target: "the target"})
        kinds = {name: kind for name, kind in kinds.items() if not remarks.get(name, "").startswith("left out")}
        if not kinds:
            raise DataError("data", "table", f"has no column from which to predict {target}", "\n".join(notes))
    answers, is_class = _extract_target(full, target, chosen[target], target in explicit, given)
    order = extract_values(order_by, full.column(order_by), chosen[order_by][0] or "number") if order_by else None
    rows, num_training = _divide(answers, is_class, num_rows, validation, split, order)
    if num_unknown := len(answers) - len(rows):
        notes.append(f"{num_unknown:,} rows have no {target}")
    values = {name: values[name][rows] for name in kinds} | {target: answers[rows]}
    if given is None:
        goal = _fit_target(target, is_class, values[target], num_training)
        given = _fit(num_rows, goal, kinds, values, num_training, unknown, transformer)
    return _encode(given, values, num_training, full, rows, notes)


def _encode(
    encoders: Encoders, values: Mapping[str, Values], num_training: int, full: pa.Table, rows: np.ndarray, notes: Any
) -> Table:
    """rows: of the full table, in the order of `values`"""
    arrays = [*encoders.encode(values, is_strict=False).values(), encoders.target.encode(values[encoders.target.name])]

    def select(part: slice, repeats: int = 1) -> EncodedRows:
        there = rows[part]
        few = there[np.linspace(0, len(there) - 1, min(len(there), NUM_IDENTIFYING)).astype(int)]
        return EncodedRows([each[part] for each in arrays], full.take(few), repeats)

    train, validation = select(slice(num_training), -(-MIN_EPOCH // num_training)), select(slice(num_training, None))
    facts: dict[str, Any] = {"values": values, "num_training": num_training, "notes": tuple(notes)}
    return Table(train, validation, encoders=encoders, **facts)


def _take_known_rows(full: pa.Table, encoders: Encoders) -> pa.Table:
    if len(full) < encoders.num_rows:
        problem = f"has {len(full):,} rows, and had {encoders.num_rows:,} when the encoders were fitted"
        raise DataError("data", "table", problem, "restore it, or begin another run")
    return full.slice(0, encoders.num_rows)


def _append(full: pa.Table, other: pa.Table) -> pa.Table:
    missing = [name for name in full.column_names if name not in other.column_names]
    if missing:
        raise DataError("validation", missing[0], "is not among its columns", f"it has {', '.join(other.column_names)}")
    other = other.select(full.column_names)
    try:
        if full.schema.types != other.schema.types:  # as those of a CSV file, whose cells are texts
            texts = pa.schema([(name, pa.string()) for name in full.column_names])
            full, other = full.cast(texts), other.cast(texts)
        return pa.concat_tables([full, other])
    except pa.ArrowException as error:
        remedy = "write both tables with the same types"
        raise DataError("validation", "table", f"has other types than data: {error}", remedy) from error


def _require_columns(full: pa.Table, names: Sequence[str]) -> None:
    for name in names:
        if name not in full.column_names:
            remedy = suggest(name, full.column_names, f"it has {', '.join(full.column_names)}")
            raise DataError("column", name, "is not in the table", remedy)


def _describe_columns(
    full: pa.Table, values: Mapping[str, Values], kinds: Mapping[str, str], remarks: Mapping[str, str]
) -> list[str]:
    """Each column of the file in a line: its kind, gaps, examples, and why it is left out."""
    lines = [("column", "kind", "gaps", "examples", "")]
    for name in full.column_names:
        column, read = full.column(name), values.get(name)
        cells = dict.fromkeys(
            str(each).strip() for each in column.slice(0, NUM_IDENTIFYING).to_pylist() if each is not None
        )
        examples = [each[:MAX_EXAMPLE] for each in cells if each.lower() not in MARKS][:3]
        num_gaps = column.null_count if read is None else ((read != read) | (read == np.array(None))).sum()
        lines.append((name, kinds.get(name, ""), str(num_gaps), ", ".join(examples), remarks.get(name, "")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip().replace("\n", " ") for line in lines]


def _extract_target(
    full: pa.Table, target: str, chosen: tuple[str, str], is_explicit: bool, given: Encoders | None
) -> tuple[Values, bool]:
    """The target's values, and whether they are classes: then each is a str, or None."""
    column, (kind, note) = full.column(target), chosen
    if given is not None:
        kind = "word" if given.target.classes and kind != "truth" else kind
    elif note or kind.startswith("date"):
        raise DataError("target", target, note or "is a date", "predict a class, or a number")
    elif kind.startswith("number") and not is_explicit:
        texts = {str(each) for each in column.unique().to_pylist()} - {"None", *GAPS}
        if len(texts) <= MAX_INTEGER_CLASSES and all(each.strip().lstrip("+-").isdecimal() for each in texts):
            kind = "word"
    if kind not in ("word", "truth"):
        return extract_values(target, column, kind), False
    words = [each and each not in GAPS and each for each in extract_values(target, column, "word").tolist()]
    return np.array([(each.lower() if kind == "truth" else each) if each else None for each in words], object), True


def _divide(
    answers: Values, is_class: bool, num_rows: int, validation: Any, split: int, order: Values | None
) -> tuple[np.ndarray, int]:
    """The rows with an answer, those of training first, and how many these are; the table has `num_rows`, and after
    them those of another."""
    rows = np.flatnonzero(answers != np.array(None) if is_class else ~np.isnan(answers))
    is_training = rows < num_rows
    if isinstance(validation, int | float):
        is_training = ~_hold_back(
            answers[rows], is_class, validation, split, order[rows] if order is not None else None
        )
    if not is_training.any() or is_training.all():
        shown = validation if isinstance(validation, str | float) else type(validation).__name__
        raise DataError("validation", shown, f"leaves one part of {len(rows)} rows empty", "give another share")
    return np.concatenate([rows[is_training], rows[~is_training]]), int(is_training.sum())


def _hold_back(answers: Values, is_class: bool, share: float, seed: int, order: Values | None) -> np.ndarray:
    """Whether each row is for validation: the last by `order`, or drawn, of each class its share."""
    if not 0 < share < 1:
        raise ConfigError("validation", share, "is no share of the rows", "give one between 0 and 1, or a file")
    chosen = np.zeros(len(answers), bool)
    if order is not None:
        chosen[np.argsort(order, kind="stable")[len(answers) - round(share * len(answers)) :]] = True
        return chosen
    draw = np.random.default_rng(seed).permutation(len(answers))
    groups = np.unique(answers.astype(str), return_inverse=True)[1] if is_class else np.zeros(len(answers), np.int64)
    for group in range(int(groups.max(initial=-1)) + 1):
        members = draw[groups[draw] == group]
        chosen[members[: round(share * len(members))]] = True
    return chosen


def _fit(
    num_rows: int,
    goal: Target,
    kinds: Mapping[str, str],
    values: Mapping[str, Values],
    num_training: int,
    unknown: str,
    transformer: Any,
) -> Encoders:
    if unknown not in ("error", "other"):
        raise ConfigError("unknown", unknown, "is neither error nor other", "say what an unknown word is")
    training = {name: each[:num_training] for name, each in values.items()}

    def has_unknown(name: str) -> bool:  # among the other rows
        return unknown == "other" or bool({*values[name][num_training:].tolist()} - {None, *training[name].tolist()})

    columns = [
        ColumnEncoder.fit(name, kind, training[name], admits_unknown=kind == "word" and has_unknown(name))
        for name, kind in kinds.items()
    ]
    encoders = Encoders.fit(num_rows, goal, columns, training)
    if transformer is None:
        return encoders
    from shoal.libs.tabular.transformer import fit_transformer

    text, width, version = fit_transformer(transformer, encoders.kinds, training, goal.encode(training[goal.name]))
    fitted = {"pickle": text, "transformer_width": width, "sklearn": version, "differences": []}
    return encoders.model_copy(update=fitted)


def _fit_target(name: str, is_class: bool, answers: Values, num_training: int) -> Target:
    """answers: of all rows, so that a class that validation rows alone have is known, too"""
    if is_class:
        classes = sorted(set(answers.tolist()))
        if len(classes) < 2:
            raise DataError("target", name, f"has the one class {classes[0]!r}", "give rows of another, too")
        return Target(name=name, classes=classes)
    mean, std = float(answers[:num_training].mean()), float(answers[:num_training].std())
    if std == 0:
        raise DataError("target", name, f"is {mean:g} in every training row", "predict what varies")
    return Target(name=name, mean=mean, std=std)
