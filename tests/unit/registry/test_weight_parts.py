"""Weights of several files are one version: whole, named where they are damaged, and held by no process."""

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from python_program import run_python
from shoal.errors import ConfigError, RegistryError, WeightsError
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.registry import registry as registry_module
from shoal.train.initial_weights import load_initial_weights, read_state_dict
from shoal.weights import tensor_files
from shoal.weights.tensor_files import TensorFiles, make_weight_file, open_tensors, read_tensors, write_tensors

MODEL = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 4})
NOTHING = Signature(inputs=[], outputs=[])
PARTS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def make_tensors(value: float) -> dict[str, Tensor]:
    return {name: torch.full((4,), value) for name in "abc"}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    types = {name: (each.dtype, each.shape) for name, each in tensors.items()}
    return write_tensors(folder / "model.safetensors", types, tensors.items())


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 16)


@pytest.fixture(params=["folder", "bucket"])
def registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Registry:
    if request.param == "folder":
        return Registry()
    return Registry(f"{open_bucket(request.getfixturevalue('bucket_environment'), monkeypatch).url}/registry")


@pytest.fixture
def register(registry: Registry, tmp_path: Path) -> Callable[[float], ModelVersion]:
    def register(value: float) -> ModelVersion:
        file = make_weight_file(3, write(tmp_path / "run", make_tensors(value)))
        return registry.register("large", file, model=MODEL, signature=NOTHING)

    return register


def test_a_version_of_parts_comes_back(registry: Registry, register: Callable[[float], ModelVersion]) -> None:
    made = register(1.0)
    manifest = made.manifest
    assert (manifest.format, manifest.weights_version) == (2, 3)
    assert [each.file for each in manifest.parts] == PARTS
    assert manifest.size_bytes == sum(each.size_bytes for each in manifest.parts) > 48
    keys = [entry.key for entry in registry.store.list_entries("large/1")]
    assert keys == sorted(f"large/1/{name}" for name in ["claim.json", "manifest.json", INDEX, *PARTS])
    index = json.loads(registry.store.read(f"large/1/{INDEX}"))
    assert index["weight_map"] == dict(zip("abc", PARTS, strict=True))
    file = Registry(registry.location).get("large").weight_file()
    assert file.shapes() == {name: [4] for name in "abc"}
    assert file.size_bytes == manifest.size_bytes
    for found in (read_tensors(file), read_tensors(made.snapshot()), open_tensors(list(map(file.find, file.parts)))):
        assert {name: each.tolist() for name, each in found.items()} == {name: [1.0] * 4 for name in "abc"}
    with pytest.raises(WeightsError, match="weights version 1 are 3 files, and this takes a model of one"):
        _ = file.payload
    copied = registry.register("copy", file, model=MODEL, signature=NOTHING)  # of another version's files
    assert [each.file for each in copied.manifest.parts] == PARTS
    assert read_tensors(registry.get("copy").weight_file())["c"].tolist() == [1.0] * 4
    registry.remove("large")
    assert [entry.key for entry in registry.store.list_entries("large")] == ["large/1/claim.json", "large/aliases.json"]


@pytest.mark.parametrize("registry", ["folder"], indirect=True)
def test_an_older_release_says_that_it_is_older_and_reads_what_has_one_file(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[[float], ModelVersion]
) -> None:
    register(1.0)
    one = make_weight_file(1, write(tmp_path / "run", {"a": torch.ones(4)}))
    made = registry.register("small", one, model=MODEL, signature=NOTHING)
    described = json.loads(registry.store.read("small/1/manifest.json"))
    assert described["format"] == 1
    assert "parts" not in described
    assert made.snapshot().payload == one.payload
    monkeypatch.setattr(registry_module, "MANIFEST_FORMAT", 1)
    assert Registry().get("small").manifest == made.manifest
    with pytest.raises(RegistryError, match=r"was written by a newer Shoal \(format 2; this one reads 1\): upgrade"):
        Registry().get("large")


