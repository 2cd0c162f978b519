"""The Checkpointer in one process: what damage, full disks and crashes do, and what is said of them."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import Checkpointer, directory
from shoal.errors import CheckpointError, Closed, ConfigError
from training.checkpoint_states import Gate, assert_equal, best_step, names, newest, state_of
from waiting import wait_for


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a shard": (lambda path: next(path.glob("shard-*")).write_bytes(b"half"), "shard-.* has 4 bytes instead of"),
    "a flipped bit": (lambda path: flip(next(path.glob("shard-*"))), "shard-.* does not match its checksum"),
    "no shard": (lambda path: next(path.glob("shard-*")).unlink(), "shard-.* cannot be read .No such file"),
    "a flipped bit in the index": (lambda path: flip(path / "index.json"), "index.json does not match its checksum"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read .No such file"),
    "garbage": (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00garbage"), "manifest.json is not JSON"),
    "another manifest": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not one of format"),
    "a changed manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"step": 2', '"step": 3')
        ),
        "manifest.json does not match its own checksum",
    ),
    "another name": (lambda path: path.rename(path.with_name("step-000000003")), "manifest.json is of step 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_reason_and_the_one_before_is_used(
    checkpointer: Checkpointer, kind: str
) -> None:
    checkpointer.save(1, state_of(1))
    checkpointer.save(2, state_of(2))
    path = newest(checkpointer).path
    inflict, reason = DAMAGES[kind]
    inflict(path)
    found = newest(checkpointer)
    assert found.step == 1
    (damage,) = found.damaged
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(damage)
    assert damage.startswith("step-00000000")
    state = state_of(0)
    checkpointer.load(found, state)
    assert_equal(state, state_of(1))
    checkpointer.save(2, state_of(3))  # a good one takes the bad one's place
    assert newest(checkpointer).damaged == []


@pytest.mark.parametrize("again", [[25, 30, 40, 50], [30, 40]])
def test_the_best_one_of_a_timeline_that_was_given_up_is_not_taken_for_one_of_the_next(
    checkpointer: Checkpointer, again: list[int]
) -> None:
    for step in (10, 20, 30):
        checkpointer.save(step, state_of(step), best=step == 30)
    assert best_step(checkpointer) == 30
    (newest(checkpointer).path / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000000030 in .* index\.json cannot be read"):
        checkpointer.best()
    with Checkpointer(checkpointer.folder, keep=2) as reopened:
        assert newest(reopened).step == 20
        for step in again:
            reopened.save(step, state_of(step + 0.5))
            assert best_step(reopened) is None
        assert names(reopened) == ["best.json", *(f"step-{step:09d}" for step in again[-2:])]  # nothing else is kept
        reopened.save(60, state_of(60), best=True)
        reopened.save(70, state_of(70))
        reopened.save(80, state_of(80))
        assert best_step(reopened) == 60


def test_what_was_passed_over_does_not_count_among_those_that_are_kept(checkpointer: Checkpointer) -> None:
    for step in (10, 20, 30):
        checkpointer.save(step, state_of(step), best=step == 30)
    checkpointer.wait()
    next((checkpointer.folder / "step-000000030").glob("shard-*")).write_bytes(b"half")
    with Checkpointer(checkpointer.folder, keep=2) as reopened:
        found = newest(reopened)
        reopened.load(found, state_of(0))
        assert found.step == 20
        reopened.save(40, state_of(40))
        assert names(reopened) == ["best.json", "step-000000020", "step-000000040"]
        assert best_step(reopened) is None  # the best one of that timeline could not be read anyway
        reopened.save(50, state_of(50), best=True)
        reopened.save(60, state_of(60))
        assert names(reopened) == ["best.json", "step-000000050", "step-000000060"]


def test_a_copy_that_somebody_has_made_is_left_alone(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    shutil.copytree(newest(checkpointer).path, checkpointer.folder / "step-000000001-good")
    for step in (2, 3, 4):
        checkpointer.save(step, state_of(step))
    assert names(checkpointer) == ["step-000000001-good", "step-000000003", "step-000000004"]
    assert (newest(checkpointer).step, newest(checkpointer).damaged) == (4, [])


def test_steps_of_ten_digits_come_after_those_of_nine(checkpointer: Checkpointer) -> None:
    for step in (999_999_999, 1_000_000_000):
        checkpointer.save(step, state_of(1))
    assert names(checkpointer) == ["step-1000000000", "step-999999999"]
    assert newest(checkpointer).step == 1_000_000_000


def test_nothing_but_damage_is_an_error(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    (newest(checkpointer).path / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000000001: index\.json cannot be read"):
        checkpointer.latest()


@pytest.mark.parametrize("full", ["shard", "index.json", "manifest.json"])
def test_a_full_disk_is_said_by_the_next_save_and_the_older_checkpoint_stays(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    with monkeypatch.context() as patch:  # a file of which the kernel says that there is no space left
        if full == "shard":
            patch.setattr("shoal.checkpoint.checkpointer.shard_name", lambda rank, size: "/dev/full")
        else:
            name = "INDEX" if full == "index.json" else "MANIFEST"
            patch.setattr(f"shoal.checkpoint.manifest.{name}", "/dev/full")
        checkpointer.save(2, state_of(2, width=6))  # another shape: planned anew
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left on device"):
            checkpointer.save(3, state_of(3))
    assert names(checkpointer) == ["step-000000001"]
    assert newest(checkpointer).step == 1
    checkpointer.save(3, state_of(3))
    assert newest(checkpointer).step == 3


def test_a_disk_without_room_for_the_note_of_the_best_one_refuses_all_of_it(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer.save(1, state_of(1), best=True)
    checkpointer.wait()
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if "best.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        checkpointer.save(2, state_of(2), best=True)
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left on device"):
            checkpointer.wait()
    assert sorted(path.name for path in checkpointer.folder.iterdir()) == ["best.json", "step-000000001"]
    assert best_step(checkpointer) == 1
    checkpointer.save(3, state_of(3), best=True)
    assert best_step(checkpointer) == 3
    assert sorted(path.name for path in newest(checkpointer).path.iterdir()) == [
        "index.json", "manifest.json", "shard-00000-of-00001.safetensors",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file", asynchronous=False)
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        checkpointer.save(1, state_of(1))
    checkpointer.close()


def test_a_folder_that_is_not_shared_is_said(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "write_file", lambda path, pieces: directory.FileChecksum(0, ""))  # on another disk
    checkpointer.save(1, state_of(1))
    with pytest.raises(CheckpointError, match="rank 0 does not see the shard of rank 0"):
        checkpointer.wait()


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", range(6))
def test_a_crash_at_any_moment_leaves_the_checkpoint_before_or_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        passed = iter(range(100))

        def crash_here(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*words: Any) -> Any:
                if next(passed) == point:
                    raise Crash
                return real(*words)

            return wrapped

        with monkeypatch.context() as patch:
            for name in ("write_file", "sync_folder", "delete_old_checkpoints"):
                patch.setattr(directory, name, crash_here(getattr(directory, name)))
            checkpointer.save(2, state_of(2))
            with pytest.raises(Crash):
                checkpointer.wait()
    with Checkpointer(tmp_path, keep=1) as again:
        found = newest(again)
        assert (found.step, found.damaged) == (1 if point < 4 else 2, [])
        state = state_of(0)
        again.load(found, state)
        assert_equal(state, state_of(found.step))
        again.save(3, state_of(3))
        assert names(again) == ["step-000000003"]  # nothing is left of the draft


@pytest.mark.parametrize("point", [0, 1])
def test_a_crash_while_a_step_is_saved_again_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        passed, rename = iter(range(100)), Path.rename

        def crash_here(path: Path, target: Path) -> Path:
            if next(passed) == point:
                raise Crash
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", crash_here)
            checkpointer.save(1, state_of(2), best=True)
            with pytest.raises(Crash):
                checkpointer.wait()
    with Checkpointer(tmp_path, keep=1) as again:
        found, state = newest(again), state_of(0)
        again.load(found, state)
        assert_equal(state, state_of(1))
        again.save(1, state_of(3))
        assert names(again) == ["step-000000001"]


def test_a_save_that_does_not_end_is_an_error_after_the_timeout(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path, timeout_s=0.01) as checkpointer:
        checkpointer.save(1, state_of(1))
        with pytest.raises(CheckpointError, match=r"has not ended within 0\.01 s"):
            checkpointer.wait()
        gate.open.set()
        wait_for(lambda: checkpointer._in_flight and checkpointer._in_flight.done(), what="the save")


def test_close_waits_says_what_failed_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state_of(1))
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(Closed):
        checkpointer.save(2, state_of(2))
    with Checkpointer(tmp_path) as again:
        assert newest(again).step == 1
    monkeypatch.setattr("shoal.checkpoint.manifest.INDEX", "/dev/full")
    with pytest.raises(CheckpointError, match="No space left"), Checkpointer(tmp_path) as failing:
        failing.save(2, state_of(2))
    failing = Checkpointer(tmp_path)
    failing.save(2, state_of(2))
    failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # hides nothing more important
    with pytest.raises(ConfigError, match="keep"):
        Checkpointer(tmp_path, keep=0)
