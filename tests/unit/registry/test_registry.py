"""Versions are whole, distinct and immutable, and an alias can always go back; in a folder and in a bucket."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest

from bucket_server import BUCKET, ENVIRONMENT, bucket_environment, open_kind  # noqa: F401 - a fixture
from registered import tensors
from shoal.errors import ConfigError, RegistryError, WeightsError
from shoal.home import file_lock
from shoal.registry import Criterion, ModelFactory, ModelVersion, Registry, Signature, TensorSignature, verification
from shoal.serve.spec.model_source import RegistryCatalogue
from shoal.store import folder as folder_module
from shoal.weights import WeightFile, WeightSnapshot
from shoal.weights.tensor_files import read_tensors

MODEL = ModelFactory(factory="collections:Counter", kwargs={"a": 2})
SIGNATURE = Signature(
    inputs=tensors(observation=[-1, 4]),
    outputs=tensors(logits=[-1, 2]),
)
DEADLINE_S = 10.0


def snapshot_of(value: float, version: int = 7) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"layer.weight": np.full((4, 2), value, np.float32)})


def register(registry: Registry, value: float, **fields: object) -> ModelVersion:
    return registry.register("cartpole", snapshot_of(value), model=MODEL, signature=SIGNATURE, **fields)  # type: ignore[arg-type]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.fixture(params=["folder", "bucket"])
def any_registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(open_kind(request, tmp_path, monkeypatch).url)


def list_keys(registry: Registry) -> list[str]:
    return [entry.key for entry in registry.store.list_entries()]


def test_what_is_registered_comes_back(any_registry: Registry) -> None:
    made = register(any_registry, 1.5, run_id="run-1", metrics={"return": 480.0, "loss": math.nan})
    found = Registry(any_registry.location).get("cartpole")
    assert (found.name, found.version, found.ref, found.aliases) == ("cartpole", 1, "cartpole@1", ("champion",))
    assert found.location == made.location
    assert found.manifest.run_id == "run-1"
    assert found.manifest.weights_version == 7
    assert found.manifest.metrics["return"] == 480.0
    assert math.isnan(found.manifest.metrics["loss"])
    assert found.manifest.model.build() == {"a": 2}
    assert found.manifest.signature == SIGNATURE
    weights = found.snapshot()
    assert weights.version == 1
    np.testing.assert_array_equal(weights.tensors()["layer.weight"], np.full((4, 2), 1.5, np.float32))


def test_the_manifest_on_disk_is_strict_json(registry: Registry) -> None:
    made = register(registry, 1.0, metrics={"loss": math.nan, "worst": -math.inf})
    json.loads((Path(made.location) / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_references_mean_a_number_an_alias_or_the_newest(any_registry: Registry) -> None:
    register(any_registry, 1.0)
    register(any_registry, 2.0, aliases=("candidate",))
    versions = {
        ref: any_registry.get(ref).version
        for ref in ("cartpole", "cartpole@latest", "cartpole@1", "cartpole@champion", "cartpole@candidate")
    }
    assert list(versions.values()) == [2, 2, 1, 1, 2]
    assert any_registry.has("cartpole@1")
    assert not any_registry.has("cartpole@3")
    assert not any_registry.has("nothing")


@pytest.mark.parametrize(
    ("ref", "says"),
    [("cartpol", "did you mean 'cartpole'"), ("cartpole@9", "versions 1 to 1"), ("cartpole@champignon", "champion")],
)
def test_an_unknown_reference_says_what_there_is(registry: Registry, ref: str, says: str) -> None:
    register(registry, 1.0)
    with pytest.raises(RegistryError, match=says):
        registry.get(ref)


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", ".hidden", "Ünicode", "a b", "x" * 200])
def test_a_name_cannot_leave_its_folder(registry: Registry, name: str) -> None:
    with pytest.raises(ConfigError):
        registry.register(name, snapshot_of(1), model=MODEL, signature=SIGNATURE)
    with pytest.raises(ConfigError):
        registry.get(f"{name}@1")
    assert list(Path(registry.location).iterdir()) == []


def test_names_may_have_capitals_but_not_differ_in_them_alone(any_registry: Registry) -> None:
    name = "Qwen2.5-0.5B_Instruct"
    any_registry.register(name, snapshot_of(1), model=MODEL, signature=SIGNATURE)
    assert any_registry.get(f"{name}@champion").ref == f"{name}@1"
    assert [each.name for each in any_registry.list()] == [name]
    for other in (name.lower(), name.upper()):
        with pytest.raises(ConfigError, match=rf"name = '{other}': differs from the model '{name}' in capitals alone"):
            any_registry.register(other, snapshot_of(1), model=MODEL, signature=SIGNATURE)
        with pytest.raises(RegistryError, match=rf"no model '{other}': did you mean '{name}'\?"):
            any_registry.get(other)
    assert any_registry.register(name, snapshot_of(2), model=MODEL, signature=SIGNATURE).version == 2
    assert any_registry.store.list_folders() == [name]


@pytest.mark.parametrize("alias", ["7", "latest", "../x", "", "Champion"])
def test_an_alias_cannot_be_mistaken_for_a_version(registry: Registry, alias: str) -> None:
    with pytest.raises(ConfigError, match="alias"):
        register(registry, 1.0, aliases=(alias,))
    assert registry.list() == ()


def test_list_gives_every_version_of_every_model(any_registry: Registry) -> None:
    assert any_registry.list() == ()
    register(any_registry, 1.0)
    any_registry.register("acrobot", snapshot_of(0), model=MODEL, signature=SIGNATURE)
    register(any_registry, 2.0)
    assert [found.ref for found in any_registry.list()] == ["acrobot@1", "cartpole@1", "cartpole@2"]
    assert [found.aliases for found in any_registry.list("cartpole")] == [(), ("champion",)]
    with pytest.raises(RegistryError):
        any_registry.list("pendulum")


def test_rollback_goes_back_one_promotion_at_a_time_and_keeps_the_history(any_registry: Registry) -> None:
    for value in (1.0, 2.0, 3.0):
        register(any_registry, value)
    any_registry.promote("cartpole@3")  # it is already: not a move
    assert any_registry.rollback("cartpole").version == 2
    assert any_registry.rollback("cartpole").version == 1
    with pytest.raises(RegistryError, match=r"no version to go back to.*shoal models promote cartpole@N"):
        any_registry.rollback("cartpole")
    assert any_registry.promote("cartpole@3").aliases == ("champion",)
    assert any_registry.rollback("cartpole").version == 1
    moves = [(move.kind, move.version) for move in any_registry.aliases("cartpole").moves["champion"]]
    assert moves == [
        *(("promote", 1), ("promote", 2), ("promote", 3), ("rollback", 2), ("rollback", 1)),
        *(("promote", 3), ("rollback", 1)),
    ]
    with pytest.raises(RegistryError, match="never promoted"):
        any_registry.rollback("cartpole", alias="candidate")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_weights_are_refused(registry: Registry, damage: str) -> None:
    path = register(registry, 1.0).weight_file().path
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(payload if damage == "flip" else payload[:-8])
    with pytest.raises(WeightsError, match=r"cartpole@1.*register the model again"):
        registry.get("cartpole@1").snapshot()
    with pytest.raises(WeightsError, match="No such file" if damage == "remove" else "checksum.*register the model"):
        read_tensors(registry.get("cartpole@1").weight_file())


@pytest.mark.parametrize("model", [MODEL, ModelFactory(format="onnx")], ids=["module", "onnx"])
def test_a_damaged_snapshot_is_never_registered(registry: Registry, model: ModelFactory) -> None:
    good = snapshot_of(1.0)
    with pytest.raises(WeightsError):
        registry.register(
            "cartpole", WeightSnapshot(1, good.payload[:-1], good.sha256, 0.0), model=model, signature=SIGNATURE
        )
    assert registry.list() == ()


def test_a_damaged_manifest_is_a_registry_error(registry: Registry) -> None:
    path = Path(register(registry, 1.0).location) / "manifest.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RegistryError, match=r"manifest\.json"):
        Registry(registry.location).get("cartpole")


@pytest.mark.parametrize("aliases", [("champion",), ()])
def test_the_number_of_a_removed_version_is_not_given_again(registry: Registry, aliases: tuple[str, ...]) -> None:
    for value in (1.0, 2.0, 3.0):
        made = register(registry, value, aliases=aliases)
    shutil.rmtree(made.location)
    assert register(registry, 4.0, aliases=()).version == 4
    registry.promote("cartpole@1")
    assert register(registry, 5.0).version == 5


def test_aliases_that_somebody_has_edited_into_nonsense_are_a_registry_error(registry: Registry) -> None:
    path = Path(register(registry, 1.0).location).parent / "aliases.json"
    path.write_text('{"moves": {"champion": [{"version": 1, "time": 0.0, "kind": "rollback"}]}, "newest": 1}')
    for ask in (lambda: registry.get("cartpole@champion"), registry.list, lambda: register(registry, 2.0)):
        with pytest.raises(RegistryError, match=r"aliases.json cannot be read .*champion is rolled back, with nothing"):
            ask()


def test_an_alias_whose_version_was_removed_is_named(registry: Registry) -> None:
    for value in (1.0, 2.0):
        made = register(registry, value)
    shutil.rmtree(made.location)
    assert not registry.has("cartpole@champion")
    with pytest.raises(RegistryError, match=r"cartpole@champion means version 2, which was removed: `shoal models"):
        registry.get("cartpole@champion")


REGISTER_MANY = """
import sys
from pathlib import Path
import numpy as np
from shoal.registry import ModelFactory, Registry, Signature
from shoal.weights import WeightSnapshot
root, value, num_versions = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(num_versions)):
    weights = WeightSnapshot.of(1, {"w": np.array([float(value)])})
    model, signature = ModelFactory(factory="a:b"), Signature(inputs=[], outputs=[])
    Registry(root).register("cartpole", weights, run_id=value, aliases=["champion"], model=model, signature=signature)
