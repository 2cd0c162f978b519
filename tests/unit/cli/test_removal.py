"""`shoal runs rm`, `shoal models rm` and their `prune`: what they remove, what they refuse, and what stays."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import registered
from shoal import runs
from shoal.errors import ConfigError, RegistryError, RunError
from shoal.registry import Registry
from shoal.runs.record.database import TABLES
from shoal.runs.record.removal import TRIAL_STARTED
from shoal.serve.controller.rollout import Rollout
from shoal.serve.controller.state import ControllerState, Deployment, ModelState, StateFile
from typed import said


def record(*names: str) -> None:
    for name in names:
        with runs.create("cartpole", "a: 1\n", name) as run:
            run.log(1, {"loss": 0.5})
            run.record_event("began")
            run.record_weights(1, 1, "ab", 1.0)
            run.record_model("cartpole", 1, ["champion"])
            run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:1", "closed")
            (run.folder / "checkpoints/.draft-000000001-ab").mkdir(parents=True)


def count_rows(shoal_home: Path) -> set[int]:
    with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as database:
        return {database.execute(f"SELECT count(DISTINCT run) FROM {table}").fetchone()[0] for table in TABLES}


def list_ids() -> list[str]:
    return sorted(run.id for run in runs.list_runs())


@pytest.fixture
def living() -> Iterator[runs.RunRecorder]:
    with runs.create("cartpole", "a: 1\n", "living") as run:
        yield run


def test_a_run_is_removed_with_its_rows_and_files_after_its_name_was_typed(shoal_home: Path) -> None:
    record("one", "two")
    with pytest.raises(ConfigError, match="confirmation = 'on': is not one, so nothing was removed"):
        said("runs rm one", stdin="on\n")
    with pytest.raises(ConfigError, match="add --yes"):
        said("runs rm one")
    assert list_ids() == ["one", "two"]
    assert "one is removed" in said("runs rm one", stdin="one\n")
    assert (list_ids(), count_rows(shoal_home)) == (["two"], {1})
    assert [path.name for path in (shoal_home / "runs").iterdir()] == ["two"]
    record("three")
    said("runs rm two latest", stdin="2\n")
    assert (list_ids(), count_rows(shoal_home)) == ([], {0})


def test_a_run_that_goes_on_is_not_removed(living: runs.RunRecorder, shoal_home: Path) -> None:
    record("ended")
    with pytest.raises(RunError, match=r"run .living. is still running .*: stop it first"):
        said("runs rm ended living --yes")
    assert list_ids() == ["ended", "living"]
    (shoal_home / "runs/orphan/checkpoints").mkdir(parents=True)
    (shoal_home / "runs/.removed-earlier").mkdir()
    assert "ended\n" in said("runs prune --keep 0 --dry-run")
    assert list_ids() == ["ended", "living"]
    said("runs prune --keep 0 --yes")
    assert (list_ids(), [path.name for path in (shoal_home / "runs").iterdir()]) == (["living"], ["living"])
    living.log(2, {"loss": 0.25})
    living.flush()
    assert runs.load("living").latest() == {"loss": 0.25}


def test_a_removed_run_records_nothing_in_another_of_its_number(shoal_home: Path) -> None:
    paused = runs.create("cartpole", "a: 1\n", "paused")
    with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as database, database:  # by `rm`, which took it for lost
        database.execute("DELETE FROM runs WHERE id = 'paused'")
    with runs.create("cartpole", "a: 1\n", "next"):
        paused.log(7, {"loss": 0.5})
        with pytest.raises(RunError, match="or was removed"):
            paused.finish("failed")
        assert (runs.load("next").latest(), runs.load("next").status.value) == ({}, "running")


def test_prune_removes_what_is_beyond_the_newest_and_old(shoal_home: Path) -> None:
    record("a", "b", "c")
    assert "Nothing" in said("runs prune --keep 1 --older-than 1d --dry-run")
    with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as database, database:
        database.execute("UPDATE runs SET finished_at = finished_at - 7200 WHERE id IN ('b', 'c')")
    assert said("runs prune --keep 1 --older-than 1h --dry-run") == "These would go:\nb\n"
    said("runs prune --older-than 1h", stdin="2\n")
    assert list_ids() == ["a"]


def test_prune_leaves_the_trials_of_a_sweep_that_goes_on(living: runs.RunRecorder) -> None:
    record("trial", "other")
    living.record_event(TRIAL_STARTED, run_id="trial")
    said("runs prune --keep 0 --yes")
    assert list_ids() == ["living", "trial"]


def test_a_pruned_record_takes_less_of_the_disk(shoal_home: Path) -> None:
    with runs.create("cartpole", "a: 1\n", "long") as run:
        for step in range(2000):
            run.log(step, {"loss": 0.5})
    before = (shoal_home / "runs.sqlite").stat().st_size
    said("runs prune --keep 0 --yes")
    assert (shoal_home / "runs.sqlite").stat().st_size < before / 2


def register(num_versions: int, name: str = "tiny", base: str = "") -> None:
    for _ in range(num_versions):
        registered.register(name, aliases=("champion",), lineage={"base": base} if base else {})


def list_refs() -> list[str]:
    return [found.ref for found in Registry().list()]


def serve(shoal_home: Path, version: int, previous: int = 0) -> None:
    deployment = Deployment("tiny", Registry().location, "champion")
    state = ControllerState("a", models={"tiny": ModelState(deployment, Rollout(stable=version, previous=previous))})
    StateFile(shoal_home / "endpoints/tiny-a.json").save(state)


def test_a_version_is_removed_unless_an_alias_names_it_or_an_endpoint_serves_it(shoal_home: Path) -> None:
    register(4)
    serve(shoal_home, 2)
    with pytest.raises(ConfigError, match=r"tiny@4'?: is champion. move it with `shoal models promote tiny@N"):
        said("models rm tiny@1 tiny@4 --yes")
    with pytest.raises(ConfigError, match=r"is served by the endpoint of tiny-a\.json.*shoal serve delete"):
        said("models rm tiny@2 --yes")
    with pytest.raises(ConfigError, match=r"is served by the endpoint of tiny-a\.json"):
        said("models rm tiny --yes")
    with pytest.raises(RegistryError, match="is champion"):
        Registry().remove("tiny@4")
    assert len(list_refs()) == 4
    said("models rm tiny@1", stdin="tiny@1\n")
    assert list_refs() == ["tiny@2", "tiny@3", "tiny@4"]


def test_a_model_is_removed_with_its_aliases_and_its_numbers_are_not_used_again(shoal_home: Path) -> None:
    register(2)
    said("models rm tiny --yes")
    assert list_refs() == []
    assert not list((shoal_home / "registry/tiny").glob("**/weights.safetensors"))
    register(1)
    assert (list_refs(), Registry().get("tiny@champion").version) == (["tiny@3"], 3)


def test_the_version_that_an_endpoint_goes_back_to_stays(shoal_home: Path) -> None:
    register(4)
    serve(shoal_home, 3, previous=2)
    with pytest.raises(ConfigError, match=r"or is the version that it goes back to.*tiny@N --into tiny`"):
        said("models rm tiny@2 --yes")
    assert said("models prune --keep 0 --dry-run") == "These would go:\ntiny@1\n"


def test_the_base_of_adapters_stays_as_long_as_they_do(shoal_home: Path) -> None:
    register(3)
    for name in ("chat", "mail"):
        register(1, name, base="tiny@1")
    register(1, "own", base="own@1")  # a word of a user's own
    needs = r"tiny@1 is the base of chat@1 and mail@1.*: first remove them, by `shoal models rm chat@1 mail@1`"
    for word in ("tiny@1", "tiny"):
        with pytest.raises(RegistryError, match=needs):
            said("models rm", word)  # without a question
        with pytest.raises(RegistryError, match=needs):
            Registry().remove(word)
    (shoal_home / "registry/mail/1/manifest.json").write_text("{")  # what cannot be loaded needs nothing
    said("models prune tiny --keep 1 --yes")
    assert [found.ref for found in Registry().list("tiny")] == ["tiny@1", "tiny@3"]
    for word in ("chat", "tiny", "own"):
        said("models rm", word, "--yes")


def test_nothing_is_removed_while_it_is_not_known_what_an_endpoint_serves(shoal_home: Path) -> None:
    register(2)
    serve(shoal_home, 1)
    (shoal_home / "endpoints/tiny-a.json").write_text("{")
    with pytest.raises(RunError, match=r"tiny-a\.json cannot be read.*remove it if its cluster is gone"):
        said("models prune --keep 1 --yes")
    assert list_refs() == ["tiny@1", "tiny@2"]


def test_latest_is_one_version_and_not_the_model(shoal_home: Path) -> None:
    register(3)
    with pytest.raises(RegistryError, match="tiny@3 is champion"):
        Registry().remove("tiny@latest")
    Registry().promote("tiny@1")
    assert "tiny@3 is removed" in said("models rm tiny@latest tiny@3", stdin="tiny@3\n")
    assert list_refs() == ["tiny@1", "tiny@2"]
    assert Registry().get("tiny@champion").version == 1


def test_prune_of_models_spares_the_newest_the_aliased_and_the_served(shoal_home: Path) -> None:
    register(5)
    register(2, "other")
    Registry().promote("tiny@1")
    serve(shoal_home, 2)
    draft = shoal_home / "registry/tiny/2/.weights.safetensors-0123456789abcdef"
    draft.touch()
    os.utime(draft, (0, 0))
    shown = said("models prune --keep 1 --dry-run")
    assert shown == "These would go:\nother@1\ntiny@3\ntiny@4\n"
    assert "Nothing" in said("models prune --older-than 1d")
    said("models prune tiny --keep 1", stdin="2\n")
    assert list_refs() == ["other@1", "other@2", "tiny@1", "tiny@2", "tiny@5"]
    assert not draft.exists()
