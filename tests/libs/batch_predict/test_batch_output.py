"""The folder of a batch prediction: no other prediction touches it, no row is lost, no finished work is thrown away."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from shoal.errors import DataError, RunError
from shoal.libs.batch_predict.flow import BatchPredictSpec, check
from shoal.libs.batch_predict.output import (
    count_rows,
    has_rows,
    make_incoming_path,
    publish_output,
    verify_row_count,
)
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot


def written(folder: Path, rows: int) -> Path:
    folder.mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(pa.table({"y": [part] * rows}), folder / f"{part}.parquet")
    return folder


def test_two_predictions_into_one_folder_write_to_two(tmp_path: Path) -> None:
    one, other = make_incoming_path(tmp_path / "out"), make_incoming_path(tmp_path / "out")
    assert one != other
    assert {one.parent, other.parent} == {tmp_path}
    assert one.name.startswith(".incoming-out-")


def test_it_has_a_row_for_each_row_of_the_input(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(pa.table({"x": [1, 2, 3]}), tmp_path / "a.csv")
    pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    assert count_rows([tmp_path / "a.csv", tmp_path / "a.csv"]) == count_rows([tmp_path / "a.parquet"] * 2) == 6
    incoming = written(make_incoming_path(tmp_path / "out"), 3)
    assert verify_row_count(incoming, [tmp_path / "a.csv"] * 2) == 6
    with pytest.raises(RunError, match="6 rows were written for 3 of the input"):
        verify_row_count(incoming, [tmp_path / "a.csv"])


def test_a_table_without_rows_is_known_before_anything_is_computed(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    (tmp_path / "none.csv").write_text("x\n")
    (tmp_path / "one.csv").write_text("x\n1\n")
    assert not has_rows([tmp_path / "none.parquet"])
    assert not has_rows([tmp_path / "none.csv"])
    assert has_rows([tmp_path / "none.csv", tmp_path / "one.csv"])


def test_rows_are_counted_whatever_their_columns_turn_out_to_be(tmp_path: Path) -> None:
    """Of the first megabyte the reader concludes what the rest has to be."""
    lines = [f"{number},\n" for number in range(200_000)]
    (tmp_path / "a.csv").write_text("id,note\n" + "".join(lines) + "A-77,late\n")
    assert count_rows([tmp_path / "a.csv"]) == 200_001


def test_what_cannot_have_its_name_is_kept(tmp_path: Path) -> None:
    incoming = written(make_incoming_path(tmp_path / "out"), 3)
    first = written(tmp_path / "out", 1)
    with pytest.raises(RunError, match=f"out cannot be made .*: all rows are in {incoming}, rename that folder"):
        publish_output(incoming, tmp_path / "out")
    assert count_rows([*incoming.glob("*.parquet")]) == 6
    assert count_rows([*first.glob("*.parquet")]) == 2
    publish_output(incoming, tmp_path / "other")
    assert not incoming.exists()
    assert count_rows([*(tmp_path / "other").glob("*.parquet")]) == 6


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_a_broken_file_is_found_before_anything_is_computed(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    whole = folder / f"0.{end}"
    if end == "parquet":
        pyarrow.parquet.write_table(pa.table({"x": [1]}), whole)
    else:
        whole.write_text("x\n1\n")
    (folder / f"1.{end}").write_bytes(b"")
    spec = BatchPredictSpec(model="m", input=str(folder), output=str(tmp_path / "out"))
    said = rf"input = '.*/in/1\.{end}': cannot be read: .*\. give a CSV or a Parquet file$"
    with pytest.raises(DataError, match=said):
        check(spec)


def table_files(folder: Path, end: str, *tables: pa.Table) -> Path:
    folder.mkdir()
    for number, table in enumerate(tables):
        write = pyarrow.parquet.write_table if end == "parquet" else pyarrow.csv.write_csv
        write(table, folder / f"{number}.{end}")
    return folder


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_a_file_without_the_columns_of_the_first_is_found_before_anything_is_computed(end: str, tmp_path: Path) -> None:
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 2])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 1])],
    )
    factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 2, "out_features": 1})
    Registry().register("m", WeightSnapshot.of(1, {}), model=factory, signature=signature)
    first, turned = pa.table({"a": [1], "b": [2]}), pa.table({"b": [3], "id": ["p"], "a": [4]})
    folder = table_files(tmp_path / "turned", end, first, turned)
    check(BatchPredictSpec(model="m", input=str(folder), output=str(tmp_path / "out")))
    folder = table_files(tmp_path / "lacking", end, first, turned.drop_columns(["b"]))
    with pytest.raises(DataError, match=rf"/lacking/1\.{end}': the column 'b' is not once in it, as in 0\.{end}"):
        check(BatchPredictSpec(model="m", input=str(folder), output=str(tmp_path / "out")))
    folder = table_files(tmp_path / "kept", end, turned, first)
    with pytest.raises(DataError, match="the column 'id' is not once in it"):
        check(
            BatchPredictSpec(model="m", input=str(folder), output=str(tmp_path / "out"), columns=["a,b"], keep=["id"])
        )
