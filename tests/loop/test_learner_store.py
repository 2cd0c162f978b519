"""A learner's checkpoints on a store, and a learner that starts again where there is nothing of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loop.test_learner import EXPERIENCE, Bench, segment, spec
from shoal.checkpoint import files
from shoal.checkpoint.mirror import CheckpointMirror
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import CheckpointError, StoreError
from shoal.rl.experience.queue import ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.store import Store, open_store
from shoal.weights import WeightStore

TIMEOUT_S = 120.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def start_again(folder: Path, store: Store | None) -> Learner:
    queue = ExperienceQueue(64, Ledger())
    return Learner(spec(), EXPERIENCE, queue, WeightStore(), folder, 3, store=store, must_restore=True)


def test_a_learner_goes_on_where_no_file_of_it_is(tmp_path: Path, store: Store) -> None:
    first = Bench(tmp_path / "a", store=store)
    for _ in range(2):
        first.put(segment(16))
    assert first.learner.step()
    first.learner.stop()
    first.learner.run()
    assert first.learner.failure == ""
    second = start_again(tmp_path / "b", store)
    assert second.restored_updates == first.learner.updates > 0
    for one, other in zip(first.learner.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("has_store", [False, True])
def test_a_learner_that_finds_no_checkpoint_of_its_run_is_an_error(
    tmp_path: Path, store: Store, has_store: bool
) -> None:
    with pytest.raises(CheckpointError, match=r"/a on .* has no checkpoint of this run.*set SHOAL_STORE to a bucket"):
        start_again(tmp_path / "a", store if has_store else None)
    Bench(tmp_path / "b")  # it has died before its first checkpoint
    assert start_again(tmp_path / "b", None).updates == 0


def test_a_mirror_skips_what_came_meanwhile_and_tries_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, write, is_down = CheckpointMirror(StoredCheckpoints(store), tmp_path / "a", keep=2), type(store).write, True

    def refuse(this: Store, key: str, content: bytes | Path) -> None:
        if is_down:
            raise StoreError("the store is down")
        write(this, key, content)

    monkeypatch.setattr(type(store), "write", refuse)
    for step in (1, 2, 3, 4):
        if step == 3:
            is_down = False
        mirror.add(files.save(tmp_path / "a", step, {"step": step}))
        failure = mirror.finish(TIMEOUT_S)
        assert ("only in" in failure and "down" in failure) == is_down
    assert store.list_folders() == ["step-000000003", "step-000000004"]
    other = CheckpointMirror(StoredCheckpoints(store), tmp_path / "b", keep=2)
    other.fetch_newest()
    loaded = files.load_latest(tmp_path / "b")
    assert loaded is not None
    assert (loaded.step, loaded.state) == (4, {"step": 4})


def test_what_was_recovered_from_a_lost_host_is_learnt(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions were published after the newest checkpoint, or just before, and the new ones begin far above them.
    A third host learns what the second has published, too."""
    ages, get_ages = list[int](), ExperienceBatch.get_ages
    monkeypatch.setattr(
        ExperienceBatch, "get_ages", lambda batch: [ages.extend(get_ages(batch).tolist()), get_ages(batch)][1]
    )
    first = Bench(tmp_path / "a", "gateway.max_version_lag=8", store=store)
    for folder in ("b", "c"):
        first.learner.save()
        assert first.learner._checkpoints.finish_upload() == ""
        saved = first.learner.version
        for _ in range(5):
            first.learner.try_publish()
        second = Bench(tmp_path / folder, "gateway.max_version_lag=8", store=store)
        assert second.learner.version > first.learner.version + 100_000
        for version in (saved - 2, saved, saved + 1, saved + 5, second.learner.version):
            if version > 0:
                second.put(segment(16, version=version))
        while len(second.queue):
            assert second.learner.step()
        assert 1 <= max(ages) <= 8
        assert second.learner.counts["dropped"] == 0
        assert second.learner.counts["consumed"] >= 4
        assert second.learner.stats()["metrics"]["learner/policy_lag"] <= 8
        first = second


def test_a_learner_on_another_host_publishes_no_version_twice(tmp_path: Path, store: Store) -> None:
    """Neither does the first host, if the run returns there."""
    first = Bench(tmp_path / "a", store=store)
    first.learner.save()
    assert first.learner._checkpoints.finish_upload() == ""
    for _ in range(5):
        first.learner.try_publish()  # after its newest checkpoint
    used = {each.version for each in first.learner.take_published()}
    for folder in ("b", "a", "c"):
        queue = ExperienceQueue(64, Ledger())
        again = Learner(spec(), EXPERIENCE, queue, WeightStore(), tmp_path / folder, store=store, must_restore=True)
        again.try_publish()
        published = {each.version for each in again.take_published()}
        assert len(published) == 2
        assert not published & used
        used |= published
