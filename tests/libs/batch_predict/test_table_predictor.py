"""The predictions of a table's rows, beside what they were made from."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from registered import arrays_of, tensors
from serving import table_model
from shoal.errors import ConfigError, DataError, InferenceError
from shoal.libs.batch_predict.table_predictor import TablePredictor
from shoal.registry import Registry
from shoal.registry.manifest import ModelFactory, Signature, TensorSignature
from shoal.serve.model.padding import PaddingCostModel
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
from shoal.weights import WeightSnapshot


class Total(torch.nn.Module):
    """The sum of a row; nan when its first value is negative, an error when one is 100."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == 100).any()):
            raise RuntimeError("boom")
        total: torch.Tensor = (x * self.scale).sum(1)
        return torch.where(x[:, 0] < 0, torch.nan, total)


def predictor(**options: Any) -> TablePredictor:
    signature = Signature(
        inputs=tensors(x=[-1, 2]),
        outputs=tensors(total=[-1]),
    )
    factory = ModelFactory(factory=f"{__name__}:Total")
    snapshot = WeightSnapshot.of(3, {"scale": np.full(1, 2.0, np.float32)})
    return TablePredictor(ModelPackage(factory, signature, snapshot), ModelOptions(max_batch_size=4), **options)


def rows(*firsts: float) -> pa.Table:
    return pa.table({"id": list(range(len(firsts))), "a": list(firsts), "b": [1.0] * len(firsts)})


def test_predictions_stand_beside_their_rows() -> None:
    answered = predictor(columns_by_input={"x": ["a", "b"]})(rows(*range(10)))
    assert answered.column_names == ["id", "a", "b", "total", "model_version"]
    assert answered["total"].to_pylist() == [2.0 * (row + 1) for row in range(10)]
    assert answered["model_version"].to_pylist() == [3] * 10
    chosen = predictor(columns_by_input={"x": ["a", "b"]}, keep=["id"])(rows(1))
    assert chosen.column_names == ["id", "total", "model_version"]


@pytest.mark.parametrize(("taken", "skip_errors"), [("total", False), ("model_version", False), ("error", True)])
def test_what_is_added_does_not_hide_a_column(taken: str, skip_errors: bool) -> None:
    table = rows(1).rename_columns([taken, "a", "b"])
    predict = predictor(columns_by_input={"x": ["a", "b"]}, skip_errors=skip_errors)
    answered = predict(table)
    assert (answered[f"input_{taken}"].to_pylist(), answered.column_names.count(taken)) == ([0], 1)
    with pytest.raises(ConfigError, match=f"keep = 'input_{taken}': is a column of the input and of the output"):
        predict(table.append_column(f"input_{taken}", table["a"]))


def test_a_column_of_errors_is_an_input_s_where_none_are_skipped() -> None:
    table = rows(1).rename_columns(["error", "a", "b"])
    answered = predictor(columns_by_input={"x": ["a", "b"]})(table)
    assert answered.column_names == ["error", "a", "b", "total", "model_version"]


def test_one_bad_row_ends_it_unless_it_is_to_be_skipped() -> None:
    table = rows(1, 2, -1, 4, 5, 6)
    for given in (table, table.select(["b", "a", "id"])):  # whatever the order of its columns
        with pytest.raises(InferenceError, match="'total' is not finite"):
            predictor(columns_by_input={"x": ["a", "b"]})(given)
    answered = predictor(columns_by_input={"x": ["a", "b"]}, skip_errors=True)(table)
    assert answered["total"].to_pylist() == [4.0, 6.0, None, 10.0, 12.0, 14.0]
    assert ["not finite" in (error or "") for error in answered["error"].to_pylist()] == [False, False, True] + [
        False
    ] * 3


def test_a_row_for_which_the_model_raises_is_skipped_or_said_by_name() -> None:
    table = rows(1, 100, 3)  # Totals raises what no InferenceError is
    with pytest.raises(InferenceError, match=r"the model raised RuntimeError: boom\. --skip-errors goes on"):
        predictor(columns_by_input={"x": ["a", "b"]})(table)
    answered = predictor(columns_by_input={"x": ["a", "b"]}, skip_errors=True)(table)
    assert answered["total"].to_pylist() == [4.0, None, 8.0]
    assert answered["error"].to_pylist() == [None, "the model raised RuntimeError: boom", None]


def test_a_row_that_makes_no_input_is_skipped_like_any_other() -> None:
    table = rows(1, 2, 3, 4, 5, -1)
    table = table.set_column(1, "a", pa.array([1.0, None, 3.0, 4.0, None, -1.0]))
    complaint = r"column = 'a': has no value, in the row {'a': None, 'b': .*; --skip-errors goes on without"
    with pytest.raises(DataError, match=complaint):  # by what it holds: a table is one of many blocks
        predictor(columns_by_input={"x": ["a", "b"]})(table)
    answered = predictor(columns_by_input={"x": ["a", "b"]}, skip_errors=True)(table)
    assert answered["total"].to_pylist() == [4.0, None, 8.0, 10.0, None, None]
    errors = answered["error"].to_pylist()
    assert errors[1] == errors[4] == "column = 'a': has no value. fill it, or leave the row out"
    assert [error is None for error in errors] == [True, False, True, True, False, False]


