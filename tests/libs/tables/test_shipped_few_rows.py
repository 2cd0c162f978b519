"""`shoal.few_rows`: the shipped network on words, dates, gaps, frames and classes; errors that name column and row."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import safetensors.torch
from torch import nn

import shoal
from shoal.errors import DataError
from shoal.frame import parse_cell
from shoal.libs.tables import few_rows as module
from shoal.libs.tables.columns import TableEncoder
from shoal.libs.tables.network import PriorFittedNetwork
from shoal.registry import ModelFactory, Registry, Signature
from shoal.weights import WeightSnapshot

ROWS = [
    {"area": 50, "city": "Bern", "since": "2020-01-01", "lift": True},
    {"area": 70, "city": "Basel", "since": "2021-06-01", "lift": False},
    {"area": 60, "city": "Bern", "since": "2019-05-01", "lift": None},
    {"area": 85, "city": "Chur", "since": None, "lift": True},
    {"area": None, "city": "", "since": "2020-03-01", "lift": False},
]
PRICES = [100.0, 150.0, 120.0, 175.0, 130.0]
NEW = [{"area": 65, "city": "Geneva", "since": "2020-07-01", "lift": True}]


def test_the_shipped_network_learns_a_line_and_says_how_sure_it_is() -> None:
    x = np.arange(12.0)[:, None]
    found = shoal.few_rows(x, 3 * x[:, 0] + 5).predict([[4.5], [7.25]])
    np.testing.assert_allclose(found.mean, [18.5, 26.75], atol=1.0)
    (low, high), (lower, upper) = found.interval_90, found.interval_50
    assert ((low < lower) & (lower < found.median) & (found.median < upper) & (upper < high)).all()
    with safetensors.safe_open(module.FILE, "np") as file:
        about = json.loads(file.metadata()["provenance"])
    assert about["recipe"] == "shoal run few_rows"
    assert module.FILE.stat().st_size < 3 << 20


def test_rows_have_words_dates_truths_and_gaps_in_any_form() -> None:
    expected = shoal.few_rows(ROWS, PRICES).predict(NEW)
    assert expected.mean.shape == (1,)
    assert shoal.few_rows(ROWS, PRICES).predict([]).mean.shape == (0,)
    frame = pd.DataFrame(ROWS)
    frame["since"] = pd.to_datetime(frame["since"])
    frame["price"] = PRICES
    new = pd.DataFrame(NEW, index=["n"])[["lift", "since", "area", "city"]]
    found = shoal.few_rows(frame, "price").predict(new)
    assert list(found.interval_90[1].index) == ["n"]
    np.testing.assert_allclose(found.mean, expected.mean)
    for rows, new in (
        (pa.Table.from_pylist(ROWS), pa.Table.from_pylist(NEW)),
        ([list(each.values()) for each in ROWS], [list(each.values()) for each in NEW]),
        ([{**each, "price": str(price)} for each, price in zip(ROWS, PRICES, strict=True)], {**NEW[0], "price": ""}),
        ([{**each, "price": price} for each, price in zip(ROWS, PRICES, strict=True)], {**NEW[0], "price": None}),
    ):
        target: Any = "price" if isinstance(new, dict) else PRICES
        np.testing.assert_allclose(shoal.few_rows(rows, target).predict(new).mean, expected.mean)


def test_words_take_the_columns_that_are_free_and_an_unknown_one_is_a_gap() -> None:
    colours = np.array(["red", "red", "blue", "green"], object)
    wide = np.concatenate([np.arange(36.0).reshape(4, 9).astype(object), colours[:, None]], 1)
    for rows, width in ((colours[:, None], 3), (wide, 10), (np.array([["a"], ["b"], ["a"]]), 1)):
        assert TableEncoder(rows).encode("X", rows).shape == (len(rows), width)
    assert TableEncoder(wide).encode("X", wide)[:, 9].tolist() == [1, 1, 0, 0]  # the most frequent word
    assert np.isnan(TableEncoder(wide).encode("new", [[*range(9), "pink"]])[0, 9])
    sizes = pd.DataFrame({"size": pd.Categorical(["S", None, "L"], ["S", "M", "L"], ordered=True)})
    np.testing.assert_array_equal(TableEncoder(sizes).encode("X", sizes), [[0.0], [np.nan], [2.0]])
    assert TableEncoder([["3"], [" 4.5 "], [""]]).encode("X", [["7"], [None]])[0, 0] == 7.0
    assert TableEncoder([["3"], ["n/a"], [2.5]]).encode("X", [["7"], ["-"]])[0].tolist() == [7.0]
    assert TableEncoder([["01234"], ["04127"]]).encode("X", [["04127"], ["4127"]]).shape == (2, 1)
    assert TableEncoder([["3,5"], ["1.024,5"]]).encode("X", [["7"], ["7,25"], [2.5]])[:, 0].tolist() == [7.0, 7.25, 2.5]
    for two_meanings in ("1/2/2026", "1,500"):
        assert TableEncoder([[two_meanings]]).encode("X", [[two_meanings]]).tolist() == [[1.0]], "a word"
    with pytest.raises(DataError, match=r"row 0 has '2025/31/05', and the column has numbers or dates"):
        TableEncoder([["31/05/2025"]]).encode("new", [["2025/31/05"]])
    moment = datetime.datetime(2025, 5, 31, tzinfo=datetime.UTC)
    for text in ("2025-05-31", "2025-05-31T02:00+02:00"):
        assert parse_cell("date", text) == moment.timestamp()
    for form in ("2025-05-31", "31/05/2025", "31.05.2025"):
        assert TableEncoder([[form]]).encode("new", [[moment], [form]])[:, 0].tolist() == [moment.timestamp()] * 2


def test_words_as_targets_are_classes() -> None:
    x = np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
    found = shoal.few_rows(x, ["low"] * 3 + ["up"] * 3).predict(pd.DataFrame({0: [1.5, 10.5]}, index=[7, 8]).to_numpy())
    assert list(found.label) == ["low", "up"]
    assert (found.probability.max(1) > 0.6).all()
    three = shoal.few_rows(pd.DataFrame({"x": x[:, 0]}), list("aabbcc")).predict(pd.DataFrame({"x": [0.0]}, index=[9]))
    assert three.label.to_dict() == {9: "a"}
    assert list(three.probability.columns) == three.classes == ["a", "b", "c"]
    assert three.probability.to_numpy().sum(1).tolist() == pytest.approx([1.0])


def test_several_targets_and_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(6.0)[:, None]
    targets = pd.DataFrame({"up": x[:, 0], "down": [5.0, 4, 3, 2, 1, np.nan]})
    model = shoal.few_rows(pd.DataFrame(x, columns=["x"]), targets)
    queries = pd.DataFrame({"x": np.linspace(0, 5, 7)})
    expected = model.predict(queries)
    assert list(expected.mean.columns) == ["up", "down"]
    monkeypatch.setattr(module, "QUERIES", 3)
    np.testing.assert_allclose(model.predict(queries).interval_90[0], expected.interval_90[0], atol=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "new", "field", "problem"),
    [
        (ROWS, PRICES, [{**NEW[0], "area": "wide"}], "new.area", "row 0 has 'wide'"),
        (ROWS, PRICES, [{**NEW[0], "city": 3}], "new.city", "row 0 has a number"),
        (ROWS, PRICES, [{**NEW[0], "since": "May"}], "new.since", "row 0 has 'May'"),
        (ROWS, PRICES, [{"area": 3}], "new", "lacks 'city'"),
        (ROWS, PRICES, {}, "new", "lacks 'area', 'city'"),
        (ROWS, PRICES, [[1, 2]], "new", "without names.* not the columns"),
        ([[1.0], [2.0]], [1, 2], [[1, 2]], "new", "not the columns of X"),
        ([*ROWS, {"area": 3}], [*PRICES, 1], None, "X.city", "row 5 lacks it"),
        ([["soon"], [3]], [1, 2], None, "X.0", "row 1 has a number, .* such as 'soon'"),
        ([1, 2], [1, 2], None, "X", "has 1 dimensions"),
        ([], [], None, "X", "has no rows"),
        ([[1], [2]], [1, 2, 3], None, "y", "X has 2 rows"),
        (ROWS, "price", None, "y", "is no column of X"),
        (np.zeros((4, 11)), range(4), None, "columns", "at most 10"),
        (np.zeros((21, 1)), range(21), None, "y", "too many labels"),
        ([[1], [2]], ["a", "a"], None, "y", "are one class"),
        ([[1], [2]], ["a", 2], None, "y", "2 is none"),
        ([[1], [2]], ["a", ""], None, "y", "are one class"),
    ],
)
def test_what_cannot_be_read_is_named(x: Any, y: Any, new: Any, field: str, problem: str) -> None:
    """new: None where X or y is refused already"""
    with pytest.raises(DataError, match=problem) as raised:
        shoal.few_rows(x, y).predict(new)
    assert raised.value.field == field


def register(network: nn.Module, factory: str, **kwargs: Any) -> None:
    weights = WeightSnapshot.from_payload(3, safetensors.torch.save(network.state_dict()))
    model, none = ModelFactory(factory=factory, kwargs=kwargs), Signature(inputs=[], outputs=[])
    facts: dict[str, Any] = {"metrics": {"log_loss": 1.5}, "aliases": ("champion",)}
    Registry().register("mine", weights, model=model, signature=none, **facts)


def test_a_registered_network_is_used_and_written_as_the_shipped_one(tmp_path: Path) -> None:
    network = PriorFittedNetwork(width=32, depth=1)
    task = str(Path(__file__).parents[3] / "jobs" / "few_rows.py")
    build = "shoal.train.export.model_entry:build"
    register(network, build, task=task, args={"width": 32, "depth": 1})
    expected = shoal.few_rows([[1.0], [2.0], [4.0]], [1, 2, 4], model="mine@champion").predict([[3.0]])
    module.write_network("mine@1", tmp_path / "mine.safetensors")
    with safetensors.safe_open(tmp_path / "mine.safetensors", "np") as file:
        about = json.loads(file.metadata()["provenance"])
    assert (about["steps"], about["metrics"]) == (3, {"log_loss": 1.5})
    module.load_network.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "FILE", tmp_path / "mine.safetensors")
        found = shoal.few_rows([[1.0], [2.0], [4.0]], [1, 2, 4]).predict([[3.0]])
    module.load_network.cache_clear()
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-2)
    register(nn.Linear(1, 1), "torch.nn:Linear", in_features=1, out_features=1)
    with pytest.raises(DataError, match="mine@2': is a Linear, not a network for few rows"):
        shoal.few_rows([[1.0], [2.0]], [1, 2], model="mine@champion")  # which has moved
