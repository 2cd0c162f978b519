"""Training with $SHOAL_STORE: resumed where no file of the run is, and a store that is down meanwhile."""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bucket_server import Outage, bucket_environment, open_bucket  # noqa: F401 - a fixture
from failures import down
from shoal.checkpoint.stored import open_run_store
from shoal.errors import CheckpointError, StoreError
from shoal.store import Store
from shoal.testing.run import MemoryLog
from shoal.train.launch.finalize import fetch_weights
from shoal.weights import tensor_files
from shoal.weights.tensor_files import list_files, list_with_index, open_tensors
from training.toy_run import assert_same, spec_of, train_toy


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of the run `test`."""
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    found = open_run_store("test")
    assert found is not None
    return found


def spec(steps: int, **changes: Any) -> Any:
    return spec_of(**{"stop": {"steps": steps}, "checkpoint": {"every_steps": 3}, **changes})


def test_a_run_goes_on_where_no_file_of_it_is(tmp_path: Path, store: Store) -> None:
    whole = train_toy(tmp_path / "undisturbed", spec=spec(12))
    store.delete(entry.key for entry in store.list_entries())
    train_toy(tmp_path / "a", spec=spec(6))
    outcome = train_toy(tmp_path / "b", spec=spec(12))
    assert dict(outcome.log.events)["restored"]["step"] == 6
    assert min(outcome.losses) == 7 or 6 in outcome.losses
    assert_same(outcome.weights, whole.weights)
    assert outcome.result.weights is not None
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()
    fetch_weights(outcome.result, "test")  # the driver's host had no such file
    assert_same(outcome.weights, whole.weights)


def test_a_network_of_several_files_reaches_the_drivers_host(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_toy(tmp_path / "whole", spec=spec(3)).weights
    store.delete(entry.key for entry in store.list_entries())
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 64)
    outcome = train_toy(tmp_path / "a", spec=spec(3))
    assert outcome.result.weights == tmp_path / "a" / "model.safetensors.index.json"
    shutil.rmtree(tmp_path / "a")
    fetch_weights(outcome.result, "test")
    found = open_tensors(list_files(outcome.result.weights))
    assert len(list_files(outcome.result.weights)) > 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        path.name for path in list_with_index(outcome.result.weights)
    )
    assert_same(dict(found), whole)


def test_a_store_that_is_down_is_reported_once_and_ends_no_run(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_tries = type(store).write, 0

    def refuse(this: Store, key: str, content: bytes | Path) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 2 and "step-" in key:
            raise StoreError("the store is down")
        write(this, key, content)

    monkeypatch.setattr(type(store), "write", refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "spec.yaml").touch()  # the record is on this host
    run = train_toy(tmp_path / "a", spec=spec(30))
    assert run.result.steps == 30
    kinds = [kind for kind, _ in run.log.events if kind.startswith("upload")]
    assert kinds in ([], ["upload_failed", "upload_recovered"])  # [] if both were tried at the end
    assert "step-000000030" in store.list_folders()


def test_a_bucket_that_is_away_at_the_start_ends_no_run(
    tmp_path: Path,
    bucket_environment: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = open_bucket(bucket_environment | {"SHOAL_STORE_TIMEOUT_S": "30"}, monkeypatch)
    monkeypatch.setenv("SHOAL_STORE", bucket.url)
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    outage = Outage(bucket_environment)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: outage.end())
    monkeypatch.setattr("shoal.store.objects.time", clock)
    try:
        assert train_toy(tmp_path / "a", spec=spec(3)).result.steps == 3
    finally:
        outage.end()
    assert bucket.list_folders("runs/test/checkpoints") == ["step-000000003"]


def test_what_is_not_in_the_store_at_the_end_is_an_error_that_names_it(tmp_path: Path, store: Store) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "spec.yaml").touch()
    log = MemoryLog()
    problem = r"of step 6 are not in .*/store/runs/test/checkpoints, only in .*is down"
    with down(store), pytest.raises(CheckpointError, match=problem):
        train_toy(tmp_path / "a", spec=spec(6), log=log)
    assert (tmp_path / "a" / "model.safetensors").exists()
    assert [kind for kind, _ in log.events].count("upload_failed") == 1
    assert train_toy(tmp_path / "a", spec=spec(6)).result.steps == 6  # on the same host, when the store is back
    assert store.list_folders() == ["step-000000006"]


@pytest.mark.parametrize("where", ["", "home", "unwritable"])
def test_without_a_store_of_its_own_a_run_has_a_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_STORE", {"": "", "home": str(tmp_path / "home")}.get(where, str(tmp_path / "file")))
    if where == "unwritable":
        with pytest.raises(CheckpointError, match=r"the store .*/file cannot be used .*: correct SHOAL_STORE"):
            open_run_store("r")
    else:
        assert open_run_store("r") is None
