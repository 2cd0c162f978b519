"""Checkpoints on a store: uploaded in the background, read on a host without files, complete or absent."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket_server import bucket_environment, store
from failures import down
from shoal.checkpoint import Checkpointer
from shoal.errors import CheckpointError
from shoal.store import Store
from training.checkpoint_states import assert_equal, best_step, newest, state_of

__all__ = ["bucket_environment", "store"]

TIMEOUT_S = 120.0


@pytest.fixture
def opened(store: Store, tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Checkpointers on hosts by their name, which share nothing but the store."""
    found: list[Checkpointer] = []

    def open_on(host: str, **options: Any) -> Checkpointer:
        found.append(Checkpointer(tmp_path / host, **{"store": store, **options}))
        return found[-1]

    yield open_on
    for each in found:
        each.close()


def steps_in(store: Store) -> list[str]:
    """The checkpoints that are there, and the mark."""
    return sorted({entry.key.removesuffix("/manifest.json") for entry in store.list_entries() if is_last(entry.key)})


def is_last(key: str) -> bool:
    return key.endswith("/manifest.json") or key == "best.json"


def test_a_host_without_files_reads_what_another_has_uploaded(
    store: Store, opened: Callable[..., Checkpointer]
) -> None:
    first = opened("a", keep=2)
    for step in (1, 2, 3, 4):
        first.save(step, state_of(step), {"position": 10 * step}, best=step == 1)
        first.finish_uploads(TIMEOUT_S)
    assert steps_in(store) == ["best.json", "step-000000001", "step-000000003", "step-000000004"]
    second = opened("b")
    found, state = newest(second), state_of(0)
    extras = second.load(found, state)
    assert (found.step, found.damaged, extras.extras) == (4, [], {"position": 40})
    assert_equal(state, state_of(4))
    assert best_step(second) == 1
    second.save(5, state_of(5), best=True)
    second.finish_uploads(TIMEOUT_S)
    assert steps_in(store) == ["best.json", "step-000000004", "step-000000005"]
    assert best_step(opened("c")) == 5


def test_a_return_to_an_older_step_removes_the_later_ones(store: Store, opened: Callable[..., Checkpointer]) -> None:
    first = opened("a", keep=3)
    for step in (10, 20, 30):
        first.save(step, state_of(step))
        first.finish_uploads(TIMEOUT_S)
    second = opened("b", keep=3)
    second.load(second.find(10), state_of(0))
    second.save(15, state_of(15))
    second.finish_uploads(TIMEOUT_S)
    assert steps_in(store) == ["step-000000010", "step-000000015"]


def test_a_process_that_was_taken_for_dead_removes_nothing_of_the_one_that_resumed_the_run(
    store: Store, opened: Callable[..., Checkpointer]
) -> None:
    first = opened("a", keep=1)
    assert first.latest() is None
    first.save(10, state_of(10))
    first.finish_uploads(TIMEOUT_S)
    second = opened("b", keep=1)
    second.load(newest(second), state_of(0))
    second.save(30, state_of(30))
    second.finish_uploads(TIMEOUT_S)
    store.write("step-000000040/uploading-1/shard-00000-of-00001.safetensors", b"of the second")
    first.save(20, state_of(20))  # when its host reaches the store again
    first.finish_uploads(TIMEOUT_S)
    assert "step-000000030" in steps_in(store)
    assert store.list_entries("step-000000040")
    state = state_of(0)
    third = opened("c")
    third.load(newest(third), state)
    assert_equal(state, state_of(30))


def test_a_step_that_is_saved_again_replaces_the_first(store: Store, opened: Callable[..., Checkpointer]) -> None:
    first = opened("a")
    for number in (1, 2):
        first.save(7, state_of(number), best=number == 2)
    first.finish_uploads(TIMEOUT_S)
    assert len({entry.key.split("/")[1] for entry in store.list_entries("step-000000007")}) == 2  # with the manifest
    second, state = opened("b"), state_of(0)
    second.load(newest(second), state)
    assert_equal(state, state_of(2))


