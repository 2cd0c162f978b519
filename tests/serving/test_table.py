"""Tables in and out of models: which columns make an input, and the predictions beside what they were made from."""

import csv
import io
import math
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from shoal.errors import DataError
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.tables import (
    build_inputs,
    choose_columns,
    column_type,
    csv_options,
    parse_columns,
    split_by_length,
    to_column,
)

X = TensorMetadata("x", "FP32", [-1, 2])
FLAG = TensorMetadata("flag", "BOOL", [-1])
TABLE = pa.table(
    {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "id": ["p", "q", "r"]}
)


def inputs(table: pa.Table, spec: TensorMetadata, *words: str) -> np.ndarray:
    chosen = choose_columns([spec], table.column_names, parse_columns(words, [spec]))
    return build_inputs(table, [spec], chosen)[spec.name]


NAMED = TensorMetadata("rows", "FP32", [-1, 2], ["b", "a"])


@pytest.mark.parametrize("words", [(), ("a,b",), ("b,a",)])
def test_a_model_with_names_gets_its_columns_in_its_own_order(words: tuple[str, ...]) -> None:
    for table in (TABLE, TABLE.select(["a", "b"]), TABLE.select(["b", "id", "a"])):
        assert inputs(table, NAMED, *words).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert inputs(TABLE, NAMED, "a,a").tolist() == [[1, 1], [2, 2], [3, 3]]  # explicitly so


def test_a_table_without_the_columns_of_a_model_is_rejected_by_their_names() -> None:
    with pytest.raises(DataError, match=r"columns = 'b': is not in the table. it has a, id"):
        inputs(TABLE.select(["a", "id"]), NAMED)
    with pytest.raises(DataError, match=r"columns = 'b': and 1 more are not in the table. it has id, x"):
        inputs(TABLE.select(["id", "x"]), NAMED)


@pytest.mark.parametrize("shape", [[-1, 2, 3], [-1, 6], [-1, -1, 3]])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_a_column_of_tensors_is_one_of_lists(shape: list[int], order: tuple[int, ...]) -> None:
    arrays = np.arange(12, dtype=np.float32).reshape([(2, 2, 3)[axis] for axis in order]).transpose(order)
    table = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(arrays), "row": [0, 1]})
    spec = TensorMetadata("x", "FP32", shape)
    expected = arrays.reshape(2, 6) if len(shape) == 2 else arrays
    np.testing.assert_array_equal(inputs(table, spec), expected)
    (alone,) = split_by_length(table.slice(1), [spec], {"x": ["x"]})
    np.testing.assert_array_equal(inputs(alone, spec), expected[1:])


def test_a_missing_tensor_is_named() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 1], permutation=[1, 0])
    storage = pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))
    with pytest.raises(DataError, match="row 1 has no value"):
        inputs(pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)}), X)


