"""Encoders of a table's columns: fitted to training rows, JSON in a record, arrays in and out of a network.

    a number    its place among the training rows' numbers, as a normal score; and whether it is a gap, where gaps were
    a date      seconds as a number, and the parts that vary as points on circles: hour, weekday, day of the year
    two dates   the seconds between them, as a number
    a truth     -1 or 1; 0 and a flag for a gap
    a word      the index of the word: 0 a gap, 1 any other word, then the vocabulary

Called by `table` and by hooks at an endpoint, where only NumPy is needed. Legend: B rows, N numbers, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import combinations, compress
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from pydantic import Field

from shoal.errors import DataError
from shoal.extend import Spec
from shoal.extend.registry import Signature, TensorSignature
from shoal.frame import MARKS

NUM_KNOTS = 65
# of more words, those of fewer rows, or beyond, are others
LARGE = 64
MIN_COUNT = 3
MAX_VOCABULARY = 1000
DAY_S, YEAR_S = 86_400.0, 365.2425 * 86_400.0
Period = Literal["hour", "weekday", "season"]
PERIODS_S: dict[Period, float] = {"hour": DAY_S, "weekday": 7 * DAY_S, "season": YEAR_S}
MAX_DIFFERENCES = 6
EPSILON_S = 1e-6


class Scale(Spec):
    """A monotone map of numbers to normal scores: `scores` at `knots`, linear between them, constant outside."""

    knots: list[float]
    scores: list[float]

    @classmethod
    def fit(cls, values: np.ndarray) -> Scale:
        there = np.sort(values[~np.isnan(values)])
        if not len(there):
            return cls(knots=[0.0], scores=[0.0])
        knots = np.unique(np.quantile(there, np.linspace(0, 1, NUM_KNOTS), method="nearest"))
        below, upto = np.searchsorted(there, knots), np.searchsorted(there, knots, "right")
        shares = (below + upto) / (2 * len(there))  # within (0, 1)
        return cls(knots=knots.tolist(), scores=[round(NormalDist().inv_cdf(each), 4) for each in shares.tolist()])

    def apply(self, values: np.ndarray) -> np.ndarray:
        """A gap becomes 0, the median's score."""
        scores: np.ndarray = np.interp(np.nan_to_num(values, nan=0.0), self.knots, self.scores)
        return np.where(np.isnan(values), 0.0, scores)


class ColumnEncoder(Spec):
    """A column, as it is encoded.

    form:      of its texts, if it was read from such: `%m/%d/%Y` of dates, the decimal sign of numbers
    has_gaps:  whether training rows have gaps, which the network then sees as such
    vocabulary: words, the most frequent first
    has_other: whether words outside of it are admitted
    periods:   of a date, those of its parts that vary
    """

    name: str
    kind: Literal["number", "word", "date", "truth"]
    form: str = ""
    has_gaps: bool = False
    scale: Scale | None = None
    vocabulary: list[str] = Field(default_factory=list)
    has_other: bool = False
    periods: list[Period] = Field(default_factory=list)

    @classmethod
    def fit(cls, name: str, kind: str, values: np.ndarray, *, admits_unknown: bool = False) -> ColumnEncoder:
        """kind: as `full_kind`; values: [rows of training]"""
        word, _, form = kind.partition(":")
        if word == "word":
            found, counts = np.unique(values[values != np.array(None)].astype(str), return_counts=True)
            is_large = len(found) > LARGE
            order = np.lexsort((found, -counts))
            chosen = [str(found[at]) for at in order if not is_large or counts[at] >= MIN_COUNT][:MAX_VOCABULARY]
            vocabulary, has_rare = chosen, len(chosen) < len(found)
            gaps, has_other = bool((values == np.array(None)).any()), has_rare or admits_unknown
            return cls(name=name, kind="word", has_gaps=gaps, vocabulary=vocabulary, has_other=has_other)
        fitted: dict[str, Any] = {"kind": word, "form": form, "has_gaps": bool(np.isnan(values).any())}
        scale, periods = None if word == "truth" else Scale.fit(values), _find_periods(values) if word == "date" else []
        return cls(name=name, scale=scale, periods=periods, **fitted)

    @property
    def full_kind(self) -> str:
        """With the form of its texts, as in `date:%m/%d/%Y`."""
        return f"{self.kind}:{self.form}" if self.form else self.kind

    def count_numbers(self) -> int:
        return 0 if self.kind == "word" else 1 + self.has_gaps + 2 * len(self.periods)

    def encode_numbers(self, values: np.ndarray) -> list[np.ndarray]:
        """values [B] ► as many arrays [B] as `count_numbers` says."""
        is_gap = np.isnan(values)
        main = self.scale.apply(values) if self.scale else np.where(is_gap, 0.0, 2.0 * np.nan_to_num(values) - 1.0)
        encoded = [main]
        if self.has_gaps:
            encoded.append(is_gap.astype(np.float64))
        for period in self.periods:
            angle = 2 * np.pi * np.nan_to_num(values) / PERIODS_S[period]
            encoded += [np.where(is_gap, 0.0, np.sin(angle)), np.where(is_gap, 0.0, np.cos(angle))]
        return encoded

    def encode_categories(self, values: np.ndarray, *, is_strict: bool) -> np.ndarray:
        """Raises DataError for an unknown word, if `is_strict`, where the column admits none."""
        index = {word: at for at, word in enumerate(self.vocabulary, 2)}
        found = [0 if word is None else index.get(word, word.lower() not in MARKS) for word in values.tolist()]
        encoded = np.array(found, np.int64)
        if is_strict and not self.has_other and (encoded == 1).any():
            word = values[int((encoded == 1).argmax())]
            shown = ", ".join(self.vocabulary[:10]) + (", ..." if len(self.vocabulary) > 10 else "")
            raise DataError(self.name, word, "is a word that no training row had", f"there is {shown}")
        return encoded


