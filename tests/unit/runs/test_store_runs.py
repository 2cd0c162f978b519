"""Runs in a store: mirrored while they go on, read and resumed by another host, which shares nothing else."""

import logging
import socket
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bucket_server import bucket_environment, open_kind  # noqa: F401 - a fixture
from failures import down
from shoal import runs
from shoal.errors import RunError
from shoal.runs import Status
from shoal.runs.record import removal, store_copies, store_mirror
from shoal.runs.record.store_mirror import HEADS, RunHead, decode_head, head_key, read_head, record_key
from shoal.store import Store, open_store
from shoal.store.folder import FolderStore
from typed import said
from waiting import wait_for

SPEC = "environment: CartPole-v1\nlearner:\n  lr: 0.001\n"
MoveTo = Callable[[str], None]


BOTH = pytest.mark.parametrize("store", ["folder", "bucket"], indirect=True)


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.soak)])  # tests of stores compare both
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    opened = open_kind(request, tmp_path, monkeypatch)
    monkeypatch.setenv("SHOAL_STORE", opened.url)
    return opened


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_mirror, "TOUCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(store_mirror, "RECORD_INTERVAL_S", 0.0)
    monkeypatch.setattr(store_mirror, "MAX_SHARE", 1.0)
    monkeypatch.setattr(store_copies, "REFRESH_INTERVAL_S", 0.0)


@pytest.fixture
def move_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MoveTo]:
    """Makes this process one of another host."""

    def move(host: str) -> None:
        monkeypatch.setenv("SHOAL_HOME", str(tmp_path / host))
        monkeypatch.setattr(socket, "gethostname", lambda: host)

    move("one")
    yield move
    move("one")


def record_ended_run(name: str = "ended") -> None:
    with runs.create("cartpole", SPEC, name) as recorder:
        recorder.log(1, {"loss": 2.0})
        recorder.log(2, {"loss": float("nan")})
        recorder.record_event("noticed", what="something")
        recorder.record_model("pole", 1, ["champion"])
        (recorder.folder / "pictures").mkdir()
        (recorder.folder / "pictures" / "first.png").write_bytes(b"png")


def make_lost(store: Store, monkeypatch: pytest.MonkeyPatch, run_id: str = "lost") -> None:
    """A run whose process is gone, long ago by the store's clock."""
    recorder = runs.create("cartpole", SPEC, run_id)
    recorder.log(1, {"loss": 2.0})
    recorder.flush()
    wait_for(lambda: is_mirrored(store, recorder), timeout_s=60)
    kill(recorder)
    set_age(monkeypatch, 100.0)


def kill(recorder: runs.RunRecorder) -> None:
    """End its threads as kill -9 would."""
    for mirror in (recorder._store_mirror._records, recorder._store_mirror._heartbeats, recorder._writer):
        mirror._bring = lambda: False
        assert mirror.close(60)
    for each in recorder._mirrors:
        each.close()
    recorder._connection.execute("UPDATE runs SET heartbeat_at = 0")  # its number is that of a living process
    recorder._connection.close()


def set_age(monkeypatch: pytest.MonkeyPatch, age_s: float) -> None:
    """Make the store's clock go on by so many seconds."""
    list_heads = store_copies._list_heads

    def list_older(store: Store) -> object:
        listed, now_s = list_heads(store)
        return listed, now_s + age_s

    monkeypatch.setattr(store_copies, "_list_heads", list_older)


def has_record(store: Store, run_id: str) -> bool:
    try:
        return bool(read_head(store, run_id).record)
    except FileNotFoundError:
        return False


def is_mirrored(store: Store, recorder: runs.RunRecorder) -> bool:
    """Whether the store has all that is recorded: its first record may be older than the first values."""
    mirror = recorder._store_mirror
    is_written = not mirror._is_changed and mirror._records.flush(60)
    return (
        is_written
        and has_record(store, recorder.id)
        and read_head(store, recorder.id).revision == mirror._head.revision
    )


def test_a_run_is_read_on_another_host(store: Store, move_to: MoveTo) -> None:
    record_ended_run()
    here = runs.load("ended")
    move_to("two")
    (copy,) = runs.list_runs()
    assert (copy.id, copy.status, copy.copied_from, copy.host) == ("ended", Status.FINISHED, "one", "one")
    assert here.copied_from is None
    for read in (lambda run: run.metrics(), lambda run: run.events(), lambda run: run.models()):
        assert read(copy).equals(read(here))
    assert copy.best() == here.best() == ("loss", 2.0)
    assert (copy.folder / "spec.yaml").read_text() == SPEC
    assert (copy.folder / "pictures" / "first.png").read_bytes() == b"png"
    assert copy.folder != here.folder
    shown = said("runs ended")
    assert "copy from the store" in shown
    assert runs.load("ended") == copy  # a second look changes nothing


