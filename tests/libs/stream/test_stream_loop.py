"""Group commit: killed at each step of the protocol, a stream ends in the same weights, each message learnt once. Its
log of batches."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stream_case import SMALL, FakeBroker, FakeSource, differing_tensors, make_messages, relearn

from failures import full_disk
from shoal.checkpoint import files
from shoal.errors import CheckpointError, ConfigError, SpecMismatch
from shoal.libs.stream import loop as loop_module
from shoal.libs.stream.batch_log import BatchLog, LoggedBatch, read_batches
from shoal.libs.stream.loop import StreamLoop
from shoal.libs.stream.messages import Message
from shoal.libs.stream.spec import CommitSpec, SensorTopicSpec, StreamSpec
from shoal.libs.stream.trainer import OnlineTrainer, SensorForecast
from shoal.sources.source import Delivery, MalformedPayload

COMMIT = CommitSpec(messages=6, interval_s=1e6, max_batch=4, keep_log=True)
NUM_MESSAGES = 24


def save_learnt(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """`files.save`, which is followed by acknowledgements: of what was learnt, not only answered."""
    assert state["trainer"]["pending"] == []
    return files.save(folder, step, state, keep)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may act on it."""


class Killer:
    """Raises Killed at the n-th step of the protocol, counted from 1; 0: never."""

    def __init__(self, at: int) -> None:
        self.at, self.num_steps = at, 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps == self.at:
            raise Killed

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a step before and after it."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.step()
            result = function(*args, **kwargs)
            self.step()
            return result

        return called


def attempt(
    broker: FakeBroker,
    folder: Path,
    killer: Killer,
    seed: int = 0,
    publish: Callable[[list[SensorForecast]], None] = lambda answers: None,
) -> StreamLoop | None:
    """One process: the loop after it has learnt all; None if it was killed."""
    source, trainer = FakeSource(broker, seed), OnlineTrainer(SMALL)
    loop = StreamLoop(trainer, source, folder, COMMIT, publish)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((BatchLog, "append"), (BatchLog, "sync")):
            patch.setattr(owner, name, killer.around(getattr(owner, name)))
        patch.setattr(
            loop_module, "files", SimpleNamespace(load_latest=files.load_latest, save=killer.around(save_learnt))
        )
        patch.setattr(trainer, "_learn", killer.around(trainer._learn))
        patch.setattr(trainer, "process", killer.around(trainer.process))
        patch.setattr(source, "commit", killer.around(source.commit))
        try:
            loop.run(lambda: False)
        except Killed:
            return None
    return loop


def require_learnt_once(broker: FakeBroker, folder: Path, loop: StreamLoop) -> None:
    assert broker.waiting == []
    learnt = [message.sequence for batch in read_batches(folder / "log") for message in batch.messages]
    assert sorted(learnt) == list(range(1, NUM_MESSAGES + 1))
    undisturbed = relearn(folder).state_dict()
    assert undisturbed["pending"] == []
    assert differing_tensors(loop.trainer.state_dict(), undisturbed) == []
    stored = files.load_latest(folder / "checkpoints")
    assert stored is not None
    assert differing_tensors(stored.state["trainer"], undisturbed) == []


def make_broker() -> FakeBroker:
    messages: list[Any] = make_messages(NUM_MESSAGES)
    messages.insert(5, MalformedPayload("s0", "is no number", "{"))
    return FakeBroker(messages)


@pytest.mark.soak
def test_killed_at_each_step_it_ends_in_the_same_weights(tmp_path: Path) -> None:
    at = 0
    is_over = False
    num_pauses = 0
    while not is_over:
        at += 1
        broker, folder = make_broker(), tmp_path / str(at)
        is_over = attempt(broker, folder, Killer(at)) is not None
        done = attempt(broker, folder, Killer(0), seed=1)
        assert done is not None
        require_learnt_once(broker, folder, done)
        num_pauses += sum(not batch.messages for batch in read_batches(folder / "log"))
    assert at > 60  # steps that an undisturbed run has
    assert num_pauses > at  # updates in a pause of the stream, or before an acknowledgement


