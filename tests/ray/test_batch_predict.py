"""Batch prediction through Ray Data: what it asks of Ray, and what is left when it does not end well."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from bucket_server import BUCKET, bucket_environment  # noqa: F401 - a fixture
from shoal.errors import ClusterError, ConfigError, DataError, RunError

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

Write = Callable[[Path], None]


def predicted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    free: Callable[[], dict[str, float]] = lambda: {"CPU": 2.0},
    workers: int | None = 1,
    num_gpus: float = 0.0,
    **more: Any,
) -> dict[str, object]:
    """Predict a file of three rows with a Ray Data that calls `write` with the folder; what the workers were to be."""
    import ray

    from shoal.libs.batch_predict import ray_batch

    said: dict[str, object] = {}

    def map_batches(worker: object, **options: object) -> SimpleNamespace:
        said.update(options)
        return SimpleNamespace(write_parquet=lambda folder, **_: write(Path(folder)))

    monkeypatch.setattr(ray, "available_resources", free)
    monkeypatch.setattr(ray_batch, "PlacementRequest", MagicMock())
    rows = SimpleNamespace(map_batches=map_batches)  # and no other step, which would reserve a CPU of its own
    monkeypatch.setattr(ray.data, "read_parquet", lambda *_, **options: said.update(options) or rows)
    source = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3]}), source)
    ray_batch.predict_files(None, [source], tmp_path / "out", workers, num_gpus=num_gpus, **more)  # type: ignore[arg-type]
    return said


def write_rows(folder: Path, rows: int = 3) -> None:
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table({"y": [0] * rows}), folder / "0.parquet")


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.is_dir())


def test_paths_and_columns_are_taken_as_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.libs.batch_predict import command as verb

    handed: list[str] = []
    monkeypatch.setattr(verb, "check", lambda spec: None)
    monkeypatch.setattr(verb, "_run", lambda fields, *_: handed.extend(fields))
    source, output = tmp_path / "a: b #1.csv", tmp_path / "{on}"
    words = ["1e3", str(source), str(output), "--columns", "x=it's, 1", "--keep", "on, 2,no]", "--workers", "2"]
    words += ["--num-gpus", "0.25"]
    result = CliRunner().invoke(verb.batch_predict, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    spec = verb.BatchPredictSpec().override(handed)
    assert (spec.model, spec.input, spec.output, spec.workers) == ("1e3", str(source), str(output), 2)
    assert spec.num_gpus == 0.25
    assert (spec.columns, spec.keep) == (["x=it's, 1"], ["on", "2", "no]"])


def test_a_worker_is_started_again_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = predicted(tmp_path, monkeypatch, write_rows)
    assert (said["max_restarts"], said["max_task_retries"]) == (2, 2)


def test_a_small_file_of_texts_is_divided_by_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = predicted(tmp_path, monkeypatch, write_rows, block_rows=2)
    assert (said["override_num_blocks"], said["batch_size"]) == (2, 2)


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("asked", r"a worker with the model died, after 0 others: .* try fewer workers"),
        ("made", r"^model\.factory = 'mine:Model': cannot be imported$"),
    ],
)
def test_a_model_that_ends_its_process_ends_the_prediction(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, said: str
) -> None:
    from shoal.libs.batch_predict import ray_batch

    class Deadly:
        def __init__(self, job: object, num_gpus: float) -> None:
            if when == "made":
                raise ConfigError("model.factory", "mine:Model", "cannot be imported")

        def __call__(self, table: pa.Table) -> pa.Table:
            os._exit(1)

    monkeypatch.setattr(ray_batch, "PredictWorker", Deadly)
    monkeypatch.setattr(ray_batch, "WORKER_RESTARTS", 0)
    pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "in.parquet")
    with pytest.raises(RunError, match=said):
        ray_batch.predict_files(None, [tmp_path / "in.parquet"], tmp_path / "out", 1)  # type: ignore[arg-type]
    assert folders(tmp_path) == []


@pytest.mark.soak
def test_a_prediction_that_fails_leaves_its_places_while_its_error_is_kept(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.cluster.capacity import wait_for_resource
    from shoal.libs.batch_predict import ray_batch

    class Wrong:
        def __init__(self, job: object, num_gpus: float) -> None: ...

        def __call__(self, table: pa.Table) -> pa.Table:
            raise DataError("column", "x", "is no picture")

    monkeypatch.setattr(ray_batch, "PredictWorker", Wrong)
    pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "in.parquet")
    free = wait_for_resource("CPU", 8.0, 10.0)
    with pytest.raises(RunError, match="is no picture") as raised:
        ray_batch.predict_files(None, [tmp_path / "in.parquet"], tmp_path / "out", 1)  # type: ignore[arg-type]
    assert wait_for_resource("CPU", free, 10.0) == free
    assert raised.value.__context__ is None


def test_places_of_what_has_just_ended_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = iter([{"CPU": 0.5}, {}, {"CPU": 2.0}])
    said = predicted(tmp_path, monkeypatch, write_rows, lambda: next(views))
    assert said["num_cpus"] == 1.0
    assert next(views, None) is None


@pytest.mark.parametrize(
    ("free_gpus", "workers", "num_gpus", "count"), [(2.0, None, 1.0, 2), (2.0, None, 0.5, 3), (0.5, 1, 0.5, 1)]
)
def test_workers_reserve_gpus_and_are_as_many_as_those_hold(
    free_gpus: float, workers: int | None, num_gpus: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}])
    free = {"CPU": 3.5, "GPU": free_gpus}
    said = predicted(tmp_path, monkeypatch, write_rows, lambda: free, workers, num_gpus)
    assert said["num_gpus"] == num_gpus
    assert said["compute"].max_size == count  # type: ignore[attr-defined]


def test_what_the_cluster_has_not_or_is_not_free_is_refused_and_an_output_without_all_rows_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.libs.batch_predict import ray_batch

    monkeypatch.setattr(ray_batch, "CAPACITY_WAIT_S", 0.1)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    with pytest.raises(ConfigError, match=r"num_gpus = 1\.0: the cluster has 0 GPUs.*lower num_gpus or workers"):
        predicted(tmp_path, monkeypatch, write_rows, num_gpus=1.0)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    with pytest.raises(ClusterError, match=r"1 workers need 1 GPUs, 0 are free: wait for what runs"):
        predicted(tmp_path, monkeypatch, write_rows, num_gpus=1.0)
    with pytest.raises(ClusterError, match=r"1 workers need 0\.75 CPUs free: wait for what runs"):
        predicted(tmp_path, monkeypatch, write_rows, lambda: {"CPU": 0.5})
    with pytest.raises(RunError, match="2 rows were written for 3 of the input"):
        predicted(tmp_path, monkeypatch, lambda folder: write_rows(folder, 2))
    assert folders(tmp_path) == []


def test_by_default_only_a_model_that_needs_a_gpu_reserves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.libs.batch_predict.ray_batch import resolve_gpus
    from shoal.serve.spec.model_options import ModelOptions

    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}])
    cuda = ModelOptions(device="cuda")
    assert resolve_gpus(None, ModelOptions(), None) == 0.0
    assert resolve_gpus(0.25, ModelOptions(), None) == 0.25
    assert [resolve_gpus(None, cuda, workers) for workers in (None, 2, 3)] == [1.0, 1.0, 0.5]
    assert resolve_gpus(0.0, cuda, 3) == 0.0


def test_a_worker_with_a_part_of_a_gpu_has_that_part_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.libs.batch_predict import ray_batch

    shares: list[float] = []
    monkeypatch.setattr(ray_batch, "limit_device_memory", shares.append)
    monkeypatch.setattr(ray_batch, "TablePredictor", MagicMock())
    ray_batch.PredictWorker(MagicMock(text=""), 0.25)
    assert shares == [0.25]


def test_it_ends_where_an_endpoint_leaves_one_cpu_and_words_stay_words(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from shoal.libs.batch_predict import ray_batch

    class Echo:
        def __init__(self, job: object, num_gpus: float) -> None:
            pass

        def __call__(self, table: pa.Table) -> pa.Table:
            return table

    class Endpoint:
        def pid(self) -> int:
            return os.getpid()

    monkeypatch.setattr(ray_batch, "PredictWorker", Echo)
    earlier = ray.available_resources()
    there = ray.remote(num_cpus=earlier["CPU"] - 1)(Endpoint).remote()
    table = pa.table({"text": ["001", "1.50"], "y": [1, 2]})
    day = tmp_path / "day=3? #1"  # a folder's name is no column, and no address
    day.mkdir()
    pyarrow.parquet.write_table(table, day / "in.parquet")
    (day / "in.csv").write_text("text,y\n001,1\n1.50,2\n")
    try:
        assert ray.get(there.pid.remote(), timeout=400)
        views = [earlier]  # Ray's report of what is free, from before the endpoint
        current = ray.available_resources
        monkeypatch.setattr(ray, "available_resources", lambda: views.pop() if views else current())
        for name, expected in {"in.parquet": [1, 2], "in.csv": ["1", "2"]}.items():
            out = tmp_path / f"{name}.out"
            ray_batch.predict_files(None, [day / name], out, None)  # type: ignore[arg-type]
            assert pyarrow.parquet.read_table(out).to_pydict() == {"text": ["001", "1.50"], "y": expected}
        (day / "in.csv").write_text("text,y\n")
        with pytest.raises(DataError, match=r"has no rows\. there is nothing to predict"):
            ray_batch.predict_files(None, [day / "in.csv"], tmp_path / "none", None)  # type: ignore[arg-type]
    finally:
        ray.kill(there)


@pytest.mark.soak
def test_tables_of_a_bucket_are_predicted_into_a_bucket(
    cluster: EmbeddedCluster,
    tmp_path: Path,
    bucket_environment: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.libs.batch_predict import ray_batch
    from shoal.libs.batch_predict.flow import list_input_files
    from shoal.libs.batch_predict.output import BucketOutput, Part
    from shoal.store import open_store

    class Doubled:
        def __init__(self, job: object, num_gpus: float) -> None: ...

        def __call__(self, table: pa.Table) -> pa.Table:
            if 13 in table["x"].to_pylist():
                raise DataError("column", "x", "is unlucky")
            return table.append_column("y", pa.compute.multiply(table["x"], 2))

    class Output(BucketOutput):  # the cluster began without the variables
        def write_part(self, number: int, tables: Sequence[pa.Table]) -> Part | None:
            os.environ.update(bucket_environment)
            return super().write_part(number, tables)

    read = ray_batch._read_tables

    def read_with_environment(*arguments: Any) -> Iterator[pa.Table]:
        os.environ.update(bucket_environment)
        yield from read(*arguments)

    monkeypatch.setattr(ray_batch, "_read_tables", read_with_environment)
    monkeypatch.setattr(ray_batch, "PredictWorker", Doubled)
    for name, value in bucket_environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/predicted-{os.getpid()}")
    for number in range(3):
        pyarrow.parquet.write_table(pa.table({"x": [10 * number, 10 * number + 1]}), tmp_path / "file")
        store.write(f"in/{number}.parquet", tmp_path / "file")
    files = list_input_files(f"{store.url}/in")
    assert ray_batch.predict_files(None, files, Output(f"{store.url}/out"), 1) == 6  # type: ignore[arg-type]
    (tmp_path / "copy").mkdir()
    for name in [entry.key for entry in store.list_entries("out") if entry.key.endswith(".parquet")]:
        store.download(name, tmp_path / name.replace("out", "copy"))
    expected = [0, 1, 10, 11, 20, 21]
    assert pyarrow.parquet.read_table(tmp_path / "copy").to_pydict() == {"x": expected, "y": [2 * x for x in expected]}
    pyarrow.parquet.write_table(pa.table({"x": [13]}), tmp_path / "file")
    store.write("in/3.parquet", tmp_path / "file")
    with pytest.raises(RunError, match="is unlucky"):
        ray_batch.predict_files(None, list_input_files(f"{store.url}/in"), Output(f"{store.url}/none"), 1)  # type: ignore[arg-type]
    assert store.list_entries("none") == []
