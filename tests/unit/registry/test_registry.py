"""The registry keeps its word: versions are whole, distinct and immutable, and an alias can always go back."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Never

import numpy as np
import pytest

from shoal.atomic_file import write_synced
from shoal.errors import ConfigError, RegistryError, WeightsError
from shoal.home import file_lock
from shoal.registry import (
    Manifest,
    ModelFactory,
    ModelVersion,
    Registry,
    Signature,
    TensorSignature,
)
from shoal.registry import registry as module
from shoal.weights import WeightSnapshot

MODEL = ModelFactory(factory="collections:Counter", kwargs={"a": 2})
SIGNATURE = Signature(
    inputs=[TensorSignature(name="observation", datatype="FP32", shape=[-1, 4])],
    outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, 2])],
)
DEADLINE_S = 10.0


def snapshot_of(value: float, version: int = 7) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"layer.weight": np.full((4, 2), value, np.float32)})


def register(registry: Registry, value: float, **fields: object) -> ModelVersion:
    return registry.register("cartpole", snapshot_of(value), model=MODEL, signature=SIGNATURE, **fields)  # type: ignore[arg-type]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def test_what_is_registered_comes_back(registry: Registry) -> None:
    made = register(registry, 1.5, run_id="run-1", metrics={"return": 480.0, "loss": math.nan})
    found = Registry(registry.root).get("cartpole")
    assert (found.name, found.version, found.ref, found.aliases) == ("cartpole", 1, "cartpole@1", ("champion",))
    assert found.folder == made.folder
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

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads((made.folder / "manifest.json").read_text(), parse_constant=refuse)


def test_references_mean_a_number_an_alias_or_the_newest(registry: Registry) -> None:
    register(registry, 1.0)
    register(registry, 2.0, aliases=("candidate",))
    versions = {
        ref: registry.get(ref).version
        for ref in ("cartpole", "cartpole@latest", "cartpole@1", "cartpole@champion", "cartpole@candidate")
    }
    assert list(versions.values()) == [2, 2, 1, 1, 2]
    assert registry.has("cartpole@1")
    assert not registry.has("cartpole@3")
    assert not registry.has("nothing")


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("cartpol", "did you mean cartpole"),
        ("cartpole@9", "versions 1 to 1"),
        ("cartpole@champignon", "champion"),
    ],
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
    assert list(registry.root.iterdir()) == []


def test_names_may_have_capitals_but_not_differ_in_them_alone(registry: Registry) -> None:
    name = "Qwen2.5-0.5B_Instruct"
    registry.register(name, snapshot_of(1), model=MODEL, signature=SIGNATURE)
    assert registry.get(f"{name}@champion").ref == f"{name}@1"
    assert [each.name for each in registry.list()] == [name]
    for other in (name.lower(), name.upper()):
        with pytest.raises(ConfigError, match=rf"name = '{other}': differs from the model '{name}' in capitals alone"):
            registry.register(other, snapshot_of(1), model=MODEL, signature=SIGNATURE)
        with pytest.raises(RegistryError, match=rf"no model '{other}': did you mean {name}\?"):
            registry.get(other)
    assert registry.register(name, snapshot_of(2), model=MODEL, signature=SIGNATURE).version == 2
    assert sorted(path.name for path in registry.root.iterdir() if not path.name.startswith(".")) == [name]


@pytest.mark.parametrize("alias", ["7", "latest", "../x", "", "Champion"])
def test_an_alias_cannot_be_mistaken_for_a_version(registry: Registry, alias: str) -> None:
    with pytest.raises(ConfigError, match="alias"):
        register(registry, 1.0, aliases=(alias,))
    assert registry.list() == ()


def test_list_gives_every_version_of_every_model(registry: Registry) -> None:
    assert registry.list() == ()
    register(registry, 1.0)
    registry.register("acrobot", snapshot_of(0), model=MODEL, signature=SIGNATURE)
    register(registry, 2.0)
    assert [found.ref for found in registry.list()] == ["acrobot@1", "cartpole@1", "cartpole@2"]
    assert [found.aliases for found in registry.list("cartpole")] == [(), ("champion",)]
    with pytest.raises(RegistryError):
        registry.list("pendulum")


def test_rollback_goes_back_one_promotion_at_a_time_and_keeps_the_history(registry: Registry) -> None:
    for value in (1.0, 2.0, 3.0):
        register(registry, value)
    registry.promote("cartpole@3")  # it is already: not a move
    assert registry.rollback("cartpole").version == 2
    assert registry.rollback("cartpole").version == 1
    with pytest.raises(RegistryError, match=r"no version to go back to.*shoal models promote cartpole@N"):
        registry.rollback("cartpole")
    assert registry.promote("cartpole@3").aliases == ("champion",)
    assert registry.rollback("cartpole").version == 1
    moves = [(move.kind, move.version) for move in registry.aliases("cartpole").moves["champion"]]
    assert moves == [
        *(("promote", 1), ("promote", 2), ("promote", 3), ("rollback", 2), ("rollback", 1)),
        *(("promote", 3), ("rollback", 1)),
    ]
    with pytest.raises(RegistryError, match="never promoted"):
        registry.rollback("cartpole", alias="candidate")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_weights_are_refused(registry: Registry, damage: str) -> None:
    path = register(registry, 1.0).folder / "weights.safetensors"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(payload if damage == "flip" else payload[:-8])
    with pytest.raises(WeightsError, match=r"cartpole@1.*register the model again"):
        registry.get("cartpole@1").snapshot()


@pytest.mark.parametrize("model", [MODEL, ModelFactory(format="onnx")], ids=["module", "onnx"])
def test_a_damaged_snapshot_is_never_registered(registry: Registry, model: ModelFactory) -> None:
    good = snapshot_of(1.0)
    with pytest.raises(WeightsError):
        registry.register(
            "cartpole", WeightSnapshot(1, good.payload[:-1], good.sha256, 0.0), model=model, signature=SIGNATURE
        )
    assert registry.list() == ()


def test_a_damaged_manifest_is_a_registry_error(registry: Registry) -> None:
    path = register(registry, 1.0).folder / "manifest.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RegistryError, match=r"manifest\.json"):
        registry.get("cartpole")


@pytest.mark.parametrize("aliases", [("champion",), ()])
def test_the_number_of_a_removed_version_is_not_given_again(registry: Registry, aliases: tuple[str, ...]) -> None:
    for value in (1.0, 2.0, 3.0):
        made = register(registry, value, aliases=aliases)
    shutil.rmtree(made.folder)
    assert register(registry, 4.0, aliases=()).version == 4
    registry.promote("cartpole@1")
    assert register(registry, 5.0).version == 5


def test_what_an_alias_has_meant_counts_where_nothing_else_is_known(registry: Registry) -> None:
    for value in (1.0, 2.0, 3.0):
        made = register(registry, value)
    shutil.rmtree(made.folder)
    path = registry.root / "cartpole" / "aliases.json"
    path.write_text(json.dumps({"moves": json.loads(path.read_text())["moves"]}))  # as earlier releases wrote it
    assert register(registry, 4.0).version == 4


def test_aliases_that_somebody_has_edited_into_nonsense_are_a_registry_error(registry: Registry) -> None:
    path = register(registry, 1.0).folder.parent / "aliases.json"
    path.write_text('{"moves": {"champion": [{"version": 1, "time": 0.0, "kind": "rollback"}]}, "newest": 1}')
    for ask in (lambda: registry.get("cartpole@champion"), registry.list, lambda: register(registry, 2.0)):
        with pytest.raises(RegistryError, match=r"aliases.json cannot be read .*champion is rolled back, with nothing"):
            ask()


def test_an_alias_whose_version_was_removed_is_named(registry: Registry) -> None:
    for value in (1.0, 2.0):
        made = register(registry, value)
    shutil.rmtree(made.folder)
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
    Registry(Path(root)).register("cartpole", WeightSnapshot.of(1, {"w": np.array([float(value)])}), run_id=value,
                                  model=ModelFactory(factory="a:b"), signature=Signature(inputs=[], outputs=[]))
"""


