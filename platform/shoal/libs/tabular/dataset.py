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
from shoal.libs.tabular.encoders import ColumnEncoder, Encoders, Target
from shoal.libs.tabular.reading import Values, choose_kind, extract_values, find_unusable, read_table

with needs_extra("data"):
    import pyarrow as pa

MAX_INTEGER_CLASSES = 10
NUM_IDENTIFYING = 1000
MIN_EPOCH = 2048  # training rows; a smaller table is read several times in an epoch


class EncodedRows:
    """Encoded rows: a sample is (numbers [N], categories [W] where there are any, target).

    rows:    as they are, at most NUM_IDENTIFYING of them: to versions with other encoders or columns they are the same
    repeats: how often an epoch reads each row
    """

    def __init__(self, arrays: Sequence[np.ndarray], rows: pa.Table, repeats: int = 1) -> None:
        self.tensors = tuple(torch.from_numpy(each) for each in arrays)
        self.num_rows, self.repeats, self._rows = len(arrays[-1]), repeats, rows

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
    notes:    rows and columns that were left out, and why
    """

    encoders: Encoders
    values: Mapping[str, Values]
    num_training: int

    def select(self, part: Literal["train", "validation"]) -> dict[str, Values]:
        """The rows of a part as they are, by column."""
        rows = slice(self.num_training) if part == "train" else slice(self.num_training, None)
        return {name: each[rows] for name, each in self.values.items()}


def table(
    data: Any,
    target: str,
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
    held_back = None if isinstance(validation, int | float) else read_table(validation, "validation")
    full = read_table(data) if given is None else _take_known_rows(read_table(data), given)
    num_rows = len(full)
    if held_back is not None:
        full = _append(full, held_back)
    if not target:
        raise DataError("target", "", "is not said", f"give one of {', '.join(full.column_names)}")
    _require_columns(full, [target, *(columns or {}), *leave_out, *([order_by] if order_by else [])])
    kinds, notes = _choose_kinds(full, target, columns or {}, leave_out, given)
    values = {name: extract_values(name, full.column(name), kind) for name, kind in kinds.items()}
    if given is None:
        notes += _drop_unusable(values, kinds, set(columns or {}), target, num_rows)
    answers, is_class = _extract_target(full, target, (columns or {}).get(target, ""), given)
    is_known = answers != np.array(None) if is_class else ~np.isnan(answers)
    if not is_known.all():
        notes.append(f"{(~is_known).sum():,} rows have no {target}")
    rows = np.flatnonzero(is_known)
    is_training = rows < num_rows
    if held_back is None:
        order = None
        if order_by:
            kind = choose_kind(order_by, full.column(order_by), (columns or {}).get(order_by, ""))[0]
            order = extract_values(order_by, full.column(order_by), kind or "number")[rows]
        is_training = ~_hold_back(answers[rows], is_class, validation, split, order)
    if not is_training.any() or is_training.all():
        shown = validation if isinstance(validation, str | float) else type(validation).__name__
        raise DataError("validation", shown, f"leaves one part of {len(rows)} rows empty", "give another share")
    rows = np.concatenate([rows[is_training], rows[~is_training]])
    values = {name: each[rows] for name, each in values.items()} | {target: answers[rows]}
    num_training = int(is_training.sum())
    if given is None:
        goal = _fit_target(target, is_class, values[target], num_training)
        training = {name: each[:num_training] for name, each in values.items()}
        given = _fit(num_rows, goal, kinds, training, unknown, transformer).model_copy(update={"excluded": notes})
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
    try:
        return pa.concat_tables([full, other.select(full.column_names)], promote_options="permissive")
    except pa.ArrowException as error:
        remedy = "write both tables with the same types"
        raise DataError("validation", "table", f"has other types than data: {error}", remedy) from error


def _require_columns(full: pa.Table, names: Sequence[str]) -> None:
    for name in names:
        if name not in full.column_names:
            remedy = suggest(name, full.column_names, f"it has {', '.join(full.column_names)}")
            raise DataError("column", name, "is not in the table", remedy)


def _choose_kinds(
    full: pa.Table, target: str, explicit: Mapping[str, str], leave_out: Sequence[str], given: Encoders | None
) -> tuple[dict[str, str], list[str]]:
    """The kind of each input, and a note for each column whose kind is not clear."""
    if given is not None:
        names = [each.name for each in given.columns]
        _require_columns(full, names)
        return {
            each.name: choose_kind(each.name, full.column(each.name), each.full_kind)[0] for each in given.columns
        }, []
    kinds, notes = dict[str, str](), list[str]()
    for name in full.column_names:
        if name == target or name in leave_out:
            continue
        kind, note = choose_kind(name, full.column(name), explicit.get(name, ""))
        notes += [note] if note else []
        if kind:
            kinds[name] = kind
    return kinds, notes


def _extract_target(full: pa.Table, target: str, explicit: str, given: Encoders | None) -> tuple[Values, bool]:
    """The target's values, and whether they are classes: then each is a str, or None."""
    column = full.column(target)
    kind, note = choose_kind(target, column, explicit)
    if given is not None:
        kind = "word" if given.target.classes else kind
    elif note or kind.startswith("date"):
        raise DataError("target", target, note or "is a date", "predict a class, or a number")
    elif kind == "truth":
        kind = "word"
    elif not explicit and kind == "number" and pa.types.is_integer(column.type):
        kind = "word" if len(column.unique().drop_null()) <= MAX_INTEGER_CLASSES else "number"
    return extract_values(target, column, kind), kind == "word"


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


def _drop_unusable(
    values: dict[str, Values], kinds: dict[str, str], explicit: set[str], target: str, num_rows: int
) -> list[str]:
    """Remove the columns that teach nothing, unless their kinds are explicit; the notes about them."""
    notes = []
    for name, kind in list(kinds.items()):
        word = kind.partition(":")[0]
        if name not in explicit and (reason := find_unusable(name, values[name][:num_rows], word)):
            notes.append(f"left out {name!r}: it {reason}; {quote(f'columns.{name}={word}')} takes it in")
            del values[name], kinds[name]
    if not values:
        raise DataError("data", "table", f"has no column from which to predict {target}", "; ".join(notes))
    return notes


def _fit(
    num_rows: int,
    goal: Target,
    kinds: Mapping[str, str],
    training: Mapping[str, Values],
    unknown: str,
    transformer: Any,
) -> Encoders:
    if unknown not in ("error", "other"):
        raise ConfigError("unknown", unknown, "is neither error nor other", "say what an unknown word is")
    columns = [
        ColumnEncoder.fit(name, kind, training[name], admits_unknown=unknown == "other") for name, kind in kinds.items()
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
