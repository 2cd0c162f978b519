"""The output of a batch prediction, in a folder or a bucket: all of it has its name, or none. And the verb."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from registered import tensors
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobStatus
from shoal.errors import ConfigError, DataError, RunError, StoreError
from shoal.libs.batch_predict import command
from shoal.libs.batch_predict.flow import BatchPredictSpec, check, list_input_files, open_output
from shoal.libs.batch_predict.output import (
    BucketOutput,
    Part,
    count_rows,
    has_rows,
    make_incoming_path,
    publish_output,
    verify_row_count,
)
from shoal.registry import ModelFactory, Registry, Signature
from shoal.store import BucketPath, Store
from shoal.weights import WeightSnapshot
from typed import complaint, said

ROWS = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})


def register() -> None:
    signature = Signature(
        inputs=tensors(x=[-1, 2]),
        outputs=tensors(y=[-1, 1]),
    )
    factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 2, "out_features": 1})
    Registry().register("m", WeightSnapshot.of(1, {}), model=factory, signature=signature)


@pytest.fixture
def bucket(bucket_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:  # noqa: F811
    return open_bucket(bucket_environment, monkeypatch)


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.list_entries()]


def write_parts(output: BucketOutput) -> list[Part]:
    parts = [output.write_part(number, [ROWS, ROWS]) for number in (0, 0, 1)]  # the first is written again
    assert output.write_part(2, [ROWS.slice(0, 0)]) is None
    return [part for part in parts[1:] if part is not None]


def test_parts_have_their_names_when_all_are_there(bucket: Store) -> None:
    output = open_output(f"{bucket.url}/out/")
    assert isinstance(output, BucketOutput)
    parts = write_parts(output)
    assert {key.split("/")[1][:10] for key in keys(bucket)} == {"_incoming-"}
    output.require_new()  # a running or killed prediction shows no part
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


def written(folder: Path, rows: int) -> Path:
    folder.mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(pa.table({"y": [part] * rows}), folder / f"{part}.parquet")
    return folder


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
    (tmp_path / "semicolons.csv").write_text("x;y\n1,5;2\n3;4\n")
    assert count_rows([tmp_path / "semicolons.csv"]) == 2
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


def table_files(folder: Path, end: str, *tables: pa.Table) -> Path:
    folder.mkdir()
    for number, table in enumerate(tables):
        write = pyarrow.parquet.write_table if end == "parquet" else pyarrow.csv.write_csv
        write(table, folder / f"{number}.{end}")
    return folder


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_a_file_without_the_columns_of_the_first_is_found_before_anything_is_computed(end: str, tmp_path: Path) -> None:
    register()
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


URL = "http://head.example:8265"


class FakeJob:
    """A job with a line more at each poll, which ends well at the third."""

    submission_id, num_polls = "one", 0

    def poll_outcome(self) -> JobStatus | None:
        self.num_polls += 1
        return JobStatus.SUCCEEDED if self.num_polls == 3 else None

    def status(self) -> JobStatus:
        return JobStatus.SUCCEEDED

    def read_logs_from(self, start: int, *, is_complete: bool) -> tuple[str, int]:
        written = "".join(f"line {number}\n" for number in range(self.num_polls))
        return written[start:], len(written)

    def stop_quietly(self) -> None:
        """It is over."""


def test_the_job_is_for_files_and_models_of_the_cluster_and_its_lines_are_printed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, submitted = FakeJob(), SimpleNamespace(words=[], options={})

    def submit(cluster: ClusterHandle, words: Sequence[str], **options: Any) -> None:
        submitted.words, submitted.options = [*words], options

    monkeypatch.chdir(tmp_path)
    for name, stand_in in {
        "find_cluster": lambda address: ClusterHandle(URL, URL, "token", {}),
        "submit": submit,
        "JobHandle": lambda cluster, submission_id: job,
        "POLL_S": 0.0,
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    told = said(f"batch-predict tumours /data/in /data/out --address {URL}")
    assert told.splitlines() == ["line 0", "line 1", "line 2"]
    assert submitted.words[:3] == ["python", "-m", "shoal.libs.batch_predict.flow"]
    assert {"model=tumours", "input=/data/in", "output=/data/out"} <= {*submitted.words}
    assert submitted.options["working_dir"] == tmp_path
    assert "SHOAL_HOME" not in submitted.options["env"]


def test_a_path_that_is_no_text_is_refused_by_its_name() -> None:
    assert r"rows\udcff.csv': is no text" in complaint("batch-predict m", "rows\udcff.csv", "out")
