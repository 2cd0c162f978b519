"""Answers from a few rows: `shoal.few_rows(X, y).predict(new)`, by the network that comes with the package.

Nothing is fitted to the rows but the encoding of words. Called as `shoal.few_rows`.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch

from shoal.errors import DataError
from shoal.extend.registry import Registry
from shoal.frame import require_equal_rows, to_floats
from shoal.libs.tables.columns import TableEncoder, read_columns
from shoal.libs.tables.network import FewRowsPrediction, PriorFittedNetwork, predict
from shoal.libs.tables.tables import MAX_LABELLED, check_tables

FILE = Path(__file__).with_name("few_rows.safetensors")
SIZES = ("width", "depth", "heads", "cell_width", "cell_depth")
QUERIES = 4096  # of one forward: each row is predicted without the others


class ClassPrediction(NamedTuple):
    """Of each query: the likeliest class [Q], and the probability of each class [Q, classes], in their order."""

    label: Any
    probability: Any
    classes: list[str]


class FewRows:
    """Rows with their targets; see `few_rows`."""

    def __init__(self, X: Any, y: Any, model: str = "") -> None:
        self._network, self._target = load_network(Registry().get(model).ref if model else ""), ""
        if isinstance(y, str):
            self._target, (X, y) = y, _split(X, y)
        require_equal_rows(X, y)
        self._encoder = TableEncoder(X)
        self._x = self._encoder.encode("X", X)
        self._classes, self._y = _read_targets(y)
        if len(self._y) != len(self._x):
            raise DataError("y", f"{len(self._y)} values", f"X has {len(self._x)} rows", "give one for each")
        targets = self._y if self._y.ndim == 2 else self._y[:, None]
        check_tables({"x": self._x[None], "y": targets[None], "x_query": self._x[None, :0]})
        self._names = list(y.columns) if hasattr(y, "columns") and not self._classes else None

    def predict(self, new: Any) -> FewRowsPrediction | ClassPrediction:
        """Answer further rows of the same columns: arrays, or Series with the index of a DataFrame `new`.

        Several targets are the columns of arrays [Q, T], or of DataFrames. Raises DataError by column and row.
        """
        if self._target and (names := read_columns("new", new)[0]) and self._target in names:
            new = _split(new, self._target)[0]
        queries = self._x[:0] if isinstance(new, list) and not new else self._encoder.encode("new", new)
        index = getattr(new, "index", None) if hasattr(new, "iloc") else None
        if self._classes:
            return self._predict_classes(queries, index)
        starts = range(0, max(1, len(queries)), QUERIES)
        parts = [predict(self._network, self._x, self._y, queries[at : at + QUERIES]) for at in starts]

        def join(*values: np.ndarray) -> Any:
            return _wrap(np.concatenate(values), index, self._names)

        mean, median, *intervals = zip(*parts, strict=True)
        inner, outer = (tuple(join(*each) for each in zip(*interval, strict=True)) for interval in intervals)
        return FewRowsPrediction(join(*mean), join(*median), inner, outer)

    def _predict_classes(self, queries: np.ndarray, index: Any) -> ClassPrediction:
        """The mean of each class's indicator; of two classes, that of the second one."""
        targets = (self._y[:, None] == np.arange(len(self._classes))).astype(np.float64).T
        targets[:, np.isnan(self._y)] = np.nan
        is_binary = len(targets) == 2
        asked = targets[1:] if is_binary else targets
        found = [predict(self._network, self._x, each, queries).mean for each in asked]
        share = np.clip(np.stack(found, 1), 0.02, 0.98)
        share = np.concatenate([1 - share, share], 1) if is_binary else share
        probability = share / share.sum(1, keepdims=True)
        label = np.array(self._classes, object)[probability.argmax(1)]
        return ClassPrediction(_wrap(label, index), _wrap(probability, index, self._classes), self._classes)


def few_rows(X: Any, y: Any, *, model: str = "") -> FewRows:
    """Learn from 1 to 20 rows: `few_rows(X, y).predict(new)` has mean, median, interval_50 and interval_90.

    X:     rows of at most ten columns: a DataFrame, an Arrow table, a list of dicts, or an array. Numbers, truths,
           dates, words, and gaps (None, NaN)
    y:     the target of each row, or the name of its column in X. NaN: a row without one. [rows, targets] for several.
           Words are classes, unless all are numbers: then the answer has label and probability
    model: NAME@VERSION of the registry, of `shoal run few_rows`; "": the network that comes with the package

    Raises DataError.
    """
    return FewRows(X, y, model)


