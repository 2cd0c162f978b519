"""The log of batches: its bytes, what a kill or a power cut leaves of it, and what it is not replayed without."""

from pathlib import Path

import pytest

from failures import full_disk
from shoal.errors import CheckpointError
from shoal.libs.stream.batch_log import BatchLog, LoggedBatch, read_batches
from shoal.libs.stream.messages import Message

BATCHES = [
    LoggedBatch(1, [Message("oven", (21.5,), 12.25, "p", 1)]),
    LoggedBatch(2, [Message("oven", (22.5, -1.0), 13.0, "p", 2), Message("hall", (1.0,), 13.0, "", 300)]),
    LoggedBatch(3, []),
]
FIRST = (
    b" \0\0\0\x9elt|"
    b"\x92\x01\x91\x96\xa4oven\x91\xcb@5\x80\0\0\0\0\0\xcb@(\x80\0\0\0\0\0\xa1p\x01\xc2"
)  # fmt: skip
SECOND = (
    b"G\0\0\0>\xa5c}"
    b"\x92\x02\x92\x96\xa4oven\x92\xcb@6\x80\0\0\0\0\0\xcb\xbf\xf0\0\0\0\0\0\0\xcb@*\0\0\0\0\0\0\xa1p\x02\xc2"
    b"\x96\xa4hall\x91\xcb?\xf0\0\0\0\0\0\0\xcb@*\0\0\0\0\0\0\xa0\xcd\x01,\xc2"
)
THIRD = b"\x03\0\0\0\x0bu\xf4\xda\x92\x03\x90"
FILES = {"batches-000000000001.log": FIRST, "batches-000000000002.log": SECOND + THIRD}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log whose first file was ended by a commit."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def append(folder: Path, batches: list[LoggedBatch]) -> None:
    log = BatchLog(folder)
    for batch in batches:
        log.append(batch)
    log.close()


def test_files_have_the_bytes_that_they_had(tmp_path: Path, folder: Path) -> None:
    assert BatchLog(folder).recover(0) == BATCHES
    log = BatchLog(tmp_path / "log")
    log.append(BATCHES[0])
    log.sync(log.rotate())
    append(tmp_path / "log", BATCHES[1:])
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()} == FILES


def test_a_record_that_is_torn_or_damaged_at_any_byte_is_as_if_it_were_never_written(folder: Path) -> None:
    """By a kill, by a power cut that leaves zeros, by a bit of the disk."""
    newest, content = folder / "batches-000000000002.log", SECOND + THIRD
    for at in range(len(content)):
        for damage in (b"", bytes(100), bytes([content[at] ^ 1]) + content[at + 1 :]):
            newest.write_bytes(content[:at] + damage)
            num_complete = 1 + (at >= len(SECOND))
            assert BatchLog(folder).recover(0) == BATCHES[:num_complete]
            append(folder, BATCHES[num_complete:])
            assert list(read_batches(folder)) == BATCHES
            (folder / "batches-000000000003.log").unlink(missing_ok=True)


def test_a_log_that_lacks_a_batch_is_not_replayed(folder: Path) -> None:
    BatchLog(folder).remove_before(1)
    assert list(read_batches(folder, after=1)) == BATCHES[1:]
    assert list(read_batches(folder, after=2)) == BATCHES[2:]
    with pytest.raises(CheckpointError, match="batch 2 follows, where 1 was expected"):
        list(read_batches(folder))
    (folder / "batches-000000000002.log").write_bytes(b"damaged")
    append(folder, [LoggedBatch(4, [])])
    with pytest.raises(CheckpointError, match="4 follows, where 2"):
        list(read_batches(folder, after=1))


def test_a_power_cut_may_take_the_end_of_a_file_and_leave_the_next_one(tmp_path: Path) -> None:
    """The files of two commits, of which only the second one had reached the disk."""
    first, second = tmp_path / "batches-000000000001.log", tmp_path / "batches-000000000003.log"
    for at in range(len(FIRST + SECOND)):
        num_complete = int(at >= len(FIRST))
        for damage in (b"", bytes(100)):
            first.write_bytes((FIRST + SECOND)[:at] + damage)
            second.write_bytes(THIRD)
            with pytest.raises(CheckpointError, match=f"no batch {num_complete + 1}, and"):
                BatchLog(tmp_path).recover(0, synced=num_complete + 1)  # a checkpoint has acknowledged what is lost
            assert second.exists()
            assert BatchLog(tmp_path).recover(0, synced=num_complete) == BATCHES[:num_complete]
            append(tmp_path, BATCHES[num_complete:])
            assert list(read_batches(tmp_path)) == BATCHES
            (tmp_path / "batches-000000000002.log").unlink(missing_ok=True)


def test_a_batch_that_the_disk_takes_in_part_is_an_error(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    with full_disk(len(SECOND) - 1), pytest.raises(OSError, match="too large"):
        log.append(BATCHES[1])
    log.close()