class Target(Spec):
    """What is predicted: one of `classes`, or a number, which the network gives in units of `std` from `mean`."""

    name: str
    classes: list[str] = Field(default_factory=list)
    mean: float = 0.0
    std: float = 1.0

    def encode(self, values: np.ndarray) -> np.ndarray:
        """int64 [B] of classes, or float32 [B]."""
        if not self.classes:
            return ((values - self.mean) / self.std).astype(np.float32)
        index = {name: at for at, name in enumerate(self.classes)}
        if unknown := [each for each in values.tolist() if each not in index]:
            remedy = f"the classes are those of the run's beginning: {', '.join(self.classes)}"
            raise DataError(self.name, unknown[0], "is no class of this model", remedy)
        return np.array([index[each] for each in values.tolist()], np.int64)


class Encoders(Spec):
    """Everything between a row as it is and a network, and back.

    num_rows:    of the table when they were fitted: a resumed run reads these, even if the file has grown
    differences: pairs of dates, and the scale of the seconds from the first to the second
    excluded:    of versions that were fitted before the run's record listed the columns
    pickle: of a transformer of scikit-learn, in place of the columns' own encoders: in base64
    """

    num_rows: int
    target: Target
    columns: list[ColumnEncoder]
    differences: list[tuple[str, str, Scale]] = Field(default_factory=list)
    excluded: list[str] = Field(default_factory=list)
    pickle: str = ""
    transformer_width: int = 0
    sklearn: str = ""

    @classmethod
    def fit(
        cls, num_rows: int, target: Target, columns: list[ColumnEncoder], values: Mapping[str, np.ndarray]
    ) -> Encoders:
        """values: of the training rows, by column"""
        dates = [each.name for each in columns if each.kind == "date"]
        pairs = list(combinations(dates, 2))[:MAX_DIFFERENCES]
        differences = [(first, second, Scale.fit(values[second] - values[first])) for first, second in pairs]
        return cls(num_rows=num_rows, target=target, columns=columns, differences=differences)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each column that is an input."""
        return {each.name: each.kind for each in self.columns}

    @property
    def num_numbers(self) -> int:
        """N; at least 1: without any there is a column of zeros."""
        own = sum(each.count_numbers() for each in self.columns) + len(self.differences)
        return self.transformer_width or max(1, own)

    @property
    def category_sizes(self) -> list[int]:
        """The number of indices of each column of words; none with a transformer."""
        return [] if self.pickle else [len(each.vocabulary) + 2 for each in self.columns if each.kind == "word"]

    @property
    def num_outputs(self) -> int:
        """Of a network: the number of classes, or 1."""
        return max(1, len(self.target.classes))

    def encode(self, values: Mapping[str, np.ndarray], *, is_strict: bool = True) -> dict[str, np.ndarray]:
        """Columns [B] by name ► `numbers` float32 [B, N], and `categories` int64 [B, W] where there are any.

        is_strict: raise for an unknown word; otherwise it counts as another word

        Raises DataError, which names the column.
        """
        if self.pickle:
            for column in self.columns if is_strict else ():
                if column.kind == "word":
                    column.encode_categories(values[column.name], is_strict=True)
            from shoal.libs.tabular.transformer import apply_transformer

            return {"numbers": apply_transformer(self.pickle, self.sklearn, self.kinds, values)}
        numbers, categories = [], []
        for column in self.columns:
            if column.kind == "word":
                categories.append(column.encode_categories(values[column.name], is_strict=is_strict))
            else:
                numbers += column.encode_numbers(values[column.name])
        numbers += [scale.apply(values[second] - values[first]) for first, second, scale in self.differences]
        num = len(next(iter(values.values())))
        encoded = {"numbers": np.stack(numbers or [np.zeros(num)], 1).astype(np.float32)}
        return encoded | ({"categories": np.stack(categories, 1)} if categories else {})

    # -- an endpoint's side ---------------------------------------------------------------------------------------

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and greatest value of training rows, by column, by which an endpoint counts drift."""
        return {each.name: (each.scale.knots[0], each.scale.knots[-1]) for each in self.columns if each.scale}

    def encode_request(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Tensors of a request, by column ► the network's inputs. A gap is NaN, or an empty string.

        Raises DataError, which names the column.
        """
        return self.encode({each.name: to_values(each.name, each.kind, arrays[each.name]) for each in self.columns})

    def signature(self) -> Signature:
        """Each column is an input, as it is in the table."""
        classes = self.target.classes

        def describe(name: str, is_text: bool, kind: str = "") -> TensorSignature:
            return TensorSignature(name=name, datatype="BYTES" if is_text else "FP64", shape=[-1], kind=kind)

        inputs = [describe(each.name, each.kind == "word", each.full_kind) for each in self.columns]
        outputs = [describe(self.target.name, bool(classes))]
        if classes:
            shape = [-1, len(classes)]
            outputs.append(TensorSignature(name="probability", datatype="FP32", shape=shape, columns=classes))
        return Signature(inputs=inputs, outputs=outputs)

    def make_example(self) -> dict[str, Any]:
        """A row of medians, of the most frequent words and of truths, as an endpoint takes it."""
        row: dict[str, Any] = {}
        for each in self.columns:
            if each.scale is None:
                row[each.name] = True if each.kind == "truth" else next(iter(each.vocabulary), None)
                continue
            median = each.scale.knots[len(each.scale.knots) // 2]
            date = (
                datetime.fromtimestamp(median, UTC).strftime(each.form or "%Y-%m-%d") if each.kind == "date" else None
            )
            row[each.name] = date or (int(median) if median.is_integer() else round(median, 6))
        return row

    def decode_scores(self, scores: np.ndarray) -> dict[str, np.ndarray]:
        """scores: [B, K, C] of K members, or [B, C] ► what `signature` promises."""
        members = scores[:, None] if scores.ndim == 2 else scores
        target = self.target
        if not target.classes:
            return {target.name: members[..., 0].mean(1, dtype=np.float64) * target.std + target.mean}
        shifted = np.exp(members - members.max(-1, keepdims=True))
        probability = (shifted / shifted.sum(-1, keepdims=True)).mean(1).astype(np.float32)
        names = np.array(target.classes, object)
        return {target.name: names[probability.argmax(1)], "probability": probability}


def to_values(name: str, kind: str, array: np.ndarray) -> np.ndarray:
    """A column of a request, or of a file, as `Encoders.encode` takes it. Raises DataError."""
    values, (word, *_) = array.reshape(len(array), -1)[:, 0], kind.split(":")
    if word == "word":
        texts = [each.decode() if isinstance(each, bytes) else each for each in values.tolist()]
        return np.array([each or None for each in texts], object)
    values = values.astype(np.float64)
    is_wrong = np.isinf(values) if word != "truth" else ~np.isin(values, (0.0, 1.0)) & ~np.isnan(values)
    if is_wrong.any():
        remedy = "give 0, 1 or a gap" if word == "truth" else "give a finite number or a gap"
        raise DataError(name, float(values[is_wrong.argmax()]), f"is no {word}", remedy)
    return values


def _find_periods(values: np.ndarray) -> list[Period]:
    there = values[~np.isnan(values)]
    if not len(there):
        return []
    span, hours = float(np.ptp(there)), np.abs(there % DAY_S - there[0] % DAY_S)
    weekdays = set((there // DAY_S % 7).tolist()) if span >= 2 * DAY_S else set()
    varies = (hours > EPSILON_S).any(), len(weekdays) > 1, span >= 45 * DAY_S
    return list(compress(PERIODS_S, varies))