@cache
def load_network(model: str = "") -> PriorFittedNetwork:
    """The network of the package, or of NAME@NUMBER of the registry. Raises DataError, RegistryError."""
    if model:
        version = Registry().get(model)
        network = version.manifest.model.build()
        if not isinstance(network, PriorFittedNetwork):
            problem = f"is a {type(network).__name__}, not a network for few rows"
            raise DataError("model", model, problem, "`shoal run few_rows` trains one")
        weights = {name: torch.from_numpy(values) for name, values in version.snapshot().tensors().items()}
    else:
        with safetensors.safe_open(FILE, "pt") as file:
            network = PriorFittedNetwork(**json.loads(file.metadata()["sizes"]))
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    network.load_state_dict(weights)
    return network.eval()


def write_network(model: str, path: Path = FILE) -> None:
    """Write a version of the registry, in float16 and with where it comes from, as the network of the package."""
    version = Registry().get(model)
    manifest = version.manifest
    args = manifest.model.kwargs["args"]
    about = {
        "sizes": json.dumps({name: args[name] for name in SIZES if name in args}),
        "provenance": json.dumps(
            {
                "recipe": "shoal run few_rows",
                "args": args,
                "steps": manifest.weights_version,
                "metrics": manifest.metrics,
                "sha256": manifest.sha256,
                "torch": torch.__version__,
            }
        ),
    }
    weights = {name: torch.from_numpy(values).half() for name, values in version.snapshot().tensors().items()}
    safetensors.torch.save_file(weights, path, about)


def _split(rows: Any, target: str) -> tuple[Any, Any]:
    """The rows without a column, and this column. Raises DataError."""
    names = read_columns("X", rows)[0]
    if names is None or target not in names:
        shown = "none: give y as values" if names is None else ", ".join(names)
        raise DataError("y", target, "is no column of X", f"its columns are {shown}")
    if hasattr(rows, "drop_columns"):
        return rows.drop_columns([target]), rows.column(target).to_pylist()
    if hasattr(rows, "iloc"):
        return rows.drop(columns=target), rows[target]
    rows = [rows] if isinstance(rows, dict) else rows
    return [{name: each for name, each in row.items() if name != target} for row in rows], [row[target] for row in rows]


def _read_targets(y: Any) -> tuple[list[str], np.ndarray]:
    """The names of the classes, [] of numbers, and the targets [C] or [C, T]. Raises DataError."""
    cells = y.tolist() if hasattr(y, "tolist") else list(y)
    cells = [each if not isinstance(each, str) or each.strip() else None for each in cells]
    words = sorted({each for each in cells if isinstance(each, str)}) if np.ndim(y) == 1 else []
    if not words:
        return [], to_floats("y", y)
    with suppress(ValueError):  # of a word
        numbers = [float(each) if isinstance(each, str) else each for each in cells]
        return [], to_floats("y", np.array(numbers, object))
    strays = [each for each in cells if not isinstance(each, str) and each is not None and each == each]
    if strays or len(words) == 1:
        problem = f"are words, and {strays[0]!r} is none" if strays else "are one class"
        raise DataError("y", words[0], problem, "give at least two classes as words, or numbers alone")
    if len(words) > MAX_LABELLED // 2:
        raise DataError("y", len(words), "classes are too many for so few rows", f"give at most {MAX_LABELLED // 2}")
    return words, np.array([words.index(each) if isinstance(each, str) else np.nan for each in cells])


def _wrap(values: np.ndarray, index: Any, names: list[str] | None = None) -> Any:
    """As pandas where the queries were."""
    if index is None:
        return values
    pandas = sys.modules["pandas"]
    return pandas.Series(values, index) if values.ndim == 1 else pandas.DataFrame(values, index, names)


if __name__ == "__main__":  # python -m shoal.libs.tables.few_rows few-rows@champion
    write_network(sys.argv[1])