def test_processes_that_register_at_once_get_distinct_versions(registry: Registry) -> None:
    num_processes, num_versions = 3, 8
    arguments = [[str(registry.root), str(value), str(num_versions)] for value in range(num_processes)]
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


def test_a_writer_killed_half_way_leaves_nothing_to_see(registry: Registry) -> None:
    register(registry, 1.0)
    script = f"""
import os, signal
from pathlib import Path
import numpy as np
from shoal.registry import ModelFactory, Registry, Signature, registry as module
from shoal.weights import WeightSnapshot
write = module.write_synced
def killed(path, payload):
    if path.name == "manifest.json":
        write(path, payload[:10])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, payload)
module.write_synced = killed
Registry(Path({str(registry.root)!r})).register(
    "cartpole", WeightSnapshot.of(1, {{"w": np.zeros(3)}}), model=ModelFactory(factory="a:b"),
    signature=Signature(inputs=[], outputs=[]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [found.ref for found in registry.list()] == ["cartpole@1"]
    assert registry.get("cartpole").snapshot().tensors()["layer.weight"][0, 0] == 1.0
    assert register(registry, 2.0).version == 2
    assert sorted(os.listdir(registry.root / "cartpole")) == [".lock", ".registering", "1", "2", "aliases.json"]


@pytest.mark.parametrize("refuses", ["replace_synced", "sync_folder"])
def test_a_disk_that_refuses_the_aliases_leaves_no_version_either(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    register(registry, 1.0)
    real = getattr(module, refuses)

    def full(path: Path, *payload: bytes) -> None:
        if path.name != ".incoming":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, *payload)

    with monkeypatch.context() as patch:
        patch.setattr(module, refuses, full)
        with pytest.raises(RegistryError, match="No space left"):
            register(registry, 2.0, aliases=("champion", "candidate"))
    assert [found.ref for found in registry.list()] == ["cartpole@1"]
    assert registry.get("cartpole").aliases == ("champion",)
    assert register(registry, 3.0, aliases=("champion", "candidate")).aliases == ("candidate", "champion")
    assert registry.get("cartpole@2").snapshot().tensors()["layer.weight"][0, 0] == 3.0


def test_an_interruption_between_version_and_aliases_leaves_neither(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(registry, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_aliases", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            register(registry, 2.0)
    assert [found.ref for found in registry.list()] == ["cartpole@1"]


def test_no_alias_is_left_without_its_version_by_a_disk_that_fails_at_the_last_moment(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("shoal.atomic_file.sync_folder", fails)  # the aliases are replaced already
        with pytest.raises(RegistryError, match="Input/output error"):
            register(registry, 1.0)
    assert registry.get("cartpole@champion").snapshot().tensors()["layer.weight"][0, 0] == 1.0


@pytest.mark.parametrize("full", ["weights.safetensors", "manifest.json", "aliases.json"])
def test_a_full_disk_gets_its_room_back(registry: Registry, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    register(registry, 1.0)
    before = sorted(registry.root.rglob("*"))
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if full in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(RegistryError, match="No space left"):
            register(registry, 2.0)
    assert sorted(registry.root.rglob("*")) == before


def test_all_aliases_of_a_new_version_move_at_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    register(registry, 1.0, aliases=("champion", "candidate"))
    seen: list[tuple[str, ...]] = []
    real = module.replace_synced

    def watched(path: Path, payload: bytes) -> None:
        real(path, payload)
        seen.append(registry.get("cartpole@2").aliases)

    monkeypatch.setattr(module, "replace_synced", watched)
    register(registry, 2.0, aliases=("champion", "candidate"))
    assert seen == [("candidate", "champion")]


def test_rollback_to_a_version_that_was_removed_moves_nothing(registry: Registry) -> None:
    made = [register(registry, value) for value in (1.0, 2.0, 3.0)]
    shutil.rmtree(made[1].folder)
    with pytest.raises(RegistryError, match=r"cartpole@champion meant version 2 before, which was removed: .*promote"):
        registry.rollback("cartpole")
    assert registry.get("cartpole@champion").version == 3


def test_an_alias_moves_while_a_large_version_is_written(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (1.0, 2.0):
        register(registry, value)
    writes, goes_on = threading.Event(), threading.Event()

    def slow_write(path: Path, payload: bytes) -> None:
        if path.name == "weights.safetensors":
            writes.set()
            assert goes_on.wait(DEADLINE_S)
        write_synced(path, payload)

    monkeypatch.setattr("shoal.registry.registry.write_synced", slow_write)
    monkeypatch.setattr("shoal.registry.registry.LOCK_TIMEOUT_S", 0.0)  # who has to wait is refused
    writer = threading.Thread(target=register, args=(registry, 3.0), kwargs={"aliases": ["candidate"]})
    writer.start()
    try:
        assert writes.wait(DEADLINE_S)
        assert registry.promote("cartpole@1").aliases == ("champion",)
        assert registry.rollback("cartpole").version == 2
        assert [found.version for found in registry.list("cartpole")] == [1, 2]
    finally:
        goes_on.set()
        writer.join(DEADLINE_S)
    assert registry.get("cartpole@candidate").version == 3
    assert registry.aliases("cartpole").list_promoted("champion") == [1, 2]


@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_version_that_is_registered_between_two_looks_of_a_reader_is_there_or_not_yet(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    register(registry, 1.0)
    looks = 0

    def watched(name: str) -> None:
        wrapped = getattr(module, name)

        def then_registers(folder: Path) -> object:
            nonlocal looks
            found, looks = wrapped(folder), looks + 1
            if looks == look:
                register(registry, 2.0)
            return found

        monkeypatch.setattr(module, name, then_registers)

    watched("_versions_in")
    watched("_read_aliases")
    assert registry.get("cartpole@champion").version in (1, 2)
    assert len(registry.list("cartpole")) == 2
    looks = look - 1
    assert registry.has("cartpole@champion")


def test_a_registry_that_stays_locked_is_given_up(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (1.0, 2.0):
        register(registry, value)
    monkeypatch.setattr("shoal.registry.registry.LOCK_TIMEOUT_S", 0.0)
    is_refused = pytest.raises(RegistryError, match=r"cartpole is being written by another process; try again$")
    with file_lock(registry.get("cartpole@1").folder.parent / ".lock", 0.0), is_refused:
        registry.promote("cartpole@1")
    registry.promote("cartpole@1")


def test_what_the_disk_refuses_is_a_registry_error(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1.0, 2.0):
        register(registry, value)

    def refuses(folder: Path) -> Never:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("shoal.registry.registry.lock_folder", refuses)
        for change in (lambda: registry.promote("cartpole@1"), lambda: registry.rollback("cartpole")):
            with pytest.raises(RegistryError, match=r"Read-only file system.*: give this user the right to it"):
                change()
    with monkeypatch.context() as patch:
        patch.setattr("shoal.registry.registry._versions_in", refuses)
        for look in (registry.get, registry.has, registry.list, registry.aliases):
            with pytest.raises(RegistryError, match="Read-only file system"):
                look("cartpole")
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="Not a directory"):
        Registry(tmp_path / "file" / "registry")


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"datatype": "float32"},
        {"shape": [-1, 0]},
        {"shap": [-1]},
    ],
)
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


def test_a_manifest_is_read_back_as_it_was(registry: Registry) -> None:
    manifest = register(registry, 1.0, metrics={"return": 1.0}).manifest
    assert Manifest.from_yaml(manifest.to_yaml()) == manifest