@pytest.mark.parametrize("damage", ["flip", "remove"])
@pytest.mark.parametrize("file", [PARTS[1], INDEX])
def test_a_damaged_or_missing_file_is_named(
    registry: Registry, register: Callable[[float], ModelVersion], damage: str, file: str
) -> None:
    found = register(1.0)
    if damage == "remove":
        registry.store.delete([f"large/1/{file}"])
    else:
        registry.store.write(f"large/1/{file}", registry.store.read(f"large/1/{file}")[:-1] + b"!")
    with pytest.raises(WeightsError, match=rf"{file}.*register the model again"):
        found.snapshot()
    if file != INDEX:  # which no tensor depends on
        with pytest.raises(WeightsError, match=file):
            read_tensors(found.weight_file())


@pytest.mark.parametrize("registry", ["folder"], indirect=True)
def test_a_run_begins_with_parts_tensor_by_tensor(register: Callable[[float], ModelVersion], tmp_path: Path) -> None:
    register(2.0)
    for state in (read_state_dict("large@1"), read_state_dict(str(tmp_path / "run" / INDEX))):
        assert isinstance(state, TensorFiles)
        assert state.keys() == set("abc")
    network = nn.ParameterDict({name: torch.zeros(4) for name in "abc"})
    load_initial_weights(network, "large")
    assert {name: each.tolist() for name, each in network.items()} == {name: [2.0] * 4 for name in "abc"}
    with pytest.raises(ConfigError, match=r"b is \[4\], and \[5\] in the network"):
        load_initial_weights(nn.ParameterDict({name: torch.zeros(4 + (name == "b")) for name in "abc"}), "large")


KILLED_WRITER = """
import os, pickle, signal, sys
from shoal.registry import ModelFactory, Registry, Signature
location, file = sys.argv[1:]
registry = Registry(location)
real = registry.store.write
def killed(key, content):
    if key.endswith(file):
        os.kill(os.getpid(), signal.SIGKILL)
    real(key, content)
registry.store.write = killed
registry.register("large", pickle.load(sys.stdin.buffer), model=ModelFactory(factory="a:b"),
                  signature=Signature(inputs=[], outputs=[]))
"""


@pytest.mark.parametrize("registry", ["folder"], indirect=True)
def test_a_writer_killed_between_two_parts_leaves_the_version_before(
    registry: Registry, tmp_path: Path, register: Callable[[float], ModelVersion]
) -> None:
    register(1.0)
    file = make_weight_file(1, write(tmp_path / "other", make_tensors(2.0)))
    command = [sys.executable, "-c", KILLED_WRITER, registry.location, PARTS[1]]
    done = subprocess.run(command, input=pickle.dumps(file), capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [found.ref for found in registry.list()] == ["large@1"]
    assert read_tensors(registry.get("large@champion").weight_file())["a"].tolist() == [1.0] * 4
    assert register(3.0).version == 3
    registry._delete_versions("large", [2])
    assert [entry.key for entry in registry.store.list_entries("large/2")] == ["large/2/claim.json"]


MEASURED = """
import json, os, resource, sys
from pathlib import Path
import torch
from shoal.registry import ModelFactory, Registry, Signature
from shoal.weights import tensor_files
from shoal.weights.tensor_files import make_weight_file, open_tensors, write_tensors
folder, each_bytes, num_tensors = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tensor_files.MAX_FILE_BYTES = 3 * each_bytes
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
names = [f"w{number}" for number in range(num_tensors)]
registry, grown = Registry(folder / "registry"), {}
began = peak()
types = {name: (torch.uint8, torch.Size([each_bytes])) for name in names}
def come(): return ((name, torch.ones(each_bytes, dtype=torch.uint8)) for name in names)
path = write_tensors(folder / "model.safetensors", types, come())
grown["write"] = peak() - began
registry.register("large", make_weight_file(1, path), model=ModelFactory(factory="a:b"),
                  signature=Signature(inputs=[], outputs=[]))
grown["register"] = peak() - began
file = registry.get("large").weight_file()
file.verify()
tensors = open_tensors([each.path for each in file.parts])
assert sum(int(tensors[name].sum()) for name in names) == each_bytes * num_tensors
grown["read"] = peak() - began
print(json.dumps(grown))
"""


def test_no_process_holds_a_version_whole(tmp_path: Path) -> None:
    """Written, registered and read: 96 MiB of sixteen tensors, of which one or two are in memory."""
    each_bytes, num_tensors = 6 << 20, 16
    grown = json.loads(run_python(MEASURED, str(tmp_path), str(each_bytes), str(num_tensors)))
    assert max(grown.values()) < each_bytes * num_tensors / 2, grown
