"""Durable files: each is read back, retains the fields of a later release, and is refused by name in a later format."""

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from shoal import runs
from shoal.checkpoint import Checkpointer, files
from shoal.config import Spec
from shoal.errors import CheckpointError, RegistryError, RunError, ShoalError
from shoal.flows.actor_learner_spec import ActorLearnerSpec, PoliciesSpec
from shoal.flows.serving_spec import ServingSpec
from shoal.registry import ModelFactory, Registry, Signature
from shoal.rl.experience.quarantine import read_run_quarantine
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.runs import RunKind
from shoal.serve.controller.rollout import FOLLOWING
from shoal.serve.controller.state import ControllerState, Deployment, Event, ModelState, StateFile
from shoal.train.spec import TrainSpec
from shoal.weights import WeightSnapshot
from shoal.wire import DropReason

KEY = "endpoint.keys=[{name: lab, key: not-recorded}]"
SPECS: dict[str, tuple[RunKind, Spec, list[str]]] = {
    "training": (RunKind.TRAINING, TrainSpec(task="lenet").override(["parallel=ddp", "workers=2", "seed=5"]), []),
    "loop": (RunKind.LOOP, ActorLearnerSpec().override(["algorithm=ppo", KEY]), [KEY]),
    "policies": (RunKind.LOOP, PoliciesSpec.parse({"env": "tag", "policies": {"it": {"agents": ["it"]}}}), []),
    "serving": (
        RunKind.SERVING,
        ServingSpec(models=["tiny@champion"]).override(["endpoint.model.max_batch_size=4"]),
        [],
    ),
}


def write_runs() -> None:
    """A run of each spec."""
    for name, (kind, spec, _) in SPECS.items():
        with runs.create(name, spec.to_record(), name, command=f"shoal run {name}", kind=kind) as run:
            run.log(1, {"loss": 0.5, "return/mean_100": 7.0})
            run.record_event("began", step=1)
            run.record_weights(1, 1, "ab", 1.0)
            run.record_model("tiny", 1, ["champion"])
            run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5555", "ready")


def write_files(home: Path) -> None:
    """A ledger, a registered model, checkpoints of both kinds, and the state of an endpoint."""
    ledger = Ledger(home / "runs/loop" / LEDGER_NAME)
    for seq in range(3):
        ledger.record_received(("a", 1), seq)
    ledger.record_received(("b", 7), 0, DropReason.NON_FINITE)
    ledger.acknowledge(ledger.open_lease("learner", [("a", 1)]), [None])
    ledger.open_lease("learner", [("a", 1), ("a", 1)])
    ledger.quarantine("c", "claims too much")
    ledger.close()

    weights = WeightSnapshot.of(1, {"w": np.arange(3, dtype=np.float32)})
    tensor = {"datatype": "FP32", "shape": [-1, 3]}
    signature = Signature.parse({"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]})
    model = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 3})
    for _ in range(2):
        Registry().register(
            "tiny",
            weights,
            model=model,
            signature=signature,
            run_id="training",
            metrics={"loss": 0.5},
            aliases=["champion"],
        )
    Registry().rollback("tiny")

    state = {"model": {"w": torch.arange(3.0)}, "step": 4}
    with Checkpointer(home / "runs/training/checkpoints", asynchronous=False) as checkpointer:
        checkpointer.save(4, state, {"note": "hello"}, plan="ddp", best=True)
    files.save(home / "runs/loop/checkpoints", 4, {"w": torch.arange(3.0), "version": 9})

    models = {
        "tiny": ModelState(Deployment("tiny", "/registry", "champion", {"max_batch_size": 4})),
        "live": ModelState(Deployment("live"), FOLLOWING, retained=3),
    }
    file = StateFile(home / "endpoints/digits-1.json")
    file.save(ControllerState("a1", 7, 1.0, models, ["r1"], [Event(1, 1.0, "deploy", "tiny", 1)], 1))
    file.store_weights("live", WeightSnapshot.of(3, {"w": np.arange(3, dtype=np.float32)}))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "not-yet/home"
    before = os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(folder))
        write_runs()
        write_files(folder)
        runs.write_report(runs.load("loop"))
    os.umask(before)
    return folder


