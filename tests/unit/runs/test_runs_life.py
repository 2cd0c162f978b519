"""The life of a run's record: how a run ends, is lost and found again, and is resumed."""

import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal import runs
from shoal.errors import Closed, RecordUnwritable, RunError
from shoal.runs import RunRecorder, Status, transition
from shoal.runs.record import opening, recorder
from shoal.runs.record.database import connect
from waiting import wait_for

SPEC = "environment: CartPole-v1\nlearner:\n  lr: 0.001\n"


@pytest.fixture
def run() -> Iterator[RunRecorder]:
    made = runs.create("cartpole", SPEC, "one")
    yield made
    made.close()


def execute(home: Path, sql: str, *values: object) -> None:
    """Change the record behind the recorder's back."""
    with closing(sqlite3.connect(home / "runs.sqlite")) as connection, connection:
        connection.execute(sql, values)


def test_every_move_between_states_is_allowed_or_raises() -> None:
    legal = {
        ("created", "running"),
        *(("running", end) for end in ("finished", "not reached", "failed", "stopped")),
        *((end, "running") for end in ("finished", "not reached", "failed", "stopped", "lost")),
    }
    for current in Status:
        for to in Status:
            if (current.value, to.value) in legal:
                assert transition(current, to) is to
            else:
                with pytest.raises(RunError, match=f"{current.value!r} cannot become {to.value!r}"):
                    transition(current, to)


@pytest.mark.parametrize(
    ("raised", "status", "error"),
    [
        (None, Status.FINISHED, None),
        (ValueError("the lr is odd"), Status.FAILED, "ValueError: the lr is odd"),
        (KeyboardInterrupt(), Status.STOPPED, "interrupted"),
        (SystemExit(0), Status.FINISHED, None),
        (SystemExit(3), Status.FAILED, "SystemExit: 3"),
        (SystemExit(143), Status.STOPPED, "interrupted"),  # SIGTERM
    ],
)
def test_the_end_of_the_body_is_the_end_of_the_run(
    raised: BaseException | None, status: Status, error: str | None
) -> None:
    def body() -> None:
        with runs.create("job", "", "one") as run:
            run.log(1, {"x": 1.0})
            if raised is not None:
                raise raised

    if raised is None:
        body()
    else:
        with pytest.raises(type(raised)):
            body()
    seen = runs.load("one")
    assert (seen.status, seen.error, seen.latest()) == (status, error, {"x": 1.0})


def test_what_is_no_text_does_not_keep_a_run_from_ending() -> None:
    with pytest.raises(RunError), runs.create("job\udcff", "a: \udcff\n", "two", command="run \udcff") as run:
        raise RunError("no such file: \udcff.csv")
    seen = runs.load("two")
    assert (seen.status, seen.error) == (Status.FAILED, "RunError: no such file: \\udcff.csv")
    assert (seen.job, seen.command, seen.spec) == ("job\\udcff", "run \\udcff", "a: \\udcff\n")
    with runs.reopen("two", "b: \udcff\n") as run:
        assert runs.load("two").spec == "b: \\udcff\n"
        run.change_spec("c: \udcff\n")
    assert runs.load("two").spec == (run.folder / "spec.yaml").read_text() == "c: \\udcff\n"


def test_an_ended_run_refuses_more_and_closing_again_is_harmless(run: RunRecorder) -> None:
    with pytest.raises(RunError, match="cannot become 'running'"):
        run.finish("running")
    with pytest.raises(
        RunError, match="'done' is no way for a run to end: it is one of failed, finished, not reached, stopped"
    ):
        run.finish("done")
    run.finish("failed", "out of luck")
    calls: list[Callable[[], None]] = [
        lambda: run.log(1, {"x": 1.0}),
        lambda: run.record_weights(1, 1, "aa", 0.0),
        lambda: run.record_event("late"),
        run.heartbeat,
    ]
    for call in calls:
        with pytest.raises(Closed, match="failed"):
            call()
    with pytest.raises(RunError, match="cannot become"):
        run.finish("finished")
    run.close()
    run.close()
    assert (runs.load("one").status, runs.load("one").error) == (Status.FAILED, "out of luck")