@BOTH
def test_a_run_that_goes_on_is_followed_from_another_host(store: Store, move_to: MoveTo) -> None:
    with runs.create("cartpole", SPEC, "living") as recorder:
        recorder.log(1, {"loss": 2.0})
        move_to("two")
        wait_for(lambda: "living" in [run.id for run in runs.list_runs()], timeout_s=60)
        wait_for(lambda: runs.load("living").latest() == {"loss": 2.0}, timeout_s=60)
        assert runs.load("living").status is Status.RUNNING
        recorder.log(2, {"loss": 1.0})
        wait_for(lambda: runs.load("living").latest() == {"loss": 1.0}, timeout_s=60)
        with pytest.raises(RunError, match=r"still running .* on one"):
            runs.reopen("living")
        with pytest.raises(RunError, match="still running"):
            removal.remove_runs([runs.load("living")])
        assert runs.list_running() == []  # of this host
    wait_for(lambda: runs.load("living").status is Status.FINISHED, timeout_s=60)


def test_clocks_of_hosts_may_differ(store: Store, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with runs.create("cartpole", SPEC, "living"):
        wait_for(lambda: has_record(store, "living"), timeout_s=60)
        move_to("two")
        for skew_s in (-3600.0, 3600.0):
            monkeypatch.setattr(store_copies.time, "time", lambda skew_s=skew_s: now() + skew_s)
            assert runs.load("living").status is Status.RUNNING
        monkeypatch.setattr(store_copies.time, "time", now)
        set_age(monkeypatch, 100.0)  # no heartbeat for so long, by the store's clock
        assert runs.load("living").status is Status.LOST


def test_a_lost_run_goes_on_on_another_host(store: Store, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lost(store, monkeypatch)
    move_to("two")
    assert runs.load("lost").status is Status.LOST
    with runs.reopen("lost") as recorder:
        recorder.log(2, {"loss": 1.0})
    resumed = runs.load("lost")
    assert (resumed.copied_from, resumed.host, resumed.incarnation) == (None, "two", 2)
    head = read_head(store, "lost")
    assert (head.host, head.incarnation, head.record) == ("two", 2, record_key("lost", 2))
    assert [entry.key for entry in store.list_entries("runs/lost")] == [head.record]
    move_to("one")
    back = runs.load("lost")
    assert (back.copied_from, back.status, list(back.metrics()["loss"])) == ("two", Status.FINISHED, [2.0, 1.0])


def test_a_process_that_was_taken_for_dead_records_no_more(
    store: Store, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = runs.create("cartpole", SPEC, "both")
    wait_for(lambda: has_record(store, "both"), timeout_s=60)
    set_age(monkeypatch, 100.0)
    move_to("two")

    def resume() -> runs.RunRecorder | None:
        with suppress(RunError):  # it lives: a heartbeat of its may come between the claim's reading and writing
            return runs.reopen("both")
        return None

    with wait_for(resume, timeout_s=60):
        wait_for(lambda: stopped._store_mirror is not None and stopped._store_mirror.problem, timeout_s=60)
        with pytest.raises(RunError, match=r"another process's in the store .* on two"):
            stopped.heartbeat()
    with pytest.raises(RunError, match="another process's"):
        stopped.close()


@BOTH
def test_of_hosts_that_resume_a_run_at_once_one_wins(
    store: Store, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_lost(store, monkeypatch)
    rows = []
    for host in ("two", "three", "four"):
        move_to(host)
        runs.load("lost")
        connection = sqlite3.connect(tmp_path / host / "runs.sqlite")
        connection.row_factory = sqlite3.Row
        rows.append((tmp_path / host, connection.execute("SELECT * FROM runs").fetchone()))
        connection.close()
    start = threading.Barrier(len(rows))

    def resume(home: Path, row: sqlite3.Row) -> str:
        start.wait(60)
        try:
            store_copies.claim(home, row, home.name)
        except RunError:
            return ""
        return home.name

    with ThreadPoolExecutor(len(rows)) as pool:
        winners = [name for name in pool.map(lambda one: resume(*one), rows) if name]
    assert len(winners) == 1
    assert read_head(store, "lost").writer == winners[0]
    move_to("five")
    assert runs.load("lost").status is Status.LOST  # the winner died before it wrote a record; `set_age`
    with runs.reopen("lost") as recorder:
        assert recorder.folder.is_dir()
    assert runs.load("lost").incarnation == 3


def test_a_store_that_is_down_stops_nothing(
    tmp_path: Path, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    outage = ExitStack()
    outage.enter_context(down(open_store(), "write", "read_tagged"))
    with runs.create("cartpole", SPEC, "through") as recorder, caplog.at_level(logging.WARNING):
        for step in range(3):
            recorder.log(step, {"loss": 1.0})
            recorder.flush()
        wait_for(lambda: "not mirrored: " in caplog.text, timeout_s=60)
        assert runs.load("through").latest() == {"loss": 1.0}
        assert [run.id for run in runs.list_runs()] == ["through"]
        outage.close()
        wait_for(lambda: has_record(open_store(), "through"), timeout_s=60)
    assert caplog.text.count("is not mirrored") == 1
    with down(open_store(), "write", "read_tagged"):
        with runs.reopen("through") as recorder:  # a run of this host
            recorder.log(9, {"loss": 0.5})
        assert runs.load("through").status is Status.FINISHED
    with runs.reopen("through") as recorder:
        recorder.log(10, {"loss": 0.25})
    move_to("two")
    assert (runs.load("through").incarnation, runs.load("through").best()) == (3, ("loss", 0.25))


def test_closing_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(store_mirror, "CLOSE_TIMEOUT_S", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(FolderStore, "write", lambda *_: answers.wait(60))
    recorder = runs.create("cartpole", SPEC, "hanging")
    recorder.close()
    assert "does not answer" in caplog.text
    answers.set()
    recorder._store_mirror._heartbeats.close(60)


def test_damaged_and_newer_objects_are_named_and_hide_no_other_run(
    store: Store, move_to: MoveTo, caplog: pytest.LogCaptureFixture
) -> None:
    record_ended_run("good")
    record_ended_run("torn-record")
    record_ended_run("newer-record")
    good = read_head(store, "good")
    record = store.read(record_key("newer-record", 1))
    newer = sqlite3.connect(":memory:")
    newer.deserialize(zlib.decompress(record))
    newer.execute("PRAGMA user_version = 99")
    store.write(record_key("newer-record", 1), zlib.compress(newer.serialize()))
    newer.close()
    store.write(record_key("torn-record", 1), store.read(record_key("torn-record", 1))[:-40])
    store.write(head_key("torn-head"), good.to_bytes()[:-10])
    store.write(head_key("other"), good.to_bytes())
    store.write(head_key("newer-head"), b'{"format": 99, "id": {}}')
    store.write(head_key("no-record"), RunHead(**{**_fields(good), "id": "no-record", "record": ""}).to_bytes())
    move_to("two")
    assert [run.id for run in runs.list_runs()] == ["good"]
    for run_id, problem in (
        ("torn-head", "damaged"),
        ("other", "damaged: it is of the run 'good'"),
        ("newer-head", "newer Shoal"),
        ("torn-record", "damaged"),
        ("newer-record", "newer Shoal .format 99"),
    ):
        assert any(run_id in line and problem.split(" .")[0] in line for line in caplog.messages), run_id
    with pytest.raises(RunError, match="upgrade Shoal"):
        decode_head("newer-head", store.read(head_key("newer-head")))


def _fields(head: RunHead) -> dict[str, object]:
    return {name: getattr(head, name) for name in head.__struct_fields__}


def test_removal_is_of_the_store_too(store: Store, move_to: MoveTo) -> None:
    for name in ("first", "second"):
        record_ended_run(name)
        store.write(f"runs/{name}/checkpoints/1/shard", b"weights")
    move_to("two")
    assert removal.choose_old_runs(runs.list_runs(), 0, 0.0, time.time()) == []  # of another host
    removal.remove_runs([runs.load("first")])
    assert [run.id for run in runs.list_runs()] == ["second"]
    assert store.list_folders("runs") == ["second"]
    assert [entry.key for entry in store.list_entries(HEADS)] == [head_key("second")]


def test_a_copy_is_not_resumed_without_its_store(
    store: Store, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_ended_run()
    move_to("two")
    runs.load("ended")
    monkeypatch.delenv("SHOAL_STORE")
    with pytest.raises(RunError, match="copy from one: set SHOAL_STORE"):
        runs.reopen("ended")
    assert runs.load("latest").id == "ended"
    runs.create("cartpole", SPEC, "own").close()
    assert runs.load("latest").id == "own"


def test_a_store_that_is_the_home_of_the_record_is_left_alone(
    tmp_path: Path, move_to: MoveTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "one"))
    record_ended_run()
    with runs.reopen("ended"):
        pass
    assert runs.load("ended").copied_from is None
    assert not (tmp_path / "one" / HEADS).exists()