@pytest.fixture(autouse=True)
def home(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("name", SPECS)
def test_a_recorded_run_is_read_and_resumable(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, spec, words = SPECS[name]
    run = runs.load(name)
    assert (run.kind, run.status.value, run.best()) == (kind, "finished", ("return/mean_100", 7.0))
    assert [event for event, _ in run.list_events("began")] == ["began"]
    assert [(each.name, each.state) for each in run.endpoints()] == [("gateway", "ready")]
    assert len(run.models()) == len(run.versions()) == 1
    assert type(spec).from_record(run.spec, words) == spec
    assert not caplog.records
    renamed = yaml.safe_dump({**yaml.safe_load(run.spec), f"former_{name}": 3})
    assert type(spec).from_record(renamed, words) == spec
    assert f"former_{name}=3" in caplog.text
    with runs.reopen(name, spec.to_record()) as again:
        again.log(2, {"loss": 0.25})
    assert runs.load(name).incarnation == 2


def test_a_ledger_continues(home: Path) -> None:
    ledger = Ledger(home / "runs/loop/ledger.sqlite")
    assert ledger.get_totals().to_dict() == {
        "received": 4,
        "consumed": 1,
        "queued": 2,
        "duplicates": 0,
        "dropped": {"non_finite": 1},
        "balanced": True,
    }
    assert ledger.acknowledge(2, [None, None])
    assert ledger.quarantined == read_run_quarantine(home / "runs/loop") == {"c": "claims too much"}
    ledger.close()


def test_a_registered_version_is_found_and_its_alias_moves() -> None:
    registry = Registry()
    found = registry.get("tiny@champion")
    assert (found.version, found.manifest.run_id, found.snapshot().shapes()) == (1, "training", {"w": [3]})
    assert registry.promote("tiny@2").version == 2


def test_checkpoints_of_both_kinds_load(home: Path) -> None:
    with Checkpointer(home / "runs/training/checkpoints") as checkpointer:
        found = checkpointer.latest()
        assert found is not None
        assert checkpointer.best_step() == 4
        state = {"model": {"w": torch.zeros(3)}, "step": 0}
        assert checkpointer.load(found, state).extras == {"note": "hello"}
    loaded = files.load_latest(home / "runs/loop/checkpoints")
    assert (loaded.step, loaded.state["version"]) == (4, 9)
    assert torch.equal(state["model"]["w"], loaded.state["w"])  # type: ignore[index]


def test_the_state_of_an_endpoint_continues(home: Path) -> None:
    file = StateFile(home / "endpoints/digits-1.json")
    state = file.load("a1")
    assert (state.generation, sorted(state.models), state.models["live"].retained) == (7, ["live", "tiny"], 3)
    assert file.load_weights("live", 3) is not None


def test_fields_of_a_later_release_are_retained_and_named(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_json(home / "endpoints/digits-1.json", lambda state: state["models"]["tiny"].update(colour="red"))
    for name in ("aliases.json", "1/manifest.json"):
        change_json(home / "registry/tiny" / name, lambda document: document.update(colour="red"))
    execute(home / "runs/loop/ledger.sqlite", "ALTER TABLE accounts ADD COLUMN colour TEXT DEFAULT 'red'")

    file = StateFile(home / "endpoints/digits-1.json")
    state = file.load("a1")
    assert state is not None
    file.save(state)
    Registry().get("tiny@1")
    Registry().promote("tiny@2")
    ledger = Ledger(home / "runs/loop/ledger.sqlite")
    ledger.record_received(("a", 1), 3)
    ledger.close()

    assert json.loads((home / "endpoints/digits-1.json").read_text())["models"]["tiny"]["colour"] == "red"
    assert json.loads((home / "registry/tiny/aliases.json").read_text())["colour"] == "red"
    with closing(sqlite3.connect(home / "runs/loop/ledger.sqlite")) as database:
        assert database.execute("SELECT next_seq, colour FROM accounts WHERE actor_id = 'a'").fetchone() == (4, "red")
    for name in ("digits-1.json", "aliases.json", "1/manifest.json", "ledger.sqlite"):
        assert sum(name in each.getMessage() and "colour" in each.getMessage() for each in caplog.records) == 1


REFUSALS: dict[str, tuple[type[ShoalError], Callable[[Path], object]]] = {
    "runs.sqlite": (RunError, lambda home: runs.list_runs()),
    "runs/loop/ledger.sqlite": (RunError, lambda home: Ledger(home / "runs/loop/ledger.sqlite")),
    "registry/tiny/aliases.json": (RegistryError, lambda home: Registry().get("tiny")),
    "registry/tiny/2/manifest.json": (RegistryError, lambda home: Registry().get("tiny")),
    "endpoints/digits-1.json": (RunError, lambda home: StateFile(home / "endpoints/digits-1.json").load("a1")),
    "runs/training/checkpoints/step-000000004/manifest.json": (
        CheckpointError,
        lambda home: Checkpointer(home / "runs/training/checkpoints").latest(),
    ),
    "runs/loop/checkpoints/step-000000004/manifest.json": (
        CheckpointError,
        lambda home: files.load_latest(home / "runs/loop/checkpoints"),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_of_a_newer_format_is_refused_by_name_with_the_remedy(home: Path, name: str) -> None:
    if name.endswith(".sqlite"):
        execute(home / name, "PRAGMA user_version = 99")
    else:
        change_json(home / name, lambda document: document.update(format=99))
    before = (home / name).read_bytes()
    error, load = REFUSALS[name]
    with pytest.raises(error) as refused:
        load(home)
    known = 2 if name.endswith("tiny/2/manifest.json") else 1
    problem = f"{home / name} was written by a newer Shoal (format 99; this one reads {known}): upgrade Shoal"
    assert problem in str(refused.value)
    assert (home / name).read_bytes() == before


def test_a_status_and_a_kind_of_a_later_release_are_no_traceback(home: Path) -> None:
    execute(home / "runs.sqlite", "UPDATE runs SET kind = 'dream' WHERE id = 'loop'")
    assert runs.load("loop").kind == "dream"
    with pytest.raises(ValueError):
        RunKind("")
    execute(home / "runs.sqlite", "UPDATE runs SET status = 'asleep' WHERE id = 'loop'")
    with pytest.raises(RunError, match=r"the status 'asleep', which this release of Shoal does not have: upgrade"):
        runs.load("loop")


def test_a_damaged_ledger_is_named(home: Path) -> None:
    (home / "runs/loop/ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RunError, match=r"ledger\.sqlite cannot be read: .*: put a copy in its place"):
        Ledger(home / "runs/loop/ledger.sqlite")


def test_what_is_written_is_private_to_its_owner(written: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [written.parent, written, *written.rglob("*")]}
    assert {path for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == set()
    assert len([path for path in modes if path.suffix in (".safetensors", ".pt", ".sqlite", ".html", ".yaml")]) > 10


def change_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
