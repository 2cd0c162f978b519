"""The learner with a queue and a store in memory: staleness, versions, resuming, and what it does with a bad loss."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from failures import down
from rl_setting import EXPERIENCE, segment
from shoal import atomic_file, checkpoint
from shoal.checkpoint import files
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import CheckpointError, Closed, SpecMismatch
from shoal.rl import batch_checks
from shoal.rl import learner as learner_module
from shoal.rl.algorithms.algorithm import NonFiniteLoss
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec
from shoal.store import Store, open_store
from shoal.weights import WeightStore
from shoal.wire import Segment
from waiting import start_thread, wait_for

A = ("a", 1)


SMALL = (
    "learner.batch_steps=16",
    "learner.max_batch_steps=16",
    "learner.publish_interval_s=0",
    "learner.take_timeout_s=0.05",
    "gateway.max_version_lag=3",
)


def spec(*words: str) -> RLSpec:
    return RLSpec(hidden=(8,)).override([*SMALL, *words])


class Bench:
    """A learner, its queue and its store. `random_segment` draws from a generator of its own."""

    def __init__(self, folder: Path, *words: str, used_version: int = 0, store: Store | None = None) -> None:
        self.queue = ExperienceQueue(64, Ledger())
        self.store = WeightStore()
        self.learner = Learner(spec(*words), EXPERIENCE, self.queue, self.store, folder, used_version, store=store)

    def put(self, value: Segment) -> None:
        assert self.queue.put(A, self.queue.ledger.get_account(A).next_seq, value)


def random_segment(random: np.random.Generator, version: int) -> Segment:
    return segment(
        8,
        version,
        observations=random.normal(size=(9, 4)).astype(np.float32),
        actions=random.integers(0, 2, 8),
        rewards=random.normal(size=8).astype(np.float32),
        terminated=bool(random.random() < 0.5),
    )


def test_a_learner_publishes_at_once_and_after_every_update(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.store.version == 1
    reported: list[tuple[float, int]] = []
    bench.learner.on_batch = lambda seconds: reported.append((seconds, bench.store.version))
    bench.put(segment(8))
    bench.put(segment(8))
    assert bench.learner.step()
    [(seconds, version)] = reported  # how long the batch took, with its publication
    assert (seconds > 0, version) == (True, 2)
    latest = bench.store.latest()
    assert latest is not None
    np.testing.assert_array_equal(
        latest.tensors()["policy.0.weight"], bench.learner.model.policy[0].weight.detach().numpy()
    )
    assert [published.version for published in bench.learner.take_published(0)] == [1, 2]
    assert not bench.learner.step()  # nothing is left
    assert bench.queue.ledger.get_account(A).consumed == 2


def test_nothing_older_than_the_lag_reaches_an_update(tmp_path: Path) -> None:
    bench = Bench(tmp_path, used_version=9)  # the first publication is version 10
    for version in (6, 7, 10):
        bench.put(segment(8, version=version))
    seen: list[np.ndarray] = []
    checks = bench.learner._bad_batches
    original = checks._update
    checks._update = lambda batch: (seen.append(batch.versions), original(batch))[1]  # type: ignore[func-returns-value]
    assert bench.learner.step()  # versions 6 and 7: a batch has at least 16 steps
    assert bench.learner.step()
    assert [sorted(set(versions.tolist())) for versions in seen] == [[7], [10]]
    account = bench.queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (2, {"stale_consumption": 1})
    assert account.is_balanced


def test_resuming_goes_on_exactly_where_the_checkpoint_was(tmp_path: Path) -> None:
    def learn(bench: Bench, random: np.random.Generator, updates: int) -> None:
        for _ in range(updates):
            for _ in range(2):
                bench.put(random_segment(random, bench.learner.version))
            assert bench.learner.step()

    whole = Bench(tmp_path / "whole")
    learn(whole, np.random.default_rng(5), 6)

    random = np.random.default_rng(5)
    first = Bench(tmp_path / "parts")
    learn(first, random, 3)
    first.learner.save()
    second = Bench(tmp_path / "parts", used_version=first.store.version)
    assert (second.learner.updates, second.learner.restored_updates) == (3, 3)
    learn(second, random, 3)

    assert second.learner.updates == whole.learner.updates == 6
    assert second.learner.steps == whole.learner.steps
    for name, value in whole.learner.model.state_dict().items():
        assert torch.equal(value, second.learner.model.state_dict()[name]), name


def test_resuming_with_another_learning_rate_learns_at_that_rate(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    first = Bench(tmp_path)
    for _ in range(2):
        first.put(random_segment(random, first.learner.version))
    assert first.learner.step()
    first.learner.save()
    second = Bench(tmp_path, "algorithm.learning_rate=1e-12", used_version=first.store.version)
    before = {name: value.clone() for name, value in second.learner.model.state_dict().items()}
    for _ in range(2):
        second.put(random_segment(random, second.learner.version))
    assert second.learner.step()
    for name, value in second.learner.model.named_parameters():
        # a step of Adam is of the order of its rate: 1e-9 is far above this one, and far below the recipe's
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-9)


def test_what_was_learnt_last_is_published_when_experience_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "learner.publish_interval_s=0.1")
    bench.put(segment(16))
    assert bench.learner.step()
    wait_for(lambda: bench.learner.step() or bench.store.version == 2)
    latest = bench.store.latest()
    assert latest is not None
    assert latest.payload == bench.learner.snapshot().payload


def test_another_model_than_the_checkpoints_is_refused_by_name(tmp_path: Path) -> None:
    Bench(tmp_path).learner.save()
    with pytest.raises(SpecMismatch, match="hidden"):
        Bench(tmp_path, "hidden=[16]")


def test_a_loss_that_stays_not_finite_ends_the_run_with_the_last_good_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_checks, "MAX_BAD_S", 0.0)
    bench = Bench(tmp_path)
    bench.put(segment(16))
    assert bench.learner.step()
    before = bench.learner.snapshot().payload
    for _ in range(3):
        bench.put(segment(16, version=2, rewards=np.full(16, 1e38, np.float32)))
    with pytest.raises(NonFiniteLoss):
        bench.learner.run()
    again = Bench(tmp_path).learner
    assert (again.restored_updates, again.snapshot().payload) == (1, before)
    assert bench.queue.ledger.get_account(A).dropped == {"non_finite": 3}


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, "learner.checkpoint_every_s=1e-9")

    def full(*arguments: object) -> None:
        raise CheckpointError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.checkpoint.save", full)
        for _ in range(2):
            bench.put(segment(16))
            assert bench.learner.step()
    assert bench.learner.stats()["checkpoint_failure"] == "no space left on device"
    bench.put(segment(16))
    assert bench.learner.step()
    assert bench.learner.stats()["checkpoint_failure"] == ""
    assert Bench(tmp_path).learner.restored_updates == 3


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """No version can be reserved meanwhile. Yields the files that could not be written."""
    refused: list[Path] = []

    def refuse(path: Path, content: bytes) -> None:
        refused.append(path)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(atomic_file, "replace_synced", refuse)
        yield refused


def test_a_batch_of_one_step_can_be_learnt_from_with_normalised_advantages(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "algorithm.normalize_advantages=true", "learner.batch_steps=1", "learner.max_batch_steps=1")
    bench.put(segment(1))
    assert bench.learner.step()
    assert bench.learner.updates == 1


def test_stop_publishes_and_saves_what_was_learnt_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "learner.publish_interval_s=1000")
    bench.put(segment(16))
    original = bench.queue.acknowledge
    bench.queue.acknowledge = lambda *words: (bench.learner.stop(), original(*words))[1]  # type: ignore[method-assign]
    bench.learner.run()
    assert bench.store.version == 2
    latest = bench.store.latest()
    assert latest is not None
    assert latest.payload == bench.learner.snapshot().payload
    assert Bench(tmp_path).learner.restored_updates == 1


def test_a_learner_that_was_superseded_leaves_versions_and_checkpoints_to_the_one_that_took_over(
    tmp_path: Path,
) -> None:
    """It has gone on from an older checkpoint, say: the newest one is then of the life that was given up."""
    first = Bench(tmp_path, "learner.publish_interval_s=3600")
    for _ in range(2):
        first.put(segment(16))
    assert first.learner.step()
    second = Learner(spec(), EXPERIENCE, first.queue, first.store, tmp_path, first.store.version)
    original = first.queue.acknowledge

    def taken_over(*words: object) -> bool:
        first.queue.ledger.revoke_open_leases(second._lease.consumer)
        return original(*words)  # type: ignore[arg-type]

    first.queue.acknowledge = taken_over  # type: ignore[method-assign, assignment]
    with pytest.raises(Closed, match="another life"):
        first.learner.run()
    assert first.store.version == second.version == 2
    assert checkpoint.load_latest(tmp_path) is None


def test_a_learner_that_can_reserve_no_version_at_its_end_saves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, "learner.publish_interval_s=3600")
    bench.put(segment(16))
    assert bench.learner.step()
    bench.learner._versions._num_reserved = bench.learner.version
    with full_disk(monkeypatch):
        bench.learner.stop()
        bench.learner.run()
    assert Bench(tmp_path).learner.restored_updates == 1


def test_a_pause_waits_for_room_for_the_number_of_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "UNWRITABLE_PAUSE_S", 0.01)
    bench = Bench(tmp_path, "learner.publish_interval_s=3600")
    for _ in range(2):
        bench.put(segment(8))
    assert bench.learner.step()
    bench.learner._versions._num_reserved = bench.learner.version
    paused: list[int] = []
    with full_disk(monkeypatch) as refusals:
        pausing = start_thread(lambda: paused.append(bench.learner.pause().version))
        wait_for(lambda: len(refusals) >= 3)
        assert paused == []
    pausing.join(60)
    assert paused == [2]
    assert bench.store.version == 2


def test_a_paused_learner_holds_its_weights_and_goes_on_where_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "learner.publish_interval_s=1000")
    thread = start_thread(bench.learner.run)
    bench.put(segment(16))
    wait_for(lambda: bench.learner.updates == 1)
    held = bench.learner.pause()
    latest = bench.store.latest()
    assert latest is not None
    assert held.payload == latest.payload  # what is held has been published, whatever publish_interval_s says
    again = bench.learner.republish(held)  # earlier weights may be published as the newest version
    assert (again.version, bench.store.version, again.sha256) == (held.version + 1, held.version + 1, held.sha256)
    bench.put(segment(16))
    assert bench.learner.pause().payload == held.payload
    assert bench.queue.ledger.get_account(A).queued == 1
    bench.learner.resume()
    wait_for(lambda: bench.learner.updates == 2)
    bench.learner.stop()
    thread.join(60)
    assert not thread.is_alive()


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


def open_mirror(store: Store, folder: Path) -> files.CheckpointMirror:
    return files.CheckpointMirror(StoredCheckpoints(store), folder, keep=2)


def fetch_newest(store: Store, folder: Path) -> dict[str, Any]:
    """On a host that has nothing."""
    open_mirror(store, folder).fetch_newest()
    loaded = files.load_latest(folder)
    assert loaded is not None
    return loaded.state


def test_a_mirror_skips_what_came_meanwhile_and_tries_again(tmp_path: Path, store: Store) -> None:
    mirror = open_mirror(store, tmp_path / "a")
    with down(store):
        for step in (1, 2):
            mirror.add(files.save(tmp_path / "a", step, {"step": step}))
            assert re.search(r"only in .*down", mirror.finish(0.1))
    for step in (3, 4):
        mirror.add(files.save(tmp_path / "a", step, {"step": step}))
        assert mirror.finish(TIMEOUT_S) == ""
    mirror.close()
    assert store.list_folders() == ["step-000000003", "step-000000004"]
    assert fetch_newest(store, tmp_path / "b") == {"step": 4}


def test_a_step_that_is_saved_again_is_whole_in_the_store_until_the_new_one_is(tmp_path: Path, store: Store) -> None:
    mirror = open_mirror(store, tmp_path / "a")
    mirror.add(files.save(tmp_path / "a", 1, {"saved": 1}))
    assert mirror.finish(TIMEOUT_S) == ""
    with down(store, "replace"):
        mirror.add(files.save(tmp_path / "a", 1, {"saved": 2}))
        assert "down" in mirror.finish(0.1)
        assert fetch_newest(store, tmp_path / "b") == {"saved": 1}
    assert mirror.finish(TIMEOUT_S) == ""
    mirror.close()
    assert fetch_newest(store, tmp_path / "c") == {"saved": 2}
    assert len(store.list_entries()) == 2


def test_what_was_recovered_from_a_lost_host_is_learnt(tmp_path: Path, store: Store) -> None:
    """Its versions were published after the newest checkpoint, or just before, and the new ones begin far above them.
    A third host learns what the second has published, too."""
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
        assert second.learner.counts["dropped"] == 0
        assert second.learner.counts["consumed"] >= 4
        assert 0 < second.learner.stats()["metrics"]["learner/policy_lag"] <= 8
        first = second


def test_a_learner_on_another_host_publishes_no_version_twice(tmp_path: Path, store: Store) -> None:
    """Neither does the first host, if the run returns there."""
    first = Bench(tmp_path / "a", store=store)
    first.learner.save()
    assert first.learner._checkpoints.finish_upload() == ""
    for _ in range(5):
        first.learner.try_publish()  # after its newest checkpoint
    used = {each.version for each in first.learner.take_published(0)}
    for folder in ("b", "a", "c"):
        queue = ExperienceQueue(64, Ledger())
        again = Learner(spec(), EXPERIENCE, queue, WeightStore(), tmp_path / folder, store=store, must_restore=True)
        again.try_publish()
        versions = [each.version for each in again.take_published(0)]  # also those that nobody recorded
        assert len(versions) == len({*versions})
        assert len({*versions} - used) == 2
        used |= {*versions}


def test_a_batch_grows_with_the_queue_only_where_experience_is_many_versions_old(tmp_path: Path) -> None:
    """Larger batches with as many updates for each sample learn less from it, and catch up in versions."""
    bench = Bench(tmp_path, "learner.batch_steps=16", "learner.max_batch_steps=64")
    for _ in range(8):
        bench.put(segment(16, version=bench.learner.version))
    assert bench.learner.step()
    assert bench.learner.counts["consumed"] == 1
    bench.learner._metrics["learner/policy_lag"] = 5.0
    assert bench.learner.step()
    assert bench.learner.counts["consumed"] == 5