"""


def test_processes_that_register_at_once_get_distinct_versions(registry: Registry) -> None:
    num_processes, num_versions = 3, 8
    arguments = [[registry.location, str(value), str(num_versions)] for value in range(num_processes)]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", REGISTER_MANY, *each], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for each in arguments
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=DEADLINE_S)
    assert [writer.returncode for writer in writers] == [0] * num_processes
    found = registry.list("cartpole")
    assert [each.version for each in found] == list(range(1, num_processes * num_versions + 1))
    for each in found:  # nobody's manifest lies beside another's weights
        assert each.snapshot().tensors()["w"][0] == float(each.manifest.run_id or "nan")
    assert len(registry.aliases("cartpole").list_promoted("champion")) == num_processes * num_versions


KILLED_WRITER = """
import os, signal, sys
import numpy as np
from shoal.registry import ModelFactory, Registry, Signature
from shoal.weights import WeightSnapshot
location, method, file = sys.argv[1:]
registry = Registry(location)
real = getattr(registry.store, method)
def killed(key, payload, *rest):
    if key.endswith(file):
        os.kill(os.getpid(), signal.SIGKILL)
    real(key, payload, *rest)
setattr(registry.store, method, killed)
registry.register("cartpole", WeightSnapshot.of(1, {"w": np.zeros(3)}), model=ModelFactory(factory="a:b"),
                  signature=Signature(inputs=[], outputs=[]))
