"""Workers of a replica, on one host or several, read their parts of a version of several files, or in a bucket."""

from __future__ import annotations

import pickle
from pathlib import Path

import gang_models
import numpy as np
import pytest
from gang_models import OPTIONS, ThreadLauncher, predictor_of, register_parts, started

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from shoal.errors import WeightsError
from shoal.libs.gang.member import load_shard
from shoal.libs.gang.messages import LoadVersion
from shoal.libs.gang.plan import find_plan
from shoal.registry import ModelVersion
from shoal.serve.model.formats.template import TemplateConfig
from shoal.serve.spec.model_source import RegisteredModel
from shoal.weights import WeightFile

NUM_WORKERS = 3


@pytest.fixture
def single_file(
    bucket_environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> ModelVersion:
    monkeypatch.setenv("SHOAL_STORE", open_bucket(bucket_environment, monkeypatch).url)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "replica"))
    return gang_models.register("Transformer")


def send(version: ModelVersion) -> LoadVersion:
    """What a replica sends to its workers."""
    source = RegisteredModel(version.name, version.store.url)
    package = source.load_package(version.version)
    example = {"tokens": np.ones((2, gang_models.LENGTH), np.int64)}
    plan = find_plan(package.factory, example, "pipeline", NUM_WORKERS)
    config = TemplateConfig(package.factory, package.signature, OPTIONS, "cpu", 1)
    assert isinstance(package.snapshot, WeightFile)
    found: LoadVersion = pickle.loads(pickle.dumps(LoadVersion(1, config, plan, package.snapshot)))
    return found


def load_all(load: LoadVersion) -> None:
    for rank in range(NUM_WORKERS):
        load_shard(load.config, load.plan, load.file, rank, None)


def list_downloads(host: Path) -> set[str]:
    """The hashes of the files that a host has downloaded."""
    return {path.name for path in (host / "cache").glob("??/*") if path.is_file()}


def test_a_host_downloads_the_files_with_its_workers_tensors(
    single_file: ModelVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = register_parts(single_file, tmp_path / "run", monkeypatch)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "leader"))
    load = send(version)
    assert list_downloads(tmp_path / "leader") == set()
    downloads = []
    for rank in range(NUM_WORKERS):
        monkeypatch.setenv("SHOAL_HOME", str(tmp_path / str(rank)))
        load_shard(load.config, load.plan, load.file, rank, None)
        downloads.append(list_downloads(tmp_path / str(rank)) - {version.manifest.sha256})
    every = {part.sha256 for part in version.manifest.parts}
    assert set.union(*downloads) == every
    assert max(map(len, downloads)) <= len(every) // 2


def test_a_file_that_is_gone_or_damaged_is_named(
    single_file: ModelVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = register_parts(single_file, tmp_path / "run", monkeypatch)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "worker"))
    for version, file in ((single_file, "weights.safetensors"), (parts, parts.manifest.parts[0].file)):
        load, key = send(version), f"{version.name}/{version.version}/{file}"
        version.store.write(key, version.store.read(key)[:-1] + b"!")
        for problem in ("is damaged", "has no"):
            with pytest.raises(WeightsError, match=rf"{file} of {version.ref}.*{problem}.*register the model again"):
                load_all(load)
            version.store.delete([key])


def test_a_damaged_file_of_this_host_is_named_by_the_worker_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = register_parts(gang_models.register("Transformer"), tmp_path, monkeypatch)
    with started(ThreadLauncher(), 3) as gang:
        predictor = predictor_of(version, gang)
        damaged = version.weight_file().parts[1].path
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        with pytest.raises(WeightsError, match=f"{damaged.name} is damaged"):
            predictor.load(version.weight_file())  # no worker has the version
        damaged.unlink()
        with pytest.raises(WeightsError, match=f"there is no .*{damaged.name}; .*registry at the same path"):
            predictor.load(version.weight_file())
    with pytest.raises(WeightsError, match=rf"weights version {version.version} cannot be read.*{damaged.name}"):
        predictor_of(version, None).load(version.weight_file())