def test_files_without_a_manifest_are_no_checkpoint_and_are_removed(
    store: Store, opened: Callable[..., Checkpointer]
) -> None:
    store.write("step-000000009/dead-1/shard-00000-of-00001.safetensors", b"half")
    store.write("step-000000001/dead-2/index.json", b"{}")
    first = opened("a")
    assert first.latest() is None
    first.save(1, state_of(1))
    first.finish_uploads(TIMEOUT_S)
    assert not [entry.key for entry in store.list_entries() if "dead" in entry.key]


def test_damage_in_the_store_is_named_and_the_one_before_is_used(
    store: Store, opened: Callable[..., Checkpointer]
) -> None:
    first = opened("a")
    for step in (1, 2):
        first.save(step, state_of(step))
        first.finish_uploads(TIMEOUT_S)
    (shard,) = (entry.key for entry in store.list_entries("step-000000002") if "shard" in entry.key)
    store.write(shard, b"damaged")
    found = newest(opened("b"))
    assert found.step == 1
    assert "shard-00000-of-00001.safetensors" in found.damaged[0]
    assert newest(first).step == 2  # whose own files are intact


def test_a_store_that_is_down_stops_no_save_and_has_the_newest_and_the_best_later(
    store: Store, opened: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    first = opened("a", keep=1)
    with down(store):
        for step in (1, 2, 3, 4):
            first.save(step, state_of(step), best=step == 2)
        with pytest.raises(
            CheckpointError, match=r"steps 2, 4 are not in .*, only in .*/a on .*down.*: resume the run there"
        ):
            first.finish_uploads(TIMEOUT_S)
        assert "down" in first.upload_failure
        assert steps_in(store) == []
        assert newest(first).step == 4
        kept = {path.name for path in (tmp_path / "a").glob("step-*")}  # and 3, if it was in flight at the last save
        assert {"step-000000002", "step-000000004"} <= kept <= {f"step-00000000{step}" for step in (2, 3, 4)}
    first.save(5, state_of(5))
    first.finish_uploads(TIMEOUT_S)
    assert first.upload_failure == ""
    assert steps_in(store) == ["best.json", "step-000000002", "step-000000005"]
    assert best_step(opened("b")) == 2


def test_another_process_on_the_host_goes_on_from_what_was_not_uploaded(
    store: Store, opened: Callable[..., Checkpointer]
) -> None:
    first = opened("a")
    first.save(1, state_of(1))
    first.finish_uploads(TIMEOUT_S)
    with down(store):
        first.save(2, state_of(2), best=True)
        with pytest.raises(CheckpointError, match="step 2 are not in"):
            first.finish_uploads(TIMEOUT_S)
        again = opened("a")
        assert (newest(again).step, best_step(again)) == (2, 2)
        again.load(newest(again), state_of(0))
        assert newest(opened("b")).step == 1
    again.finish_uploads(TIMEOUT_S)
    assert steps_in(store) == ["best.json", "step-000000001", "step-000000002"]
    again.save(3, state_of(3))
    again.finish_uploads(TIMEOUT_S)
    assert (newest(opened("b")).step, best_step(opened("b"))) == (3, 2)


def test_a_store_that_cannot_be_read_is_an_error_only_where_nothing_is_on_the_disk(
    opened: Callable[..., Checkpointer], store: Store
) -> None:
    first = opened("a")
    first.save(1, state_of(1), best=True)
    first.finish_uploads(TIMEOUT_S)
    with down(store, "list_entries", "read", "read_tagged"):
        assert (newest(first).step, best_step(first)) == (1, 1)
        with pytest.raises(CheckpointError, match="the store is down"):
            opened("b").latest()
        with pytest.raises(CheckpointError, match="the store is down"):
            opened("b").best()


def test_files_that_were_lost_here_are_downloaded_again(store: Store, opened: Callable[..., Checkpointer]) -> None:
    first = opened("a")
    first.save(1, state_of(1))
    first.finish_uploads(TIMEOUT_S)
    path = newest(first).path
    next(path.glob("shard-*")).write_bytes(b"damaged")
    state = state_of(0)
    first.load(newest(first), state)
    assert_equal(state, state_of(1))
    shutil.rmtree(path)
    first.load(newest(first), state)
