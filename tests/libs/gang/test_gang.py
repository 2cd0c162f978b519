"""A model on several workers, without Ray: its answers, its memory, versions on all or none, and workers that die."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

import collections
import itertools
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import deliver_challenge
from pathlib import Path
from typing import Any

import gang_models
import numpy as np
import pytest
from gang_models import (
    LENGTH,
    OPTIONS,
    VOCABULARY,
    ProcessLauncher,
    ThreadLauncher,
    predictor_of,
    register_parts,
    started,
)

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from shoal.channel.connection import Channel
from shoal.errors import ConfigError, PlanError, WeightsError
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.member import load_shard
from shoal.libs.gang.messages import LoadVersion
from shoal.libs.gang.plan import build_model, find_plan
from shoal.libs.gang.team import GangLost
from shoal.registry import ModelFactory, ModelVersion, Registry
from shoal.serve.controller.config import build_controller_config
from shoal.serve.model.formats.template import TemplateConfig
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.on_ray.options import deployment_options
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel, RegisteredModel, model_from_ref
from shoal.weights import WeightFile, WeightSnapshot, WeightStore
from waiting import STATE_S, wait_for


def make_requests(model: str, num_rows: int = 16) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    if model == "Transformer":
        return [{"tokens": generator.integers(1, VOCABULARY, (1, LENGTH))} for _ in range(num_rows)]
    return [{"x": generator.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(num_rows)]


def assert_same(found: LoadedModel, expected: LoadedModel, model: str) -> None:
    requests = make_requests(model)
    for one, other in zip(found.predict_batch(requests), expected.predict_batch(requests), strict=True):
        for name, array in other.items():
            np.testing.assert_allclose(one[name], array, rtol=1e-4, atol=1e-5)


CASES = [
    ("Transformer", ThreadLauncher, 3, "pipeline"),
    ("ConvNet", ThreadLauncher, 2, "pipeline"),
    ("Transformer", ProcessLauncher, 2, "tensor"),
    pytest.param("ConvNet", ProcessLauncher, 2, "tensor", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("model", "launcher", "size", "split"), CASES)
def test_answers_are_those_of_one_process(
    model: str, launcher: Callable[[], Any], size: int, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = gang_models.register(model)
    expected = predictor_of(version, None).load(version.snapshot())
    if (model, split) == ("Transformer", "tensor"):  # of several files, from which workers read slices
        version = gang_models.register_parts(version, tmp_path, monkeypatch)
    with started(launcher(), size, split) as gang:
        assert_same(predictor_of(version, gang).load(version.weight_file()), expected, model)


def test_a_version_is_loaded_flipped_and_dropped_on_all_workers() -> None:
    first, second = gang_models.register("ConvNet"), gang_models.register("ConvNet", seed=1)
    launcher = ThreadLauncher()
    with started(launcher) as gang:
        predictor = predictor_of(first, gang)
        one, two = predictor.load(first.weight_file()), predictor.load(second.weight_file())
        assert_same(one, predictor_of(first, None).load(first.snapshot()), "ConvNet")
        assert_same(two, predictor_of(first, None).load(second.snapshot()), "ConvNet")
        assert [len(member._versions) for member in launcher.members] == [2, 2]
        del one
        wait_for(lambda: [len(member._versions) for member in launcher.members] == [1, 1])
        assert_same(two, predictor_of(first, None).load(second.snapshot()), "ConvNet")


def test_a_worker_that_admits_its_replica_late_does_not_take_another_worker_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prove, launcher, delays = Channel.prove, ThreadLauncher(), [0.3]

    def prove_late(self: Channel, secret: bytes, *challenges: Any) -> None:
        prove(self, secret, *challenges)
        if challenges[0] is deliver_challenge and secret == launcher.members[1].address.secret and delays:
            threading.Event().wait(delays.pop())  # at the worker's end of its first connection

    monkeypatch.setattr(Channel, "prove", prove_late)
    with closing(Gang(launcher, 2, "pipeline")) as gang, ThreadPoolExecutor(1) as pool:
        pool.submit(gang.start).result(STATE_S)


def test_two_batches_are_computed_at_once() -> None:
    version, requests = gang_models.register("ConvNet"), make_requests("ConvNet", 64)
    expected = predictor_of(version, None).load(version.snapshot())
    with started(ThreadLauncher()) as gang, ThreadPoolExecutor(gang.batches_in_flight) as pool:
        loaded = predictor_of(version, gang).load(version.weight_file())
        batches = [requests[begin : begin + 4] for begin in range(0, 64, 4)]
        for found, batch in zip(pool.map(loaded.predict_batch, batches), batches, strict=True):
            for one, other in zip(found, expected.predict_batch(batch), strict=True):
                np.testing.assert_allclose(one["y"], other["y"], rtol=1e-4, atol=1e-5)


def test_a_damaged_version_is_loaded_by_none() -> None:
    version, launcher = gang_models.register("ConvNet"), ThreadLauncher()
    with started(launcher) as gang:
        predictor, file = predictor_of(version, gang), version.weight_file()
        good = predictor.load(file)
        file.path.write_bytes(file.payload[:-1] + b"?")
        with pytest.raises(WeightsError, match="checksum"):
            predictor.load(file)
        wait_for(lambda: [len(member._versions) for member in launcher.members] == [1, 1])
        assert len(good.predict_batch(make_requests("ConvNet"))) == 16


def test_a_stage_has_the_weights_of_its_layers_alone() -> None:
    version, launcher = gang_models.register("Transformer"), ThreadLauncher()
    with started(launcher, 3) as gang:
        loaded = predictor_of(version, gang).load(version.weight_file())
        stages = [next(iter(member._versions.values()))[1].model for member in launcher.members]
        sizes = [sum(each.untyped_storage().nbytes() for each in stage.parameters()) for stage in stages]
        full = sum(each.numel() * 4 for each in build_model(version.manifest.model).parameters())
        assert max(sizes) < 0.6 * full
        assert loaded.version == 1


def test_a_dead_worker_fails_what_is_computed_and_all_are_replaced() -> None:
    version, launcher = gang_models.register("ConvNet"), ProcessLauncher()
    expected = predictor_of(version, None).load(version.snapshot())
    with started(launcher) as gang:
        loaded = predictor_of(version, gang).load(version.weight_file())
        os.kill(launcher.processes[1].pid, signal.SIGKILL)
        with pytest.raises(GangLost) as lost:
            collections.deque(map(loaded.predict_batch, itertools.repeat(make_requests("ConvNet"))), maxlen=0)
        assert (lost.value.status, lost.value.retry_after_s) == (503, 1.0)

        def answers() -> bool:
            with suppress(GangLost):
                assert_same(loaded, expected, "ConvNet")
                return True
            return False

        wait_for(answers)
        gang.check_health()


def test_spare_workers_take_the_place_of_lost_ones() -> None:
    version = gang_models.register("ConvNet")
    first = ProcessLauncher()
    second = ProcessLauncher()
    expected = predictor_of(version, None).load(version.snapshot())
    with closing(Gang(first, 2, "pipeline", second)) as gang:
        gang.start()
        loaded = predictor_of(version, gang).load(version.weight_file())
        for spares, workers in ((second, first), (first, second)):
            wait_for(lambda: gang._waiting)
            waiting = [each.pid for each in spares.processes]
            os.kill(workers.processes[1].pid, signal.SIGKILL)
            wait_for(lambda workers=workers: gang._launcher is not workers and gang._team)
            assert_same(loaded, expected, "ConvNet")
            assert [each.pid for each in spares.processes] == waiting
        wait_for(lambda: gang._waiting)  # a spare may die as well
        for launcher in (second, first):
            os.kill(launcher.processes[0].pid, signal.SIGKILL)
        with pytest.raises(GangLost):
            collections.deque(map(loaded.predict_batch, itertools.repeat(make_requests("ConvNet"))), maxlen=0)
        wait_for(lambda: gang._team)
        assert_same(loaded, expected, "ConvNet")
    assert not first.processes
    assert not second.processes


def test_the_replicas_end_is_the_workers() -> None:
    launcher = ProcessLauncher()
    gang = Gang(launcher, 2, "pipeline")
    gang.start()
    processes = list(launcher.processes)
    assert gang._team is not None
    launcher.stop = lambda: None  # type: ignore[method-assign]  # as if the replica had been killed
    gang.close()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0


def test_a_worker_that_hangs_ends_with_its_replica() -> None:
    version, launcher = gang_models.register("ConvNet"), ProcessLauncher()
    with started(launcher) as gang, ThreadPoolExecutor(1) as pool:
        loaded, processes = predictor_of(version, gang).load(version.weight_file()), list(launcher.processes)
        os.kill(processes[0].pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(processes[0].pid))
        hanging = pool.submit(loaded.predict_batch, make_requests("ConvNet"))
        gang.close()
        with pytest.raises(GangLost):
            hanging.result(60.0)
    assert processes[0].exitcode == -signal.SIGKILL


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped: on a busy machine some go on after the signal."""
    return all(
        each.read_text().rpartition(")")[2].split()[0] == "T" for each in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def test_more_stages_than_layers_are_named() -> None:
    version = gang_models.register("ConvNet")
    with closing(Gang(ThreadLauncher(), 9, "pipeline")) as gang, pytest.raises(PlanError, match="9 stages"):
        predictor_of(version, gang)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_workers": 2, "num_gpus": 1}, "num_gpus"),
        ({"num_workers": 2, "model": {"device": "cuda"}}, "device: cuda"),
        ({"num_workers": 2, "memory": "1GiB"}, "leave out memory"),
        ({"num_workers": 2, "num_cpus": 0}, "num_cpus is above 0"),
        ({"num_workers": 2, "models": {"m": {"precision": "int8"}}}, "models.m.precision"),
        ({"num_workers": 2, "model": {"compile": True}}, "model.compile"),
        ({"num_workers": 2, "parallel": "fsdp"}, "parallel"),
    ],
)
def test_what_workers_cannot_share_is_rejected(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EndpointSpec.parse({"name": "m", **values})


def test_workers_reserve_bundles_and_the_replica_nothing() -> None:
    options = deployment_options(EndpointSpec(name="m", num_workers=3, num_cpus=2.0))
    assert options["placement_group_bundles"] == [{"CPU": 2.0}] * 3
    assert options["ray_actor_options"] == {"num_cpus": 0.0}
    assert "placement_group_bundles" not in deployment_options(EndpointSpec(name="m"))


def test_models_that_cannot_be_split_are_rejected_before_a_replica_starts() -> None:
    spec, signature = EndpointSpec(name="m", num_workers=2), gang_models.SIGNATURES["ConvNet"]
    live = LiveModel(ModelFactory(factory="gang_models:ConvNet"), signature, WeightStore())
    with pytest.raises(ConfigError, match="'live' follows a run"):
        build_controller_config(spec, [EndpointModel("live", live)])
    Registry().register(
        "file", WeightSnapshot.from_payload(1, b"file"), model=ModelFactory(format="onnx"), signature=signature
    )
    with pytest.raises(ConfigError, match="'file' is of format onnx"):
        build_controller_config(spec, [model_from_ref("file@champion")])


# -- workers of a replica, on one host or several, read their parts of a version of several files, or in a bucket

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
