"""Named frames as arrays: every type of column, and what has no number by name."""

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from shoal.errors import DataError
from shoal.frame import find_names, require_row_order, to_floats

NAN = np.nan
DAY = 1772323200.0  # 2026-03-01


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pd.Series([1, 2]), [1, 2]),
        (pd.Series([True, False]), [1, 0]),
        (pd.Series([1, None], dtype="Int64"), [1, NAN]),
        (pd.Series([True, None], dtype="boolean"), [1, NAN]),
        (pd.Series([Decimal("1.5"), None]), [1.5, NAN]),
        (pd.Series([0.5, pd.NA], dtype=object), [0.5, NAN]),
        (pd.Series(pd.Categorical([3, None])), [3, NAN]),
        (pd.Series(pd.to_datetime(["2026-03-01", None])), [DAY, NAN]),
        (pd.Series(pd.to_datetime(["2026-03-01"]).tz_localize("Europe/Berlin")), [DAY - 3600]),
        (pd.Series(pd.to_datetime(["2026-03-01"]).astype("datetime64[s]")), [DAY]),
        (pd.Series(pd.to_timedelta(["1min", None])), [60, NAN]),
        (pd.Series([datetime.date(2026, 3, 1), None]), [DAY, NAN]),
        (pd.Series([datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC), pd.NaT], dtype=object), [DAY, NAN]),
        (pd.Series([datetime.date(2026, 3, 1), None], dtype=pd.ArrowDtype(pa.date32())), [DAY, NAN]),
        (pd.Series([datetime.datetime(2026, 3, 1), None], dtype=pd.ArrowDtype(pa.timestamp("us"))), [DAY, NAN]),
        (pa.array([1, None]), [1, NAN]),
        (pa.array([1.76e9 + 0.25]), [1.76e9 + 0.25]),
        (pa.array([True, None]), [1, NAN]),
        (pa.array([Decimal("1.5")]), [1.5]),
        (pa.array([3, None]).dictionary_encode(), [3, NAN]),
        (pa.array([datetime.date(2026, 3, 1), None]), [DAY, NAN]),
        (pa.array([datetime.datetime(2026, 3, 1), None], pa.timestamp("ms")), [DAY, NAN]),
        (pa.array([datetime.timedelta(minutes=1)], pa.duration("us")), [60]),
    ],
    ids=str,
)
def test_every_column_with_a_meaning_as_numbers_is_taken(column: Any, expected: list[float]) -> None:
    frame = pa.table({"x": column}) if isinstance(column, pa.Array) else pd.DataFrame({"x": column})
    found = to_floats("X", frame)
    np.testing.assert_array_equal(found, np.array(expected)[:, None])
    assert found.dtype == np.float64
    assert found.flags.writeable
    if isinstance(frame, pa.Table):
        np.testing.assert_array_equal(to_floats("X", frame.to_batches()[0]), found)
    if isinstance(column, pd.Series):
        np.testing.assert_array_equal(to_floats("y", column), expected)


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"n": [1, 2], "x": ["1", "red"]}),
        pd.DataFrame({"n": [1, 2], "x": pd.Categorical(["low", "high"])}),
        pd.DataFrame({"n": [1, 2], "x": pd.period_range("2026", periods=2, freq="M")}),
        pd.DataFrame({"n": [1, 2], "x": [1j, 2]}),
        pd.DataFrame({"n": [1, 2], "x": [10**400, 1]}),
        pa.table({"n": [1, 2], "x": ["1", "red"]}),
        pa.table({"n": [1, 2], "x": [[1], [2]]}),
    ],
    ids=["text", "category", "period", "complex", "beyond float64", "Arrow text", "Arrow list"],
)
def test_what_is_no_number_is_rejected_by_column_and_row(frame: Any) -> None:
    with pytest.raises(DataError, match=r"X = 'x': row 0 has .*which is no number. .*leave the column out"):
        to_floats("X", frame)


def test_frames_have_names_and_numbered_ones_are_arrays() -> None:
    frame = pd.DataFrame({"a": [1.0], "b": [2.0]})
    assert find_names(frame) == find_names(pa.Table.from_pandas(frame)) == ["a", "b"]
    assert find_names(frame.to_numpy()) is find_names(pd.DataFrame([[1, 2]])) is find_names(frame.a) is None
    assert to_floats("X", frame, ["b", "a"]).tolist() == [[2, 1]]
    assert to_floats("X", pd.DataFrame([[1, 2]]), ["a", "b"]).tolist() == [[1, 2]]
    assert find_names(pd.DataFrame({7: [1.0]})) == ["7"]
    assert to_floats("X", pd.DataFrame(index=range(3))).shape == (3, 0)


def test_arrays_stay_as_they_are_and_others_are_rejected() -> None:
    assert to_floats("y", [[1, None]], ["a", "b"]).tolist() == [[1.0, pytest.approx(NAN, nan_ok=True)]]
    assert to_floats("y", np.array(["2026-03-01"], "datetime64[D]")).tolist() == [DAY]
    for values in ([[1], [1, 2]], ["a"], object()):
        with pytest.raises(DataError, match="X = "):
            to_floats("X", values)


def test_rows_out_of_the_order_of_their_index_are_rejected() -> None:
    values = pd.Series([3.0, 1.0, 2.0])
    require_row_order("x", values[1:])
    require_row_order("x", values.to_numpy())
    with pytest.raises(DataError, match=r"x = '1, 2, 0': its index is not in order.*sort_index\(\).*reset_index"):
        require_row_order("x", values.sort_values())
