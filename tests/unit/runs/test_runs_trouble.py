"""The run record under stress: a busy or broken database, many threads, other processes, and a kill -9."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from python_program import run_python
from shoal import runs
from shoal.errors import ConfigError, MissingExtra, RunError
from shoal.libs.tracking.event_files import TensorBoardMirror
from shoal.runs import RunRecorder, Status
from shoal.runs.record import recorder
from shoal.runs.record.database import transaction
from waiting import wait_for

DEADLINE_S = 15.0


@pytest.fixture
def run(shoal_home: Path) -> Iterator[RunRecorder]:
    made = runs.create("cartpole", "", "one")
    yield made
    made.close()


def test_a_mirror_that_fails_is_left_out_and_the_run_is_recorded(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where TensorBoard is not installed: the thread that beats for the run outlives it."""

    def fail(mirror: object) -> None:
        raise MissingExtra("no module named tensorboard")

    monkeypatch.setattr(TensorBoardMirror, "write", fail)
    with runs.create("cartpole", "", "one") as run:
        run.log(1, {"x": 1.0})
        said = "not copied by TensorBoardMirror: MissingExtra: no module named tensorboard"
        wait_for(lambda: said in caplog.text, timeout_s=60)
        assert run._writer.is_alive
        run.log(2, {"x": 2.0})
    seen = runs.load("one")
    assert (seen.status, seen.latest()) == (Status.FINISHED, {"x": 2.0})


