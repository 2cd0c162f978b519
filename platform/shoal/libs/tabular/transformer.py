"""A ColumnTransformer or Pipeline of scikit-learn in the place of the columns' own encoders.

It is fitted to the training rows, as a DataFrame whose columns have the table's names, and travels as its pickle with
the version of scikit-learn that has written it. Called by `encoders` and `table`. Legend: B rows, N numbers.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.errors import ConfigError, DataError, needs_extra

with needs_extra("recipes"):
    import pandas as pd
    import sklearn


def fit_transformer(
    transformer: Any, kinds: Mapping[str, str], values: Mapping[str, np.ndarray], answers: np.ndarray
) -> tuple[str, int, str]:
    """A copy of `transformer`, fitted to training rows: base64 of its pickle, N, and scikit-learn's version.

    kinds:   of the columns that are inputs
    answers: [B], the encoded target

    Raises DataError.
    """
    from sklearn.base import clone

    fitted = clone(transformer)
    frame = _make_frame(kinds, values)
    try:
        width = _to_numbers(fitted.fit(frame, answers).transform(frame)).shape[1]
    except (ValueError, TypeError, KeyError) as error:
        problem, remedy = f"does not fit the table: {error}", f"the columns are {', '.join(frame.columns)}"
        raise DataError("transformer", type(transformer).__name__, problem, remedy) from error
    return base64.b64encode(pickle.dumps(fitted)).decode(), width, sklearn.__version__


def apply_transformer(
    text: str, version: str, kinds: Mapping[str, str], values: Mapping[str, np.ndarray]
) -> np.ndarray:
    """`numbers`, float32 [B, N]. Raises DataError, and ConfigError for another version of scikit-learn."""
    if version != sklearn.__version__:
        problem = f"has fitted the encoders, and scikit-learn {sklearn.__version__} is installed here"
        raise ConfigError("scikit-learn", version, problem, f"pip install scikit-learn=={version}")
    try:
        return _to_numbers(_load(text).transform(_make_frame(kinds, values)))
    except ValueError as error:
        remedy = "let it admit such values, as by handle_unknown='ignore'"
        raise DataError("transformer", "transform", f"refuses the rows: {error}", remedy) from error


@lru_cache(maxsize=8)
def _load(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # as trusted as the source of the Task beside it


def _make_frame(kinds: Mapping[str, str], values: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Numbers and truths as floats, words as str, dates as datetime64; gaps as NaN, None and NaT."""
    columns = {}
    for name, kind in kinds.items():
        column = values[name]
        columns[name] = pd.Series(pd.to_datetime(column, unit="s") if kind == "date" else column)
    return pd.DataFrame(columns)


def _to_numbers(encoded: Any) -> np.ndarray:
    dense = encoded.toarray() if hasattr(encoded, "toarray") else encoded
    return np.asarray(dense, np.float32)