def test_columns_of_a_name_of_words_or_of_all_are_an_input() -> None:
    assert inputs(TABLE, X).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert inputs(TABLE, X, "b,a").tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert inputs(TABLE, TensorMetadata("id", "BYTES", [-1])).tolist() == [b"p", b"q", b"r"]
    table = pa.table({"image": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    assert inputs(table, TensorMetadata("image", "FP32", [-1, 1, 2, 2])).shape == (2, 1, 2, 2)
    np.testing.assert_array_equal(inputs(TABLE.select(["a", "b"]), X), [[1, 0.5], [2, 1.5], [3, 2.5]])


def test_several_inputs_have_their_columns_named() -> None:
    said = parse_columns(["x=a,b", "flag=a"], [X, FLAG])
    assert choose_columns([X, FLAG], ["a", "b"], said) == {"x": ["a", "b"], "flag": ["a"]}
    with pytest.raises(DataError, match="does not say for which input"):
        parse_columns(["a,b"], [X, FLAG])
    with pytest.raises(DataError, match="no input 'y'"):
        parse_columns(["y=a"], [X, FLAG])


@pytest.mark.parametrize(
    ("text", "separator", "names"),
    [
        ("plz;b\n04127;1,5\n", ";", None),
        ('\ufeff"Weight\n(kg)"\tb\n1\t2\n', "\t", None),
        ("country,2019,2020\nde,1,2\n", ",", None),  # years
        ("x,y,0\n1,2,3\n", ",", None),
        ("store,2024-01-01,2024-01-02\nA,5,6\nB,7,8\n", ",", None),
        ("sample,octane,1100.5,1103.0\n1,88.4,0.1,0.2\n", ",", None),
        ("y,100,250,500,1000\n,1,2,3,4\n3,1,2,3,4\n", ",", None),
        ("id,year,2020,2021,2023\n7,2,3,4,5\n", ",", None),
        ("1100.5,1103.0\n2024-01-01,x\n", ",", None),  # of other kinds than below
        ("label,0.5,0.9\na,1,2\n", ",", None),  # known
        ("2020,2021,2023\n1,2,3\n", ",", None),
        ("x,5,x\ny,6,y\n", ",", ["0", "1", "2"]),  # twice
        ("4,7,1\n2,3,4\n", ",", ["0", "1", "2"]),  # 1 is known, as the number of a column
        (f"text,5.5\n{'long ' * 40_000},7\n", ",", ["0", "1"]),
        ("?,3.5,x\n4.9,,5\n\n5.0,?,y\n", ",", ["0", "1", "2"]),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", ",", ["0", "1", "2"]),
        ("39,basic,77516,31.05.2025\n", ",", ["0", "1", "2", "3"]),
        ("1.024,50;-;x\n3;?;y\n", ";", ["0", "1", "2"]),
        ("5;5;yes\n", ";", ["0", "1", "2"]),
        ("", ",", None),
    ],
)
def test_cells_of_a_csv_file_are_read_as_they_are(text: str, separator: str, names: list[str] | None) -> None:
    options = csv_options(text.encode(), ["label", "2023", "1"])
    assert options["parse_options"].delimiter == separator
    assert (options["read_options"].column_names or None) == names
    if text:
        read = pyarrow.csv.read_csv(pa.py_buffer(text.encode()), **options)
        rows = [*csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=separator)]
        assert [[*row.values()] for row in read.to_pylist()] == [row for row in rows if row][names is None :]


def test_texts_of_a_csv_file_are_numbers_to_an_input_of_numbers() -> None:
    kept = {name: TensorMetadata("x", name, [-1]) for name in ("FP64", "INT64", "UINT64", "BOOL")}
    assert inputs(pa.table({"x": ["2026-03-01", "2026-03-02"]}), kept["FP64"]).tolist() == [1772323200.0, 1772409600.0]
    assert inputs(pa.table({"x": ["20260301", "20260302"]}), kept["FP64"]).tolist() == [20260301.0, 20260302.0]
    assert inputs(pa.table({"x": ["1", "7"]}), kept["INT64"]).tolist() == [1, 7]
    assert inputs(pa.table({"x": [str(2**64 - 1)]}), kept["UINT64"]).tolist() == [2**64 - 1]
    assert inputs(pa.table({"x": ["1", "false"]}), kept["BOOL"]).tolist() == [True, False]
    for gap in ("", "n/a"):
        with pytest.raises(DataError, match="column = 'x': row 1 has no value"):
            inputs(pa.table({"x": ["1", gap]}), kept["FP64"])


def test_lists_of_words_are_words() -> None:
    table = pa.table({"text": [["a", "b"], ["c", "d"]]})
    for shape in ([-1, 2], [-1, -1]):
        assert inputs(table, TensorMetadata("text", "BYTES", shape)).tolist() == [[b"a", b"b"], [b"c", b"d"]]
    one = TensorMetadata("text", "BYTES", [-1, 1])
    assert inputs(pa.table({"text": [["a"], ["b"]]}), one).tolist() == [[b"a"], [b"b"]]
    with pytest.raises(DataError, match="row 1 has no value"):
        inputs(pa.table({"text": [["a"], [None]]}), one)


def test_lists_of_lists_have_the_sizes_that_an_input_leaves_open() -> None:
    spec = TensorMetadata("image", "FP32", [-1, -1, -1])
    assert inputs(pa.table({"image": [[[1.0, 2.0]], [[3.0, 4.0]]]}), spec).tolist() == [[[1, 2]], [[3, 4]]]
    with pytest.raises(DataError, match="a column of lists of lists"):
        inputs(pa.table({"image": [[1.0, 2.0], [3.0, 4.0]]}), spec)


def test_a_table_is_cut_where_its_lists_change_their_lengths() -> None:
    wide, flat = TensorMetadata("x", "FP32", [-1, -1]), TensorMetadata("flag", "FP32", [-1, 2])
    cube = TensorMetadata("x", "FP32", [-1, -1, -1])

    def cut(spec: TensorMetadata, column: list[Any], kind: pa.DataType | None = None) -> list[list[Any]]:
        table = pa.table({spec.name: pa.array(column, kind)}).slice(1)
        return [part[spec.name].to_pylist() for part in split_by_length(table, [spec], {spec.name: [spec.name]})]

    assert cut(wide, [[9], [1, 2], [3, 4], [5], [6]]) == [[[1, 2], [3, 4]], [[5], [6]]]
    assert cut(wide, [[9], [1], [], []]) == [[[1]], [[], []]]
    assert cut(wide, [[9], [1], None, [2]]) == [[[1]], [None], [[2]]]
    assert cut(flat, [[9], [1, 2], [3]]) == [[[1, 2], [3]]]  # what does not fit is complained of, not cut
    assert cut(cube, [[[0]], [[1, 2]], [[3]], [[4], [5]], [[6], [7]], []]) == [
        *([[[1, 2]]], [[[3]]]),
        *([[[4], [5]], [[6], [7]]], [[]]),
    ]
    assert cut(wide, [[9, 9], [1, 2], [3, 4]], pa.list_(pa.float32(), 2)) == [[[1, 2], [3, 4]]]
    assert cut(wide, [[9]]) == [[]]


def test_no_rows_are_an_input_of_none() -> None:
    table = pa.table({"x": pa.array([], pa.list_(pa.float32()))})
    assert inputs(table, TensorMetadata("x", "FP32", [-1, -1])).shape == (0, 0)
    assert inputs(table, X).shape == (0, 2)


@pytest.mark.parametrize(
    ("table", "words", "message"),
    [
        (TABLE.select(["a", "id"]), ["a,id"], "column = 'id': row 0 cannot be FP32"),
        (pa.table({"a": ["1", "2", "x"], "b": [1, 2, 3]}), [], "column = 'a': row 2 cannot be FP32"),
        (pa.table({"x": [["1", "2"], ["3", "4"], ["5", "x"]]}), [], "column = 'x': row 2 cannot be FP32"),
        (pa.table([[1], [2]], ["a", "a"]), [], "columns = 'a': is in the table more than once"),
        (TABLE, ["a"], r"a give 1 values for each row of this input, FP32 \[any, 2\]"),
        (TABLE, ["a,z"], "columns = 'z': is not in the table. it has a, b, x, id"),
        (TABLE.select(["a", "b", "id"]), [], "no column makes this input"),
        (pa.table({"a": [1, None], "b": [1, 2]}), [], "column = 'a': row 1 has no value"),
        (pa.table({"x": [[1, 2], [3, None]]}), [], "column = 'x': row 1 has no value"),
        (
            pa.table({"x": pa.array([[1, 2], [None, 3]], pa.list_(pa.int8(), 2))}),
            [],
            "column = 'x': row 1 has no value",
        ),
        (pa.table({"x": [[[1], [2]], [[3], None]]}), [], "column = 'x': row 1 has no value"),
        (pa.table({"x": [[1, 2], [3]]}), [], "its lists have from 1 to 2 values"),
    ],
)
def test_what_does_not_fit_is_named(table: pa.Table, words: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        inputs(table, X, *words)
    assert str(refused.value).count(" = ") == 1  # once, and not within words of our own


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        *[("UINT8", [0, 300]), ("UINT8", [-1]), ("UINT8", ["256"]), ("INT8", [[1, 2], [3, 128]]), ("INT32", [2**40])],
        *[("INT64", [0.5]), ("INT64", [float("nan")]), ("INT64", [2.0**63]), ("UINT64", [-1]), ("INT16", ["1.5"])],
        *[("INT64", [[1, 2], [3, None]]), ("BOOL", ["perhaps"]), ("BOOL", [0.5]), ("BOOL", [math.nan]), ("BOOL", [2])],
        *[
            ("BYTES", [{"a": 1}]),
            ("FP32", [{"a": 1}]),
            ("BYTES", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))),
        ],
        *[("INT64", [datetime(2026, 1, 1)]), ("FP32", [date(2026, 1, 1)]), ("FP64", [time(1)])],
        *[("FP16", [70000]), ("FP16", ["70000"]), ("FP32", [1e300]), ("BF16", [-1e300]), ("BF16", [3.4e38])],
    ],
)
def test_a_value_that_the_input_cannot_hold_is_refused(datatype: str, values: list[Any]) -> None:
    size = 2 if isinstance(values[0], list) else 1
    with pytest.raises(DataError, match="column = 'x': "):
        inputs(pa.table({"x": values}), TensorMetadata("x", datatype, [-1, size]))


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("UINT8", [0.0, 255.0], [0, 255]),
        ("INT64", pa.array([1, 2], pa.uint8()), [1, 2]),
        ("INT64", ["7", "-8"], [7, -8]),
        ("INT8", pa.array([1, 1]).dictionary_encode(), [1, 1]),
        ("BOOL", [0, 1], [False, True]),
        ("BOOL", [0.0, 1.0], [False, True]),
        ("BOOL", ["false", "true"], [False, True]),
        ("FP32", [2**24 + 1, 0], [2.0**24, 0]),
        ("FP32", ["1.5", "2"], [1.5, 2]),
        ("FP16", [True, False], [1, 0]),
        ("FP64", [datetime(2026, 3, 1), datetime(2026, 3, 2)], [1772323200.0, 1772409600.0]),
        ("FP64", [timedelta(minutes=1)], [60.0]),
        ("FP64", [1.76e9 + 0.25], [1.76e9 + 0.25]),
        ("FP32", [float("inf"), 1e38], [float("inf"), float(np.float32(1e38))]),
    ],
)
def test_a_value_becomes_what_the_input_holds(datatype: str, values: Any, expected: list[float]) -> None:
    found = inputs(pa.table({"x": values}), TensorMetadata("x", datatype, [-1]))
    assert (found.tolist(), found.dtype) == (expected, NUMPY_DTYPES[datatype])


