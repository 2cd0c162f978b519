"""Few rows with large offsets and of named frames: the answer of the same table without them, or an error by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from shoal.errors import DataError
from shoal.libs.tables.network import PriorFittedNetwork, predict, summarise
from shoal.libs.tables.tables import build_tables
from shoal.train.task import make_task

ROOT = Path(__file__).parents[3]
MINUTES, ASKED = np.arange(10.0)[:, None], np.array([[4.5], [10.0]])
TARGET = 3 * MINUTES[:, 0] + 5
SECONDS = 1.76e9  # since 1970


@pytest.fixture(scope="module")
def network() -> PriorFittedNetwork:
    return PriorFittedNetwork(width=16, depth=1).eval()


def test_unix_seconds_are_as_good_as_minutes(network: PriorFittedNetwork) -> None:
    expected = predict(network, MINUTES, TARGET, ASKED)
    found = predict(network, SECONDS + 60 * MINUTES, TARGET, SECONDS + 60 * ASKED)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(found.interval_90, expected.interval_90, rtol=1e-5)
    few = predict(network, SECONDS + np.array([[0.0], [1e-3]]), [1.0, 2.0], [[SECONDS + 1e-3]])  # milliseconds, too
    assert few.mean[0] == pytest.approx(predict(network, [[0.0], [1.0]], [1.0, 2.0], [[1.0]]).mean[0], abs=1e-3)


def test_a_large_target_is_predicted_as_a_small_one(network: PriorFittedNetwork) -> None:
    expected = predict(network, MINUTES, TARGET, ASKED)
    for offset in (1e9, -1e9, 1e12):
        found = predict(network, MINUTES, offset + TARGET, ASKED)
        np.testing.assert_allclose(found.mean - offset, expected.mean, atol=0.01)
        widths = [np.subtract(*each.interval_90[::-1]) for each in (found, expected)]
        np.testing.assert_allclose(*widths, rtol=0.2)


def test_two_labels_close_together_on_an_offset_have_an_interval_of_their_size(network: PriorFittedNetwork) -> None:
    low, high = predict(network, [[0.0], [1.0]], [1e9 + 5, 1e9 + 8], [[0.5]]).interval_90
    assert 1 < high[0] - low[0] < 200


@pytest.mark.parametrize("unit", [1e-300, 1e-160, 1e90])
def test_the_unit_may_be_anything_that_can_be_squared(network: PriorFittedNetwork, unit: float) -> None:
    found = predict(network, unit * MINUTES, unit * TARGET, unit * ASKED)
    np.testing.assert_allclose(found.mean / unit, [18.5, 35], rtol=0.01)


def test_values_that_differ_by_rounding_alone_are_equal(network: PriorFittedNetwork) -> None:
    found = predict(network, [[0.1 + 0.2], [0.3], [0.3]], [0.1 + 0.2, 0.3, 0.3], [[1.0]])
    assert found.interval_90[1][0] - found.interval_90[0][0] > 1e-5


def test_numbers_too_large_to_be_squared_are_rejected_by_cell(network: PriorFittedNetwork) -> None:
    with pytest.raises(DataError, match=r"x_query = 'table 0, row 1, column 0': is beyond 1e\+100.*another unit"):
        predict(network, MINUTES, TARGET, [[1.0], [1e200]])


def test_an_endpoint_takes_float64_and_computes_as_predict_does(network: PriorFittedNetwork) -> None:
    task = make_task(str(ROOT / "jobs" / "few_rows.py"), {})
    assert {each.datatype for each in [*task.signature().inputs, *task.signature().outputs]} == {"FP64"}
    arrays = task.preprocess(build_tables(SECONDS + 60 * MINUTES, 1e9 + TARGET, SECONDS + 60 * ASKED))
    with torch.no_grad():
        outputs = network(*(torch.from_numpy(each) for each in arrays.values()))
    answer = task.postprocess({name: each.numpy() for name, each in outputs.items()})
    assert answer["mean"].dtype == answer["quantiles"].dtype == np.float64
    np.testing.assert_allclose(answer["mean"][0, :, 0] - 1e9, [18.5, 35], atol=0.01)


def test_a_version_that_declares_float32_gets_float32(network: PriorFittedNetwork) -> None:
    arrays = build_tables(MINUTES, TARGET, ASKED)
    with torch.no_grad():
        outputs = network(*(torch.from_numpy(each).float() for each in arrays.values()))
    answer = summarise({name: each.numpy() for name, each in outputs.items()})
    assert {each.dtype for each in answer.values()} == {np.dtype(np.float32)}


# -- frames

FRAME = pd.DataFrame({"rooms": [1, 2, 3, 4, 5, 6.0], "noise": [5, 1, 4, 2, 6, 3.0]})
ASKED_FRAME = pd.DataFrame({"noise": [6.0], "rooms": [2.5]})


@pytest.mark.parametrize("convert", [lambda frame: frame, pa.Table.from_pandas], ids=["pandas", "arrow"])
def test_columns_are_aligned_by_name(network: PriorFittedNetwork, convert: Any) -> None:
    expected = predict(network, FRAME.to_numpy(), 100 * FRAME.rooms, [[2.5, 6.0]]).mean
    assert predict(network, convert(FRAME), 100 * FRAME.rooms, convert(ASKED_FRAME)).mean == expected
    assert predict(network, convert(FRAME), 100 * FRAME.rooms, [[2.5, 6.0]]).mean == expected


@pytest.mark.parametrize(
    ("x", "query", "message"),
    [
        (FRAME, ASKED_FRAME[["rooms"]], r"X_query = 'noise': the frame lacks 'noise'.*columns are rooms, noise"),
        (FRAME, ASKED_FRAME.assign(age=1), r"X_query = 'age': the frame has the unexpected 'age'"),
        (FRAME, ASKED_FRAME.rename(columns={"rooms": "room"}), r"lacks 'rooms' and has the unexpected 'room'"),
        (FRAME.to_numpy(), ASKED_FRAME, r"X_query = 'noise, rooms'.*those of X have none.*give X as a frame too"),
        (
            FRAME.assign(kind=list("abcabc")),
            ASKED_FRAME,
            r"X = 'kind': row 0 has 'a', which is no number.*leave the col",
        ),
        (FRAME.set_axis(["a", "a"], axis=1), ASKED_FRAME, r"X = 'a': names two columns"),
        (FRAME.sort_values("noise"), ASKED_FRAME, r"y = '0, 1, 2, 3, ...': its rows have another index.*reset_index"),
    ],
)
def test_a_frame_that_cannot_be_aligned_is_rejected_by_name(
    network: PriorFittedNetwork, x: Any, query: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        predict(network, x, 100 * FRAME.rooms, query)


def test_dates_become_seconds_and_missing_values_nan() -> None:
    day = pd.to_datetime(["2026-03-01", "2026-03-02", None])
    x = pd.DataFrame({"day": day, "level": pd.Categorical([1, 2, None]), "size": pd.array([1, None, 3], "Int64")})
    found = build_tables(x, [1.0, 2.0, np.nan], x)
    expected = [[1772323200, 1, 1], [1772409600, 2, np.nan], [np.nan, np.nan, 3]]
    np.testing.assert_array_equal(found["x"][0], expected)