def test_a_run_without_a_heartbeat_is_lost_and_found_again(run: RunRecorder, shoal_home: Path) -> None:
    run.record_endpoint("gateway", "gateway", "tcp://h:1", "closed")
    run.record_endpoint("policy", "inference", "http://h:2", "ready")
    execute(shoal_home, "UPDATE runs SET heartbeat_at = ?", time.time() - runs.HEARTBEAT_TIMEOUT_S + 3)
    assert runs.load("one").status is Status.RUNNING
    execute(shoal_home, "UPDATE runs SET heartbeat_at = ?", time.time() - runs.HEARTBEAT_TIMEOUT_S - 1)
    assert runs.load("one").status is Status.LOST
    assert [point.state for point in runs.load("one").endpoints()] == ["closed", "lost"]
    run.heartbeat()
    assert runs.load("one").status is Status.RUNNING
    assert [point.state for point in runs.load("one").endpoints()] == ["closed", "ready"]


def test_the_recorder_beats_by_itself(monkeypatch: pytest.MonkeyPatch, shoal_home: Path) -> None:
    monkeypatch.setattr(recorder, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(recorder, "HEARTBEAT_INTERVAL_S", 0.02)
    with runs.create("job", "", "one"):
        execute(shoal_home, "UPDATE runs SET heartbeat_at = 0")
        wait_for(lambda: runs.load("one").status is Status.RUNNING)


def test_resuming_goes_on_where_the_run_was(run: RunRecorder) -> None:
    run.log(10, {"x": 1.0})
    run.log(20, {"x": 2.0})
    run.finish("failed", "power cut")
    with runs.reopen("one") as again:
        assert again.folder == run.folder
        seen = runs.load("one")
        assert (seen.status, seen.error, seen.finished_at) == (Status.RUNNING, None, None)
        again.log(20, {"x": 5.0})  # the step that is done again counts once
        again.log(30, {"x": 6.0})
    seen = runs.load("one")
    assert seen.status is Status.FINISHED
    assert seen.metrics()["x"].tolist() == [1.0, 5.0, 6.0]
    [event] = seen.events().to_dict("records")
    assert (event["kind"], event["details"]["after"]) == ("resumed", "failed")
    assert len(list((run.folder / "tensorboard").iterdir())) == 2


def test_steps_that_were_given_up_are_forgotten(run: RunRecorder) -> None:
    with runs.create("cartpole", SPEC, "another") as another:
        another.log(150, {"loss": 0.1})
    for step, loss in ((50, 3.0), (99, math.inf), (100, math.nan), (101, 0.1), (150, 9.0)):
        run.log(step, {"loss": loss})
        run.flush()
    run.log(150, {"late": 1.0})
    run.log(160, {"loss": 0.2})
    run.forget_after(100)
    run.flush()
    seen = runs.load("one")
    assert seen.metrics()["loss"].to_dict() == pytest.approx({50: 3.0, 99: math.inf, 100: math.nan}, nan_ok=True)
    assert seen.latest() == pytest.approx({"loss": math.nan}, nan_ok=True)
    assert seen.best() == ("loss", 3.0)
    assert runs.load("another").latest() == {"loss": 0.1}
    run.log(90, {"loss": 2.5})  # said again, and so the newest
    run.forget_after(99)
    assert (runs.load("one").latest(), runs.load("one").best()) == ({"loss": 2.5}, ("loss", 2.5))
    run.forget_after(-1)
    assert (runs.load("one").latest(), len(runs.load("one").metrics())) == ({}, 0)


def test_others_can_write_while_the_history_that_is_left_is_read(
    monkeypatch: pytest.MonkeyPatch, shoal_home: Path
) -> None:
    """It may be long: the metrics of a run are read without the lock, and the result is written with it."""
    errors: list[Exception | None] = []  # of another writer, at each read

    def inspect(statement: str) -> None:
        if "GROUP BY" in statement:
            with closing(sqlite3.connect(shoal_home / "runs.sqlite", timeout=0)) as other:
                try:
                    other.execute("BEGIN IMMEDIATE")
                    errors.append(None)
                except sqlite3.OperationalError as error:
                    errors.append(error)

    def watched(home: Path) -> sqlite3.Connection:
        connection = connect(home)
        connection.set_trace_callback(inspect)
        return connection

    monkeypatch.setattr(opening, "connect", watched)
    with runs.create("job", "", "one") as run:
        for step in range(1, 6):
            run.log(step, {"loss": float(step)})
        run.flush()
        errors.clear()
        run.forget_after(3)
        assert {*errors} == {None}
    assert (runs.load("one").latest(), runs.load("one").best()) == ({"loss": 3.0}, ("loss", 1.0))


def test_what_cannot_be_forgotten_for_now_is_forgotten_before_what_is_said_later(
    run: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(connection: object) -> None:
        raise RecordUnwritable("the run record cannot be written: database or disk is full")

    run.log(100, {"loss": 3.0})
    run.log(101, {"loss": 0.1})
    run.flush()
    with monkeypatch.context() as while_full:
        while_full.setattr(recorder, "transaction", full)
        run.log(102, {"loss": 0.2})
        with pytest.raises(RecordUnwritable):
            run.forget_after(100)
        run.log(101, {"loss": 2.0})
    run.flush()
    seen = runs.load("one")
    assert (seen.metrics()["loss"].to_dict(), seen.best()) == ({100: 3.0, 101: 2.0}, ("loss", 2.0))


def test_resuming_replaces_the_spec_only_when_one_is_given(run: RunRecorder) -> None:
    run.close()
    runs.reopen("one").close()
    assert runs.load("one").spec == (run.folder / "spec.yaml").read_text() == SPEC
    runs.reopen("one", spec="a: 2\n").close()
    assert runs.load("one").spec == (run.folder / "spec.yaml").read_text() == "a: 2\n"


def test_a_spec_is_not_replaced_when_the_run_cannot_be_resumed(run: RunRecorder) -> None:
    with pytest.raises(RunError, match="still running"):
        runs.reopen("one", spec="a: 2\n")
    assert runs.load("one").spec == (run.folder / "spec.yaml").read_text() == SPEC


def test_resuming_closes_the_endpoints_of_the_earlier_life(run: RunRecorder) -> None:
    run.record_endpoint("gateway", "gateway", "tcp://h:1", "ready")
    run.record_endpoint("policy", "inference", "http://h:2", "ready")
    with runs.create("other", "", "two") as other:
        other.record_endpoint("gateway", "gateway", "tcp://h:3", "ready")
        run.close()
        with runs.reopen("one") as again:
            assert [point.state for point in runs.load("one").endpoints()] == ["closed", "closed"]
            again.record_endpoint("gateway", "gateway", "tcp://h:4", "ready")
            assert [point.state for point in runs.load("one").endpoints()] == ["ready", "closed"]
        assert [point.state for point in runs.load("two").endpoints()] == ["ready"]


def test_what_a_new_life_said_is_told_apart_from_the_old(run: RunRecorder) -> None:
    run.record_event("solved", steps=1)
    run.record_event("gateway_ready", address="old")
    run.record_event("gateway_ready", address="newer")
    run.log(1, {"old": 1.0, "both": 1.0})
    run.flush()
    old = {"solved": {"steps": 1}, "gateway_ready": {"address": "newer"}}
    first = runs.load("one")
    assert first.last_events() == first.last_events(since_resumed=True) == old
    assert first.latest() == first.latest(since_resumed=True) == {"old": 1.0, "both": 1.0}
    run.close()
    for _ in range(2):
        with runs.reopen("one") as again:
            seen = runs.load("one")
            assert (seen.last_events(since_resumed=True), seen.latest(since_resumed=True)) == ({}, {})
            assert {"solved", "resumed"} <= set(seen.last_events())
            again.record_event("gateway_ready", address="newest")
            again.log(1, {"both": 2.0})
            again.flush()
            assert seen.last_events(since_resumed=True) == {"gateway_ready": {"address": "newest"}}
            assert seen.latest(since_resumed=True) == {"both": 2.0}
            assert seen.latest() == {"old": 1.0, "both": 2.0}
    assert (first.incarnation, runs.load("one").incarnation) == (1, 3)


def test_a_writer_that_was_given_up_and_replaced_cannot_write_any_more(run: RunRecorder, shoal_home: Path) -> None:
    run.log(1, {"x": 1.0})
    run.flush()
    execute(shoal_home, "UPDATE runs SET heartbeat_at = 0")  # it hung for so long that it was taken for dead
    with runs.reopen("one") as again:
        run.log(2, {"x": 2.0})
        with pytest.raises(RunError, match="resumed by another process"):
            run.flush()
        with pytest.raises(RunError, match="resumed by another process"):
            run.finish("failed")
        again.log(3, {"x": 3.0})
    assert runs.load("one").metrics()["x"].tolist() == [1.0, 3.0]
    assert runs.load("one").status is Status.FINISHED