@pytest.mark.parametrize(
    ("shape", "array", "column"),
    [
        ([-1, 3], np.arange(6, dtype=np.float32).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        ([-1, 1], np.array([[1], [2]], np.float32), [1, 2]),
        ([-1], np.array([1, 2], np.float32), [1, 2]),
        ([-1, -1], np.arange(4, dtype=np.float32).reshape(2, 2), [[0, 1], [2, 3]]),
        ([-1, 2, 2], np.arange(4, dtype=np.float32).reshape(1, 2, 2), [[0, 1, 2, 3]]),
        ([-1, -1], np.zeros((0, 5), np.float32), []),
    ],
)
def test_outputs_are_numbers_or_lists(shape: list[int], array: np.ndarray, column: list[Any]) -> None:
    made = to_column(TensorMetadata("y", "FP32", shape), array)
    assert made.to_pylist() == column
    assert made.type == column_type(TensorMetadata("y", "FP32", shape))
    if shape == [-1, 3]:
        assert to_column(TensorMetadata("y", "FP32", shape, [*"abc"]), array).to_pylist()[1] == {"a": 3, "b": 4, "c": 5}


def test_bf16_outputs_are_floats_and_bytes_stay_bytes() -> None:
    assert to_column(TensorMetadata("y", "BF16", [-1]), np.array([0x3FC0], np.uint16)).to_pylist() == [1.5]
    assert to_column(TensorMetadata("y", "BYTES", [-1]), np.array([b"a"], object)).to_pylist() == [b"a"]