"""


@pytest.mark.parametrize(
    ("any_registry", "method", "file"),
    [
        ("folder", "write", "weights.safetensors"),
        ("folder", "create", "manifest.json"),
        ("folder", "replace", "aliases.json"),
        ("bucket", "create", "manifest.json"),
    ],
    indirect=["any_registry"],
)
def test_a_writer_killed_between_two_objects_leaves_no_version_or_all_of_it(
    any_registry: Registry, method: str, file: str
) -> None:
    register(any_registry, 1.0)
    command = [sys.executable, "-c", KILLED_WRITER, any_registry.location, method, file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    is_whole = file == "aliases.json"
    assert [found.ref for found in any_registry.list()] == ["cartpole@1", "cartpole@2"][: 1 + is_whole]
    assert any_registry.get("cartpole@champion").snapshot().tensors()["layer.weight"][0, 0] == 1.0
    assert register(any_registry, 2.0).version == 3  # its number is not used again


def test_leftovers_are_removed_once_they_are_a_day_old(registry: Registry, tmp_path: Path) -> None:
    register(registry, 1.0)
    register(registry, 2.0)
    manifest = tmp_path / "cartpole/2/manifest.json"
    manifest.unlink()  # a registration that was killed
    (tmp_path / "cartpole/2/.weights.safetensors-0123456789abcdef").write_bytes(b"draft")
    registry.remove_leftovers()
    assert "cartpole/2/weights.safetensors" in list_keys(registry)
    long_ago_s = time.time() - 2 * 24 * 3600
    for path in [*(tmp_path / "cartpole/2").iterdir()]:
        os.utime(path, (long_ago_s, long_ago_s))
    registry.remove_leftovers()
    assert list_keys(registry) == [
        *("cartpole/1/claim.json", "cartpole/1/manifest.json", "cartpole/1/weights.safetensors"),
        *("cartpole/2/claim.json", "cartpole/aliases.json"),
    ]
    assert not list(tmp_path.rglob(".weights*"))
    assert register(registry, 3.0).version == 3


def refuse(registry: Registry, patch: pytest.MonkeyPatch, method: str, file: str, error: BaseException) -> None:
    """Make the store's method raise for objects of this name."""
    real = getattr(registry.store, method)

    def refusing(key: str, *arguments: Any) -> None:
        if key.endswith(file):
            raise error
        real(key, *arguments)

    patch.setattr(registry.store, method, refusing)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_a_registration_at_its_aliases_leaves_neither_them_nor_a_version(
    any_registry: Registry, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    register(any_registry, 1.0)
    with monkeypatch.context() as patch:
        refuse(any_registry, patch, "replace", "aliases.json", error)
        with pytest.raises((RegistryError, KeyboardInterrupt), match=r"^$|No space left"):
            register(any_registry, 2.0, aliases=("champion", "candidate"))
    assert [found.ref for found in any_registry.list()] == ["cartpole@1"]
    assert any_registry.get("cartpole").aliases == ("champion",)
    made = register(any_registry, 3.0, aliases=("champion", "candidate"))
    assert (made.version, made.aliases) == (3, ("candidate", "champion"))


def test_no_alias_is_left_without_its_version_by_a_disk_that_fails_at_the_last_moment(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        if (folder / "aliases.json").exists():
            raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "sync_folder", fails)  # the aliases are there already
        with pytest.raises(RegistryError, match="Input/output error"):
            register(registry, 1.0)
    assert registry.get("cartpole@champion").snapshot().tensors()["layer.weight"][0, 0] == 1.0


@pytest.mark.parametrize("full", ["weights.safetensors", "manifest.json", "aliases.json"])
def test_a_full_disk_gets_its_space_back(registry: Registry, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    register(registry, 1.0)
    before = list_keys(registry)
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if full in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(RegistryError, match="No space left"):
            register(registry, 2.0)
    assert set(list_keys(registry)) - set(before) <= {"cartpole/2/claim.json"}
    assert not [path for path in Path(registry.location).rglob(".*") if path.name != ".lock"]


def test_all_aliases_of_a_new_version_move_at_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    real = registry.store.replace

    def watched(key: str, payload: bytes, tag: str) -> None:
        real(key, payload, tag)
        seen.append(registry.get("cartpole@2").aliases)

    register(registry, 1.0, aliases=("champion", "candidate"))
    monkeypatch.setattr(registry.store, "replace", watched)
    register(registry, 2.0, aliases=("champion", "candidate"))
    assert seen == [("candidate", "champion")]


def test_a_rollback_never_goes_to_the_version_that_is_there(registry: Registry) -> None:
    for value in (1.0, 2.0):
        register(registry, value)
    registry.promote("cartpole@1")
    with pytest.raises(RegistryError, match="no version to go back to"):
        registry.rollback("cartpole", without=[2])
    registry.promote("cartpole@2")
    assert registry.rollback("cartpole").version == 1
    with pytest.raises(RegistryError, match="no version to go back to"):
        registry.rollback("cartpole")
    with pytest.raises(RegistryError, match="no version to go back to"):
        RegistryCatalogue(str(registry.location)).find_previous("cartpole", "champion", ())


def test_rollback_to_a_version_that_was_removed_moves_nothing(registry: Registry) -> None:
    made = [register(registry, value) for value in (1.0, 2.0, 3.0)]
    shutil.rmtree(made[1].location)
    with pytest.raises(RegistryError, match=r"cartpole@champion meant version 2 before, which was removed: .*promote"):
        registry.rollback("cartpole")
    assert registry.get("cartpole@champion").version == 3


def test_an_alias_moves_while_a_large_version_is_written(
    any_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1.0, 2.0):
        register(any_registry, value)
    writes, goes_on = threading.Event(), threading.Event()
    real = any_registry.store.write

    def slow_write(key: str, payload: bytes | Path) -> None:
        writes.set()
        assert goes_on.wait(DEADLINE_S)
        real(key, payload)

    monkeypatch.setattr(any_registry.store, "write", slow_write)
    writer = threading.Thread(target=register, args=(any_registry, 3.0), kwargs={"aliases": ["candidate"]})
    writer.start()
    try:
        assert writes.wait(DEADLINE_S)
        assert any_registry.promote("cartpole@1").aliases == ("champion",)
        assert any_registry.rollback("cartpole").version == 2
        assert [found.version for found in any_registry.list("cartpole")] == [1, 2]
    finally:
        goes_on.set()
        writer.join(DEADLINE_S)
    assert any_registry.get("cartpole@candidate").version == 3
    assert any_registry.aliases("cartpole").list_promoted("champion") == [2]  # 1 is withdrawn


@pytest.mark.parametrize("look", [1, 2])
def test_a_version_that_is_registered_between_two_looks_of_a_reader_is_there_or_not_yet(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    register(registry, 1.0)
    looks, other = 0, Registry(registry.location)

    def watch(name: str) -> None:
        wrapped = getattr(registry.store, name)

        def then_register(key: str) -> object:
            nonlocal looks
            found, looks = wrapped(key), looks + 1
            if looks == look:
                register(other, 2.0)
            return found

        monkeypatch.setattr(registry.store, name, then_register)

    watch("read")
    watch("list_entries")
    assert registry.get("cartpole@champion").version in (1, 2)
    assert len(registry.list("cartpole")) == 2
    looks = look - 1
    assert registry.has("cartpole@champion")


def test_a_version_that_is_removed_meanwhile_is_not_promoted(
    any_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1.0, 2.0):
        register(any_registry, value)
    other, real = Registry(any_registry.location), any_registry._update_aliases

    def remove_first(name: str, change: Any) -> None:
        other.remove("cartpole@1")
        real(name, change)

    monkeypatch.setattr(any_registry, "_update_aliases", remove_first)
    with pytest.raises(RegistryError, match="cartpole@1 was removed"):
        any_registry.promote("cartpole@1")
    assert any_registry.get("cartpole@champion").version == 2
    assert [found.version for found in any_registry.list()] == [2]


def test_a_registry_that_stays_locked_is_given_up(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (1.0, 2.0):
        register(registry, value)
    monkeypatch.setattr(folder_module, "LOCK_TIMEOUT_S", 0.0)
    is_refused = pytest.raises(RegistryError, match=r"cartpole is being written by another process; try again$")
    with file_lock(Path(registry.location) / "cartpole/.lock", 0.0), is_refused:
        registry.promote("cartpole@1")
    registry.promote("cartpole@1")


def test_what_the_disk_refuses_is_a_registry_error(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1.0, 2.0):
        register(registry, value)

    def refuses(*_: object) -> Never:
        raise OSError(errno.EROFS, "Read-only file system", "cartpole")

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "replace", refuses)
        for change in (lambda: registry.promote("cartpole@1"), lambda: registry.rollback("cartpole")):
            with pytest.raises(RegistryError, match=r"Read-only file system.*: give this user the right to it"):
                change()
    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "list_entries", refuses)
        for look in (registry.get, registry.has, registry.list, registry.aliases):
            with pytest.raises(RegistryError, match="Read-only file system"):
                look("cartpole")
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="Not a directory"):
        Registry(tmp_path / "file" / "registry")


def test_a_bucket_that_cannot_be_reached_is_a_registry_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    registry = Registry("s3://nowhere/registry")
    with pytest.raises(RegistryError, match=r"s3://nowhere/registry cannot be used .*AWS_\*"):
        registry.list()


@pytest.mark.parametrize("any_registry", ["bucket"], indirect=True)
def test_damaged_weights_on_this_host_are_downloaded_again(any_registry: Registry) -> None:
    made = register(any_registry, 1.0)
    file = made.weight_file()
    path = file.find(file.index)
    assert made.snapshot().payload == path.read_bytes()
    path.write_bytes(b"damaged")
    assert made.snapshot().payload == snapshot_of(1.0).payload
    assert read_tensors(made.weight_file())["layer.weight"].tolist() == np.ones((4, 2)).tolist()
    made.store.write("cartpole/1/weights.safetensors", b"damaged")
    path.unlink()
    with pytest.raises(WeightsError, match=r"cartpole@1 .*is damaged.*register the model again"):
        made.snapshot()


@pytest.mark.parametrize(
    ("factory", "kwargs", "says"),
    [
        ("collections.Counter", {}, "module:name"),
        ("no_such_module:Net", {}, "no_such_module"),
        ("collections:Countre", {}, "Countre"),
        ("sys:path", {}, "not a class"),
        ("fractions:Fraction", {"denominatr": 2}, "denominatr"),
    ],
)
def test_a_factory_that_cannot_build_says_why(factory: str, kwargs: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelFactory(factory=factory, kwargs=kwargs).build()


@pytest.mark.parametrize("wrong", [{"datatype": "float32"}, {"shape": [-1, 0]}, {"shap": [-1]}])
def test_a_signature_names_what_does_not_fit(wrong: dict[str, object]) -> None:
    fields = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TensorSignature.parse({**fields, **wrong})


def test_weights_that_numpy_has_no_datatype_for_are_not_called_damaged() -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    snapshot = WeightSnapshot.from_payload(1, len(header).to_bytes(8, "little") + header + bytes(4))
    snapshot.check()
    with pytest.raises(WeightsError, match=r"holds BF16, which NumPy has not: safetensors\.torch\.load\("):
        snapshot.tensors()
    with pytest.raises(WeightsError, match="is not safetensors"):
        WeightSnapshot.from_payload(1, b"nonsense").tensors()


ACCURACY, LOSS = Criterion("accuracy", is_higher_better=True), Criterion("loss", is_higher_better=False)


def judged(
    registry: Registry, accuracy: float, data: str = "a", criterion: Criterion | None = ACCURACY, **fields: Any
) -> str:
    metrics, fields = {"accuracy": accuracy, "loss": -accuracy}, {"run_id": "a run", **fields}
    data_of = {"train": "any", "validation": data}
    made = register(registry, 1, metrics=metrics, data=data_of, criterion=criterion, **fields)
    assert registry.get("cartpole").ref == made.ref  # the newest is `latest`, whatever the champion is
    assert made.aliases == (("champion",) if registry.get("cartpole@champion").ref == made.ref else ())
    return made.decision


def test_the_champion_is_the_best_by_the_metric_on_the_same_data(any_registry: Registry) -> None:
    assert judged(any_registry, 0.5) == "champion is 1, the first"
    assert judged(any_registry, 0.5001) == "champion is 2 now: accuracy 0.5001 > 0.5"
    assert judged(any_registry, 0.5) == "champion stays 2: accuracy 0.5001 > 0.5"
    assert judged(any_registry, 0.5001) == "champion stays 2: accuracy 0.5 = 0.5"
    assert judged(any_registry, 0.4, criterion=LOSS) == "champion stays 2: loss -0.5 < -0.4"
    assert judged(any_registry, 0.6, criterion=LOSS) == "champion is 6 now: loss -0.6 < -0.5"
    assert judged(any_registry, math.nan) == "champion stays 6: accuracy 0.6 beside nan"
    assert any_registry.aliases("cartpole").list_promoted("champion") == [1, 2, 6]  # it can go back through the best


def test_what_cannot_be_compared_is_not_the_champion_and_says_how_it_becomes_it(registry: Registry) -> None:
    judged(registry, 0.9)
    for data, criterion, why in (
        ("b", ACCURACY, "accuracy 0.1 is of other data than 0.9"),
        ("a", Criterion("recall", is_higher_better=True), "2 has no recall to compare"),
        ("a", None, "no metric compares 4 with it"),
    ):
        version = registry.get("cartpole").version + 1
        how = f"; `shoal models promote cartpole@{version}` makes it the champion"
        assert (
            judged(registry, 0.1, data, criterion) == f"champion stays 1: {why.replace('2 has', f'{version} has')}{how}"
        )
    registry.promote("cartpole@2")
    assert judged(registry, 0.1, "b") == "champion stays 2: accuracy 0.1 = 0.1"  # against the one that answers now


def test_a_champion_that_is_measured_again_is_compared_by_that(registry: Registry) -> None:
    judged(registry, 0.9)
    ending = "on the validation data of"
    assert judged(registry, 0.7, "b", scores={1: 0.8}) == f"champion stays 1: accuracy 0.8 > 0.7 {ending} 2"
    assert judged(registry, 0.7, "b", scores={9: 0.1}).startswith("champion stays 1: accuracy 0.7 is of other data")
    assert judged(registry, 0.7, "b", scores={1: 0.6}) == f"champion is 4 now: accuracy 0.7 > 0.6 {ending} 4"


def test_what_no_run_has_made_is_the_champion(registry: Registry) -> None:
    assert register(registry, 1).decision == "champion is 1, the first"
    assert register(registry, 2).decision == "champion is 2 now, which no run has made"


def test_aliases_that_are_said_move_whatever_the_metrics_are(registry: Registry) -> None:
    judged(registry, 0.9)
    said = {"metrics": {"accuracy": 0.1}, "data": {"validation": "a"}, "criterion": ACCURACY}
    assert register(registry, 1, aliases=("champion", "candidate"), **said).aliases == ("candidate", "champion")
    assert register(registry, 1, aliases=(), **said).aliases == ()  # as of a run that has missed its target
    assert registry.get("cartpole@champion").version == 2


def test_a_version_that_an_endpoint_would_refuse_is_not_the_champion(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_VERIFY", "1")
    linear = {"model": ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})}
    weights = {"weight": np.ones((2, 4), np.float32), "bias": np.array([0, np.nan], np.float32)}
    good = WeightSnapshot.of(1, weights | {"bias": np.zeros(2, np.float32)})
    assert registry.register("line", good, signature=SIGNATURE, **linear).aliases == ("champion",)
    bad = registry.register("line", WeightSnapshot.of(2, weights), signature=SIGNATURE, **linear)
    assert "'bias' is not finite: 1 of its 2 values are NaN" in bad.problem
    assert bad.decision == f"champion stays 1: an endpoint would refuse 2: {bad.problem}"
    assert registry.get("line@champion").version == 1
    monkeypatch.setattr(verification, "MAX_BYTES", 0)  # too large for a copy
    said = registry.register(
        "other", WeightSnapshot.of(2, weights), signature=SIGNATURE, aliases=("champion",), **linear
    )
    assert said.decision == "there is no champion: an endpoint would refuse 1: 'bias' is not finite"
    assert said.aliases == ()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "BF16"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, 6e4])
def test_tensors_that_are_not_finite_are_found(dtype: str, value: float, tmp_path: Path) -> None:
    tensors = {"a": np.arange(3), "w": np.array([1.0, value], "<f4" if dtype == "BF16" else dtype)}
    snapshot = WeightSnapshot.of(1, tensors)
    if dtype == "BF16":  # the first halves of a float's bits
        header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
        payload = (tensors["w"].view("<u4") >> 16).astype("<u2").tobytes()
        snapshot = WeightSnapshot.from_payload(1, len(header).to_bytes(8, "little") + header + payload)
    found = "" if math.isfinite(value) else "w"
    (path := tmp_path / "w.safetensors").write_bytes(snapshot.payload)
    assert snapshot.find_not_finite() == WeightFile(1, path, snapshot.sha256, 0.0).find_not_finite() == found
