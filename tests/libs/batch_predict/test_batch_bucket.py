"""The output of a batch prediction in a bucket: all of it has its names, or none, and one of several predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from shoal.errors import ConfigError, DataError, RunError, StoreError
from shoal.libs.batch_predict.flow import BatchPredictSpec, check, list_input_files, open_output
from shoal.libs.batch_predict.output import BucketOutput, Part, count_rows, has_rows
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.store import BucketPath, Store
from shoal.weights import WeightSnapshot

ROWS = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})


@pytest.fixture
def bucket(bucket_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:  # noqa: F811
    return open_bucket(bucket_environment, monkeypatch)


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.list_entries()]


def write_parts(output: BucketOutput) -> list[Part]:
    parts = [output.write_part(number, [ROWS, ROWS]) for number in (0, 0, 1)]  # the first is written again
    assert output.write_part(2, [ROWS.slice(0, 0)]) is None
    return [part for part in parts[1:] if part is not None]


def register() -> None:
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 2])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 1])],
    )
    factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 2, "out_features": 1})
    Registry().register("m", WeightSnapshot.of(1, {}), model=factory, signature=signature)


def test_parts_have_their_names_when_all_are_there(bucket: Store) -> None:
    output = open_output(f"{bucket.url}/out/")
    assert isinstance(output, BucketOutput)
    parts = write_parts(output)
    assert {key.split("/")[1][:10] for key in keys(bucket)} == {"_incoming-"}
    output.require_new()  # a prediction that goes on, or was killed, shows no part
    output.publish(parts)
    names = ["part-000000.parquet", "part-000001.parquet"]
    assert keys(bucket) == [f"out/{name}" for name in ("_SUCCESS", "_manifest.json", *names)]
    manifest = json.loads(bucket.read("out/_manifest.json"))
    sizes = [entry.size_bytes for entry in bucket.list_entries("out")[2:]]
    described = [{"name": name, "rows": 6, "size_bytes": size} for name, size in zip(names, sizes, strict=True)]
    assert manifest == {"rows": 12, "parts": described}
    assert count_rows(list_input_files(f"{bucket.url}/out")) == 12
    with pytest.raises(DataError, match=r"output = 's3://.*/out': exists already"):
        open_output(f"{bucket.url}/out")


def test_of_two_predictions_one_gets_the_name_and_no_row_of_the_other_is_lost(bucket: Store) -> None:
    one, other = BucketOutput(bucket.url), BucketOutput(bucket.url)
    parts = write_parts(one), write_parts(other)
    one.publish(parts[0])
    with pytest.raises(RunError, match=rf"another prediction has written it\): all rows are in .*/{other.incoming}"):
        other.publish(parts[1])
    assert [key for key in keys(bucket) if "incoming" in key] == [f"{other.incoming}/{each.name}" for each in parts[1]]
    other.discard()
    assert not [key for key in keys(bucket) if "incoming" in key]


def test_a_store_that_fails_while_parts_are_named_leaves_no_success(
    bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = BucketOutput(bucket.url)
    parts = write_parts(output)

    def fail(self: Store, source: str, target: str) -> None:
        raise StoreError("is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "copy", fail)
        with pytest.raises(RunError, match=r"cannot be made \(is down\): all rows are in"):
            output.publish(parts)
    assert "_SUCCESS" not in keys(bucket)
    assert len([key for key in keys(bucket) if "incoming" in key]) == 2
    with pytest.raises(DataError, match="is there in part"):
        BucketOutput(bucket.url).require_new()


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_files_of_a_bucket_are_checked_without_downloading_them(
    end: str, bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setattr(BucketPath, "download", None)
    write = pyarrow.parquet.write_table if end == "parquet" else pyarrow.csv.write_csv
    for number, table in enumerate([ROWS, ROWS.drop_columns(["b"])]):
        write(table, tmp_path / "file")
        bucket.write(f"in/{number}.{end}", tmp_path / "file")
    bucket.write("in/_SUCCESS", b"")
    files = list_input_files(f"{bucket.url}/in")
    assert [file.name for file in files] == [f"0.{end}", f"1.{end}"]
    assert has_rows(files)
    assert count_rows(files) == 6
    check(BatchPredictSpec(model="m", input=f"{bucket.url}/in/0.{end}", output=f"{bucket.url}/out"))
    with pytest.raises(DataError, match=rf"1\.{end}': the column 'b' is not once in it, as in 0\.{end}"):
        check(BatchPredictSpec(model="m", input=f"{bucket.url}/in", output=f"{bucket.url}/out"))
    bucket.write(f"in/2.{end}", b"")
    with pytest.raises(DataError, match=rf"2\.{end}': cannot be read"):
        check(BatchPredictSpec(model="m", input=f"{bucket.url}/in", output=f"{bucket.url}/out"))


def test_places_that_cannot_be_used_are_named(bucket: Store) -> None:
    with pytest.raises(DataError, match=r"input = 's3://.*/none': does not exist"):
        list_input_files(f"{bucket.url}/none")
    with pytest.raises(DataError, match=r"output = 's3://no-such-bucket/x': cannot be written: .* does not exist: cre"):
        open_output("s3://no-such-bucket/x")
    with pytest.raises(ConfigError, match=r"output = 'http://x/y': is of none of the kinds"):
        open_output("http://x/y")