def test_readings_of_one_payload_are_learnt_once_each(tmp_path: Path) -> None:
    pair = [Message(f"kitchen/{name}", (value,), 0.0, "p", 1) for name, value in (("heat", 21.0), ("damp", 40.0))]
    for num_duplicates in (2, 3):
        loop = StreamLoop(OnlineTrainer(SMALL), FakeSource(FakeBroker([])), tmp_path, COMMIT)
        loop.recover()  # the second one from the log of the first
        loop.take(Delivery(pair + pair))
        loop.take(Delivery(pair))
        assert (loop.trainer.totals.num_messages, loop.deduplicator.num_duplicates) == (2, num_duplicates)
        loop._log.close()


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    """Answers of processes that were killed, and of those that took over, are those of a replay of the log."""
    chance, broker = random.Random(seed), make_broker()
    answers = list[SensorForecast]()
    for number in range(8):
        attempt(broker, tmp_path, Killer(chance.randint(1, 25)), number, answers.extend)
    done = attempt(broker, tmp_path, Killer(0), 0, answers.extend)
    assert done is not None
    require_learnt_once(broker, tmp_path, done)
    assert done.malformed.total() >= 1
    replayed, trainer = list[SensorForecast](), OnlineTrainer(SMALL)
    for batch in read_batches(tmp_path / "log"):
        trainer.process(batch.messages, replayed.extend)
    assert len(replayed) == NUM_MESSAGES < len(answers)
    assert set(answers) == set(replayed)


def test_nothing_is_acknowledged_while_no_checkpoint_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker()
    num_waiting = len(broker.waiting)
    save, events = files.save, []

    def fail(*args: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(files, "save", fail)
    loop = StreamLoop(
        OnlineTrainer(SMALL), FakeSource(broker), tmp_path, COMMIT, report=lambda kind, **_: events.append(kind)
    )
    with pytest.raises(CheckpointError, match="full"):
        loop.run(lambda: False)
    assert len(broker.waiting) == num_waiting
    assert "checkpoint_failed" in events
    monkeypatch.setattr(files, "save", save)
    done = attempt(broker, tmp_path, Killer(0))
    assert done is not None
    require_learnt_once(broker, tmp_path, done)


def test_a_damaged_checkpoint_is_made_up_for_by_the_log(tmp_path: Path) -> None:
    broker = make_broker()
    spec = COMMIT.model_copy(update={"keep_log": False})
    StreamLoop(OnlineTrainer(SMALL), FakeSource(broker), tmp_path, spec).run(lambda: False)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    good = files.load_latest(tmp_path / "checkpoints")
    assert good is not None
    (newest / "state.pt").write_bytes(b"damaged")
    loop = StreamLoop(OnlineTrainer(SMALL), FakeSource(broker), tmp_path, spec)
    loop.recover()
    assert differing_tensors(loop.trainer.state_dict(), good.state["trainer"]) == []


def test_after_a_power_cut_that_has_left_the_newest_file_alone_each_message_is_learnt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker()
    with monkeypatch.context() as patch:
        patch.setattr(files, "save", lambda *_: (_ for _ in ()).throw(CheckpointError("the power was cut")))
        with pytest.raises(CheckpointError, match="cut"):
            StreamLoop(OnlineTrainer(SMALL), FakeSource(broker), tmp_path, COMMIT).run(lambda: False)
    first, _ = sorted((tmp_path / "log").iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    done = attempt(broker, tmp_path, Killer(0), seed=1)
    assert done is not None
    require_learnt_once(broker, tmp_path, done)


def test_a_log_that_lacks_what_was_acknowledged_is_an_error(tmp_path: Path) -> None:
    """The newest checkpoint is damaged, and so is the log since the one before."""
    broker = make_broker()
    done = attempt(broker, tmp_path, Killer(0))
    assert done is not None
    newest, before = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    (newest / "state.pt").write_bytes(b"damaged")
    (tmp_path / f"log/batches-{int(before.name[5:]) + 1:012d}.log").unlink()
    loop = StreamLoop(OnlineTrainer(SMALL), FakeSource(broker), tmp_path, COMMIT)
    with pytest.raises(CheckpointError, match="were acknowledged"):
        loop.recover()


def test_another_network_does_not_take_up_the_stream(tmp_path: Path) -> None:
    broker = make_broker()
    StreamLoop(OnlineTrainer(SMALL), FakeSource(broker), tmp_path, COMMIT).run(lambda: False)
    other = OnlineTrainer(SMALL.model_copy(update={"hidden": 5}))
    with pytest.raises(SpecMismatch, match=r"online\.hidden"):
        StreamLoop(other, FakeSource(broker), tmp_path, COMMIT).recover()


def test_a_group_that_would_never_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"commit\.messages=101 .*receive_maximum=100"):
        StreamSpec(mqtt=SensorTopicSpec(receive_maximum=100), commit=CommitSpec(messages=101))
    assert StreamSpec(mqtt=SensorTopicSpec(receive_maximum=100), commit=CommitSpec(messages=100))


# -- the log of batches: its bytes, and what a kill or a power cut leaves of it


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