class Tripled(torch.nn.Module):
    """Each number times a factor, and ten times the width of the batch and its rows; -1 is no number to it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if bool((x == -1).any()):
            raise RuntimeError("minus one")
        return x * self.scale, torch.full((len(x),), 10.0 * x.shape[1] + len(x))


@pytest.mark.parametrize(
    ("ragged", "batches"), [("pad", [33, 33, 33, 34, 34, 34, 34]), ("bucket", [21, 14, 32, 14, 14, 14, 32])]
)
def test_rows_of_different_lengths_share_batches_as_the_options_say(
    monkeypatch: pytest.MonkeyPatch, ragged: Any, batches: list[float]
) -> None:
    monkeypatch.setattr(
        PaddingCostModel, "split_batch", lambda _, requests: [[*range(len(requests))]]
    )  # whatever forwards take
    signature = Signature(
        inputs=tensors(x=[-1, -1]),
        outputs=tensors(y=[-1, -1], batch=[-1]),
    )
    factory = ModelFactory(factory=f"{__name__}:Tripled")
    package = ModelPackage(factory, signature, WeightSnapshot.of(3, {"scale": np.full(1, 3.0, np.float32)}))
    options = ModelOptions(max_batch_size=4, ragged=ragged)
    table = pa.table({"x": [[1, 2], [3], [4, 5, 6], [7], [8], [9], [10, 11, 12]]})
    answered = TablePredictor(package, options)(table)
    assert answered["y"].to_pylist() == [[3 * value for value in row] for row in table["x"].to_pylist()]
    bad = table.set_column(0, "x", pa.array([[1, 2], [-1], [4, 5, 6], [7], [8, None], [9], [10, 11, 12]]))
    skipped = TablePredictor(package, options, skip_errors=True)(bad)
    assert skipped["y"].to_pylist() == [[3, 6], None, [12, 15, 18], [21], None, [27], [30, 33, 36]]
    assert [error and error.partition(":")[0] for error in skipped["error"].to_pylist()] == [
        *(None, "the model raised RuntimeError", None, None),
        *("column = 'x'", None, None),
    ]
    with pytest.raises(DataError, match="column = 'x'"):
        TablePredictor(package, options)(bad)
    assert answered["batch"].to_pylist() == batches


def test_no_row_at_all_can_be_answered() -> None:
    answered = predictor(columns_by_input={"x": ["a", "b"]}, skip_errors=True)(rows(-1, -2))
    assert answered["total"].null_count == 2
    assert answered["total"].type == pa.float32()


def fp32(name: str, *shape: int) -> TensorSignature:
    return TensorSignature(name=name, datatype="FP32", shape=[*shape])


class Grey(nn.Module):
    """The mean of one picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        assert picture.shape == (3, 2, 2)
        return (self.scale * picture).mean()


class Scaled(nn.Module):
    """Each number, times one rate for all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        assert not rate.ndim
        return self.scale * x * rate


def predict_table(module: nn.Module, signature: Signature, table: pa.Table, **options: Any) -> list[dict[str, Any]]:
    factory = ModelFactory(factory=f"{__name__}:{type(module).__name__}")
    package = ModelPackage(factory, signature, WeightSnapshot.of(1, arrays_of(module)))
    found: list[dict[str, Any]] = TablePredictor(package, ModelOptions.parse(options))(table).to_pylist()
    return found


def test_a_row_of_a_table_is_a_request_of_a_model_without_a_batch() -> None:
    picture = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    table = pa.table({"picture": [picture.tolist(), (picture + 1).tolist()]})
    grey = Signature(inputs=[fp32("picture", 3, 2, 2)], outputs=[fp32("mean")])
    found = predict_table(Grey(), grey, table, max_batch_size=0)
    assert [row["mean"] for row in found] == [5.5, 6.5]


def test_rows_of_a_table_with_other_shared_values_are_computed_apart() -> None:
    signature = Signature(inputs=[fp32("x", -1), fp32("rate")], outputs=[fp32("y", -1)])
    table = pa.table({"x": [1.0, 2.0, 3.0], "rate": [10.0, 20.0, 10.0]})
    found = predict_table(Scaled(), signature, table, batch_dim={"rate": None})
    assert [row["y"] for row in found] == [10, 40, 30]


class First(Scaled):
    """The first column of each row."""

    def forward(self, x: torch.Tensor, rate: torch.Tensor | None = None) -> torch.Tensor:
        return self.scale * x[0, :, 0]


def test_the_columns_of_a_table_are_aligned_by_name_wherever_the_batch_is() -> None:
    x = TensorSignature(name="x", datatype="FP32", shape=[1, -1, 3], columns=["a", "b", "c"])
    table = pa.table({"c": [3.0, 30.0], "b": [2.0, 20.0], "a": [1.0, 10.0]})
    found = predict_table(First(), Signature(inputs=[x], outputs=[fp32("y", -1)]), table, batch_dim={"x": 1})
    assert [row["y"] for row in found] == [1, 10]


def test_nulls_of_a_table_s_columns_are_gaps_and_a_value_that_is_refused_names_its_column() -> None:
    source = RegisteredModel("charges", Registry().location)
    package = source.load_package(table_model.register("basic", "plus").version)
    dates = pa.array([20239, None, 20240], pa.date32())
    columns = {"age": [72, None, 101], "plan": ["basic", None, "plus"], "since": dates}
    table = pa.table({**columns, "active": [True, None, False], "balance": pa.nulls(3)})
    answered = TablePredictor(package, ModelOptions())(table)
    assert answered["charge"].to_pylist() == [172.0, 50.0, 301.0]
    assert answered["share"].to_pylist() == [{"no": 0.25, "yes": 0.75}] * 3
    assert answered["plan_name"].to_pylist() == ["basic", "", "plus"]  # texts, as those of the input
    gold = table.set_column(1, "plan", [["basic", "gold", "plus"]])
    with pytest.raises(InferenceError, match="plan = 'gold': is no word that training has seen"):
        TablePredictor(package, ModelOptions())(gold)
    answered = TablePredictor(package, ModelOptions(), skip_errors=True)(gold)
    assert answered["charge"].to_pylist() == [172.0, None, 301.0]
    assert "plan = 'gold'" in answered["error"].to_pylist()[1]