def test_what_cannot_be_written_is_kept_and_written_later(
    run: RunRecorder, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run._connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(shoal_home / "runs.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        run.log(1, {"x": 1.0})
        run.record_weights(1, 1, "aa", time.time())
        with pytest.raises(RunError, match="locked"):
            run.record_event("unlucky")
        monkeypatch.setattr(recorder, "MAX_PENDING", 3)
        with pytest.raises(RunError, match="locked"):  # full: the caller is told, and nothing is taken in
            run.log(2, {"x": 2.0})
        assert runs.load("one").latest() == {}  # and a reader is not held up
        other.execute("ROLLBACK")
    run.log(3, {"x": 3.0})
    run.flush()
    seen = runs.load("one")
    assert seen.metrics()["x"].tolist() == [1.0, 3.0]
    assert seen.versions()["version"].tolist() == [1]
    assert seen.events()["kind"].tolist() == ["unlucky"]


class Interrupted(sqlite3.Connection):
    """Ctrl-C came while it waited for the lock: Python hears of it when the lock is there."""

    def execute(self, *words: Any) -> sqlite3.Cursor:
        done = super().execute(*words)
        if words[0].startswith("BEGIN"):
            raise KeyboardInterrupt
        return done


def test_an_interruption_at_the_lock_leaves_no_transaction_open(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None, factory=Interrupted)) as connection:
        with pytest.raises(KeyboardInterrupt), transaction(connection):
            pass
        assert not connection.in_transaction


def test_a_run_has_a_row_and_a_folder_or_neither(shoal_home: Path) -> None:
    shoal_home.mkdir()
    (shoal_home / "runs").touch()
    with pytest.raises(RunError, match=r"the folder of the run, .*/runs/one, cannot be written: Not a directory"):
        runs.create("cartpole", "", "one")
    assert runs.list_runs() == []
    (shoal_home / "runs").unlink()
    runs.create("cartpole", "a: 1", "one").finish("stopped")
    shutil.rmtree(shoal_home / "runs" / "one")
    (shoal_home / "runs" / "one").touch()
    with pytest.raises(RunError, match=r"/runs/one, cannot be written: File exists"):
        runs.reopen("one", "a: 2")
    seen = runs.load("one")
    assert (seen.status, seen.spec, seen.incarnation) == (Status.STOPPED, "a: 1", 1)


def test_the_error_of_a_run_is_not_hidden_by_a_record_that_cannot_be_written(
    run: RunRecorder, shoal_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run._connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(shoal_home / "runs.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ZeroDivisionError), run:
            _ = 1 / 0
        assert "its end is not in the record: the run record cannot be written: database is locked" in caplog.text


def test_a_reader_that_takes_its_time_does_not_hold_up_the_run(run: RunRecorder, shoal_home: Path) -> None:
    run._connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(shoal_home / "runs.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM events").fetchone()
        run.record_event("meanwhile")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == before
    assert runs.load("one").events()["kind"].tolist() == ["meanwhile"]


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as they can, so that a missing lock shows."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_threads_can_share_a_recorder(run: RunRecorder, eager_switching: None) -> None:
    num_threads, num_logs = 4, 100

    def talk(thread: int) -> None:
        for step in range(num_logs):
            run.log(step, {f"x/{thread}": float(step)})
            run.record_weights(thread * num_logs + step + 1, step, "aa", time.time())
            if step % 4 == thread:
                run.record_event("tick", thread=thread)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    run.finish("finished")
    seen = runs.load("one")
    assert seen.metrics().drop(columns="time").notna().sum().tolist() == [num_logs] * num_threads
    assert seen.versions()["version"].tolist() == list(range(1, num_threads * num_logs + 1))
    assert len(seen.events()) == num_logs


def test_a_record_of_a_newer_shoal_is_left_alone(run: RunRecorder, shoal_home: Path) -> None:
    run.close()
    with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="newer Shoal"):
        runs.list_runs()


def test_a_file_that_is_not_a_record_is_a_run_error(shoal_home: Path) -> None:
    shoal_home.mkdir()
    (shoal_home / "runs.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(RunError, match=r"runs\.sqlite cannot be opened"):
        runs.list_runs()


def test_a_record_that_is_damaged_is_a_run_error(run: RunRecorder, shoal_home: Path) -> None:
    run.close()
    record, path = runs.load(run.id), shoal_home / "runs.sqlite"
    path.write_bytes(path.read_bytes()[:4096].ljust(path.stat().st_size, b"A"))
    questions = [runs.list_runs, runs.list_running, record.latest]
    for ask in [*questions, lambda: runs.load("latest"), lambda: runs.reopen("latest")]:
        with pytest.raises(RunError, match=r"runs\.sqlite cannot be read: .*malformed: move it away, or put a copy"):
            ask()


def test_what_is_no_text_is_recorded_all_the_same(run: RunRecorder) -> None:
    around: list[object] = []
    around.append(around)
    run.log(1, {"a\udcff": 1.0, "b\0c": 2.0})
    run.log_group(1, "lag", {"\udcff": 3.0})
    run.record_event("found\udcff", name="\udcff", keys={(1, 2): 3}, around=around)
    run.record_endpoint("shop\udcff", "inference", "http://\udcff", "ready")
    run.record_weights(1, 1, "\udcff", 0.0)
    run.record_model("m\udcff", 1, ())
    run.finish("finished")
    seen = runs.load("one")
    assert seen.latest() == {r"a\udcff": 1.0, r"b\x00c": 2.0, r"lag/\udcff": 3.0}
    details = seen.last_events()[r"found\udcff"]
    assert (details["name"], details["keys"]) == ("?", "{(1, 2): 3}")
    json.dumps(seen.to_dict(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "say",
    [
        lambda run: run.log(2**63, {"x": 1.0}),
        lambda run: run.log_group(2**63, "lag", {"x": 1.0}),
        lambda run: run.forget_after(2**63),
        lambda run: run.log_histogram(2**63, "x", np.ones(1), np.ones(2)),
        lambda run: run.record_weights(2**63, 1, "", 0.0),
        lambda run: run.record_weights(1, 2**63, "", 0.0),
        lambda run: run.record_model("m", 2**63, ()),
        lambda run: run.log(1, {"": 1.0}),
        lambda run: run.log(1, {3: 1.0}),
        lambda run: run.log(1, {"step": 1.0}),
        lambda run: run.log(1, {"time": 1.0}),
        lambda run: run.log(1, {"x": None}),
        lambda run: run.log(1, {"x": np.ones(2)}),
        lambda run: run.log(1, {"x": 10**400}),
        lambda run: run.log(1.5, {"x": 1.0}),
        lambda run: run.log(float("nan"), {"x": 1.0}),
        lambda run: run.log("1", {"x": 1.0}),
        lambda run: run.record_event(None),
        lambda run: run.record_endpoint("shop", "inference", None, "ready"),
        lambda run: run.record_model(None, 1, ()),
        lambda run: run.record_model("m", 1, (1,)),
        lambda run: run.record_weights(1, 1, None, 0.0),
        lambda run: run.change_spec(None),
    ],
)
def test_what_can_never_be_stored_is_refused_at_once(run: RunRecorder, say: Callable[[RunRecorder], None]) -> None:
    with pytest.raises(ConfigError, match=r"64 bits|cannot name a metric|is no (number|whole number|text)"):
        say(run)
    run.log(-(2**63) + 1, {"x": 1.0})
    run.finish("finished")
    assert runs.load("one").metrics().index.tolist() == [-(2**63) + 1]


def test_readers_see_a_flush_whole_or_not_at_all(run: RunRecorder, shoal_home: Path) -> None:
    seen: list[tuple[int, int]] = []

    def inspect(statement: str = "") -> None:
        """As another process reads between two statements of the recorder."""
        with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as reader:
            [(num_values,)] = reader.execute("SELECT count(*) FROM metrics")
            [(newest,)] = reader.execute("SELECT min(step) FROM summaries")
        seen.append((num_values, newest))

    run.log(1, {"x": 1.0, "y": -1.0})
    run.flush()
    run._connection.set_trace_callback(inspect)
    run.log(2, {"x": 2.0, "y": -2.0})
    run.flush()
    run._connection.set_trace_callback(None)
    assert len(seen) > 3
    assert {*seen} == {(2, 1)}
    inspect()
    assert seen[-1] == (4, 2)


# --- other processes ---

WRITER = """
import sys, time
from pathlib import Path
from shoal import runs
run, stop, step = runs.create("cartpole", "a: 1", sys.argv[1]), Path(sys.argv[2]), 0
while not stop.exists():
    step += 1
    run.log(step, {"x": float(step), "y": -float(step)})
    run.record_weights(step, step, f"{step:064x}", time.time())
    if step % 20 == 0:
        run.flush()
        print(step, flush=True)
        time.sleep(0.002)
run.finish("finished")
print(step, flush=True)
"""


OPENERS = """
import multiprocessing, sys
from pathlib import Path
from shoal.errors import RunError
from shoal.runs.record.database import connect

def opened(barrier, said):
    for folder in sys.argv[1:]:
        barrier.wait()
        try:
            connect(Path(folder)).close()
        except RunError as error:
            said.put(str(error))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier, said = context.Barrier(6), context.SimpleQueue()
    openers = [context.Process(target=opened, args=(barrier, said)) for _ in range(6)]
    [opener.start() for opener in openers]
    [opener.join() for opener in openers]
    while not said.empty():
        print(said.get())
"""


def test_processes_that_make_the_record_at_once_all_have_it(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    words = [sys.executable, "-c", OPENERS, *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture
def start_writer(shoal_home: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that write to a run of their own until the file `stop` appears."""
    writers: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, run_id, str(shoal_home / "stop")]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return writers[-1]

    yield start
    for writer in writers:
        writer.kill()
        writer.communicate(timeout=DEADLINE_S)


def test_a_killed_run_keeps_what_was_flushed_is_lost_at_once_and_can_be_resumed(
    start_writer: Callable[[str], subprocess.Popen[str]],
) -> None:
    writer = start_writer("doomed")
    num_flushed = [int(writer.stdout.readline()) for _ in range(3)][-1]
    assert runs.load("doomed").status is Status.RUNNING
    writer.send_signal(signal.SIGKILL)
    writer.wait(DEADLINE_S)
    seen = runs.load("doomed")
    assert seen.status is Status.LOST
    metrics, versions = seen.metrics(), seen.versions()
    assert len(metrics) >= num_flushed
    assert metrics.index.tolist() == list(range(1, len(metrics) + 1))  # a whole prefix: nothing torn out
    assert (metrics["y"] == -metrics["x"]).tolist() == [True] * len(metrics)
    assert versions["version"].tolist() == metrics.index.tolist()  # one transaction holds both
    with runs.reopen("doomed") as again:
        assert runs.load("doomed").status is Status.RUNNING
        again.log(10**6, {"x": 0.0})
    assert runs.load("doomed").status is Status.FINISHED


def test_the_record_is_light_to_import_and_recording_needs_no_torch() -> None:
    script = """
import sys
from shoal import runs
print([name for name in ("pandas", "matplotlib", "jinja2", "tensorboard", "torch", "ray") if name in sys.modules])
with runs.create("job", "", "one") as run:
    run.log(1, {"x": 1.0})
print([name for name in ("torch", "ray") if name in sys.modules])
"""
    assert run_python(script) == "[]\n[]\n"
