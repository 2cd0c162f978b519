"""A follower sends each value of a run to its tracker, whatever happens to the tracker, to the run and to itself."""

import importlib.util
import itertools
import json
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from shoal import runs
from shoal.errors import ConfigError, RunError
from shoal.extend import Tracker
from shoal.libs.tracking import follower as following
from shoal.libs.tracking import processes
from shoal.libs.tracking.follower import Follower, TrackingState, make_file_name, read_state, watch
from shoal.libs.tracking.trackers import list_parameters
from shoal.runs import Run, RunRecorder, Status
from shoal.runs.event_messages import format_warning
from shoal.runs.record.removal import remove_runs
from shoal.runs.run_reader import MetricValue
from shoal.runs.tracker import find_trackers
from shoal.train.spec import TrainSpec
from waiting import start_thread, wait_for

POLL_S = 0.02
FOREVER_S = 600.0


class Killed(BaseException):
    """The follower's process is gone at this moment."""


@dataclass
class Server:
    """What a tracker has received, by the calls; `fault` is called at each moment of them, and may raise or block."""

    values: list[MetricValue] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    finished: list[Status] = field(default_factory=list)
    fault: Callable[[], None] = lambda: None


@dataclass
class FakeTracker(Tracker):
    server: Server

    def begin(self, run: Run, tracker_run: str) -> tuple[str, str]:
        self.server.fault()
        self.server.begun.append(tracker_run)
        return tracker_run or f"there-{run.id}", "http://tracker"

    def send(self, values: Sequence[MetricValue]) -> None:
        self.server.fault()
        self.server.values += values
        self.server.fault()

    def finish(self, run: Run) -> None:
        self.server.fault()
        self.server.finished.append(run.status)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_RETRY_S", POLL_S)


@pytest.fixture
def recorder() -> Iterator[RunRecorder]:
    made = runs.create("job", "task: lenet\n", "one")
    yield made
    made.close()


def make_follower(server: Server, grace_s: float = FOREVER_S) -> Follower:
    return Follower(runs.load("one"), "wandb", lambda: FakeTracker(server), poll_s=POLL_S, grace_s=grace_s)


def start(follower: Follower) -> threading.Thread:
    thread = start_thread(follower.follow)
    return thread


def log(recorder: RunRecorder, first: int, last: int) -> None:
    for step in range(first, last):
        recorder.log(step, {"loss": 1 / (step + 1), "accuracy": step / 100})
        if step % 5 == 0:
            recorder.flush()


def expect(first: int, last: int) -> list[tuple[int, str, float]]:
    pairs = [[(step, "accuracy", step / 100), (step, "loss", 1 / (step + 1))] for step in range(first, last)]
    return [each for pair in pairs for each in pair]


def drop_times(values: Sequence[MetricValue]) -> list[tuple[int, str, float]]:
    return [(each.step, each.name, each.value) for each in values]


def test_each_value_of_a_run_that_goes_on_is_sent_once_and_in_order(recorder: RunRecorder) -> None:
    server = Server()
    follower = Follower(
        runs.load("one"), "wandb", lambda: FakeTracker(server), poll_s=POLL_S, on_start=lambda: server.begun.append("b")
    )
    thread = start(follower)
    log(recorder, 0, 10)
    recorder.flush()
    wait_for(lambda: len(server.values) == 20, what="values before the run's end")
    assert server.begun == ["", "b"]
    log(recorder, 10, 20)
    recorder.log(20, {"loss": math.nan})
    recorder.finish(Status.FAILED, "broken")
    thread.join(FOREVER_S)
    assert drop_times(server.values[:-1]) == expect(0, 20)
    assert math.isnan(server.values[-1].value)
    assert server.finished == [Status.FAILED]
    state = read_state(recorder.folder, "wandb")
    assert (state.tracker_run, state.url, state.sent, state.problem) == ("there-one", "http://tracker", 41, "")
    assert state.is_complete


@pytest.mark.parametrize("seed", range(3))
def test_a_follower_that_is_killed_loses_nothing_and_repeats_its_last_batch_at_most(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Killed before or after a batch has arrived, before and after its state is written."""
    most = 8
    monkeypatch.setattr(following, "BATCH", most)
    drawn, write = random.Random(seed), following.replace_synced
    server = Server()

    def fault() -> None:
        if drawn.random() < 0.15:
            raise Killed

    def write_or_die(path: Path, payload: bytes) -> None:
        fault()
        write(path, payload)
        fault()

    server.fault = fault
    monkeypatch.setattr(following, "replace_synced", write_or_die)
    log(recorder, 0, 40)
    recorder.finish(Status.FINISHED)
    for _ in range(1000):
        try:
            make_follower(server).follow()
            break
        except Killed:
            continue
    received = drop_times(server.values)
    assert list(dict.fromkeys(received)) == expect(0, 40)
    places = {value: [index for index, each in enumerate(received) if each == value] for value in received}
    assert all(later - earlier <= most for each in places.values() for earlier, later in itertools.pairwise(each))
    assert set(server.begun) <= {"", "there-one"}
    assert read_state(recorder.folder, "wandb").is_complete


def test_values_of_one_time_are_never_separated(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BATCH", 1)
    server = Server()
    recorder.log(1, {f"metric-{number}": number for number in range(7)})
    recorder.log(2, {"loss": 1.0})
    recorder.finish(Status.FINISHED)
    assert make_follower(server).follow().sent == 8
    assert [each.step for each in server.values] == [1] * 7 + [2]


def test_a_server_that_dies_receives_all_when_it_is_back(recorder: RunRecorder) -> None:
    server, is_dead = Server(), threading.Event()

    def fault() -> None:
        if is_dead.is_set():
            raise ConnectionError("connection refused")

    server.fault = fault
    thread = start(make_follower(server))
    log(recorder, 0, 10)
    recorder.flush()
    wait_for(lambda: len(server.values) == 20, what="values")
    is_dead.set()
    log(recorder, 10, 20)
    recorder.flush()
    wait_for(lambda: read_state(recorder.folder, "wandb").problem == "connection refused", what="a problem")
    is_dead.clear()
    recorder.finish(Status.FINISHED)
    thread.join(FOREVER_S)
    received = drop_times(server.values)
    assert list(dict.fromkeys(received)) == expect(0, 20)
    state = read_state(recorder.folder, "wandb")
    assert (state.problem, state.is_complete) == ("", True)


def test_a_dead_server_is_given_up_after_the_end_and_may_receive_the_run_later(recorder: RunRecorder) -> None:
    server = Server()

    def fault() -> None:
        raise ConnectionError("connection refused")

    server.fault = fault
    log(recorder, 0, 5)
    recorder.finish(Status.FINISHED)
    state = make_follower(server, grace_s=0.1).follow()
    assert (state.problem, state.sent, state.is_complete) == ("connection refused", 0, False)
    server.fault = lambda: None
    assert make_follower(server).follow().is_complete
    assert drop_times(server.values) == expect(0, 5)


def test_a_server_that_never_answers_is_given_up_too(recorder: RunRecorder) -> None:
    server = Server()
    is_answering = threading.Event()
    given_up = threading.Event()

    def fault() -> None:
        is_answering.wait()

    server.fault = fault
    follower = make_follower(server, grace_s=0.1)
    thread = start(follower)
    watch(follower, given_up.set, every_s=POLL_S)
    log(recorder, 0, 5)
    assert not given_up.is_set()  # the run goes on
    recorder.finish(Status.FINISHED)
    assert given_up.wait(FOREVER_S)
    is_answering.set()
    thread.join(FOREVER_S)


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(recorder: RunRecorder) -> None:
    server = Server()
    log(recorder, 0, 10)
    recorder.finish(Status.STOPPED)
    make_follower(server).follow()
    with runs.reopen("one") as again:
        again.forget_after(7)  # it begins again at a checkpoint
        log(again, 8, 20)
    make_follower(server).follow()
    assert drop_times(server.values) == expect(0, 20)  # each step once, though it was logged twice
    assert server.begun == ["", "there-one"]
    assert server.finished == [Status.STOPPED, Status.FINISHED]


def test_the_follower_of_a_run_that_is_resumed_leaves_it_to_the_next(recorder: RunRecorder) -> None:
    server, is_dead = Server(), True

    def fault() -> None:
        if is_dead:
            raise ConnectionError("connection refused")

    server.fault = fault
    first = start(make_follower(server))
    log(recorder, 0, 10)
    recorder.finish(Status.STOPPED)
    with runs.reopen("one") as again:
        second = start(make_follower(server))
        first.join(FOREVER_S)
        is_dead = False
        log(again, 10, 20)
    second.join(FOREVER_S)
    assert drop_times(server.values) == expect(0, 20)
    assert server.finished == [Status.FINISHED]


def test_a_run_that_repeats_no_step_after_it_was_resumed_has_all_of_them_sent(recorder: RunRecorder) -> None:
    """A sweep logs trials in any order: a later step before an earlier one."""
    server = Server()
    log(recorder, 3, 6)
    recorder.finish(Status.STOPPED)
    make_follower(server).follow()
    with runs.reopen("one") as again:
        log(again, 0, 3)
    make_follower(server).follow()
    assert drop_times(server.values) == expect(3, 6) + expect(0, 3)
    assert read_state(recorder.folder, "wandb").steps == {"accuracy": 5, "loss": 5}


def test_a_tracker_that_is_behind_or_cannot_deliver_is_reported_once(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise OSError("no process")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(processes, "CHECK_S", 0.0)
    monkeypatch.setattr(processes, "BEHIND_S", 0.0)
    followers = processes.Followers("one", recorder.folder, ["wandb", "mlflow", "trackio"])
    for name, state in (("mlflow", TrackingState(problem="refused")), ("trackio", TrackingState(time=20.0))):
        (recorder.folder / make_file_name(name, "json")).write_text(json.dumps(asdict(state)))
    assert followers.check(10.0) == [{"tracker": "mlflow", "problem": "refused"}]
    [late] = followers.check(30.0)  # 10.0 is due by now
    assert late["tracker"] == "wandb"
    assert followers.check(30.0) == [{**late, "tracker": "trackio"}]
    assert followers.check(30.0) == []


def test_the_recorder_records_what_its_trackers_lack(recorder: RunRecorder, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    class Behind:
        def check(self, newest: float) -> list[dict[str, object]]:
            seen.append(newest)
            return [{"tracker": "mlflow", "problem": "it is behind"}] * (len(seen) == 1)

        def close(self) -> list[dict[str, object]]:
            return []

    recorder._followers = Behind()
    recorder.log(1, {"loss": 0.5})
    recorder.log(2, {"loss": 0.5}, in_history=False)  # trackers have curves
    wait_for(lambda: len(seen) > 1, what="two checks")
    [(_, details)] = runs.load("one").list_events("untracked")
    assert details == {"tracker": "mlflow", "problem": "it is behind"}
    assert "mlflow does not have this run's values yet, the run goes on: it is behind" in caplog.text
    assert seen[-1] in {0.0, *(each.time for each in runs.load("one").list_values(0.0, 10))}


def test_the_follower_of_a_removed_run_ends(recorder: RunRecorder) -> None:
    recorder.finish(Status.FINISHED)
    follower = make_follower(Server())
    remove_runs([runs.load("one")])
    with pytest.raises((RunError, FileNotFoundError)):
        follower.follow()


# --- what the record and the spec say ---


OWN_TRACKER = """
from pathlib import Path

from shoal.extend import Tracker

class FileTracker(Tracker):
    def begin(self, run, tracker_run):
        if Path("refuses").exists():
            raise ConnectionError("refused")
        self.file = open(f"{run.id}.csv", "a")
        return run.id, self.file.name

    def send(self, values):
        for each in values:
            print(each.step, each.name, each.value, file=self.file)

    def finish(self, run):
        print(run.status.value, file=self.file)
        self.file.close()

class NoTracker:
    pass
"""
OWN = "my_tracker.py:FileTracker"


@pytest.fixture
def own_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_tracker", raising=False)  # of another test's folder
    (tmp_path / "work" / "my_tracker.py").write_text(OWN_TRACKER)
    return tmp_path / "work"


def test_a_tracker_of_the_users_own_file_receives_the_run(own_tracker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", FOREVER_S)
    spec = TrainSpec().override([f"track={OWN}"])
    with runs.create("job", spec.to_record(), "two") as recorder:
        recorder.log(1, {"loss": 0.5})
    [(_, details)] = runs.load("two").list_events("tracked")
    assert details == {"tracker": OWN, "run": "two", "url": "two.csv", "values": 1, "problem": ""}
    assert (own_tracker / "two.csv").read_text() == "1 loss 0.5\nfinished\n"
    assert (recorder.folder / "tracking-my_tracker.py-FileTracker.json").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("other.py:Tracker", "there is no file"), ("my_tracker.py:NoTracker", "is no shoal.extend.Tracker")],
)
def test_what_is_no_tracker_is_refused_before_anything_is_recorded(own_tracker: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        runs.create("job", f"track: ['{name}']\n", "two")
    with pytest.raises(RunError):
        runs.load("two")


def test_the_recorder_says_what_a_tracker_lacks_at_the_end(own_tracker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", 0.0)
    (own_tracker / "refuses").touch()
    with runs.create("job", f"task: lenet\ntrack: ['{OWN}']\n", "two") as recorder:
        log(recorder, 0, 5)
        before = TrackingState("there", "http://tracker", sent=3, is_complete=True)  # of an earlier attempt
        (recorder.folder / make_file_name(OWN, "json")).write_text(json.dumps(asdict(before)))
    run = runs.load("two")
    [(kind, details)] = run.list_events("tracked")
    assert (details["tracker"], details["run"], details["values"]) == (OWN, "there", 3)
    assert details["problem"]
    assert f"shoal runs track RUN --to {OWN}" in format_warning(kind, details)
    assert run.status is Status.FINISHED
    assert (recorder.folder / make_file_name(OWN, "log")).exists()
    [process] = [each for each in processes._unfinished if each.args[-2] == "two"]
    process.kill()
    process.wait(FOREVER_S)


def test_a_tracker_without_its_library_is_refused_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"track = 'wandb'.*not installed.*pip install 'CHECKOUT\[wandb\]'"):
        runs.create("job", "track: [wandb]\n", "two")
    with pytest.raises(RunError):
        runs.load("two")


def test_the_field_is_one_of_the_trackers_or_a_list_of_them() -> None:
    assert TrainSpec(track="mlflow").track == ("mlflow",)  # type: ignore[arg-type]
    spec = TrainSpec().override(["track=[wandb, mlflow, wandb]"])
    assert spec.track == ("wandb", "mlflow")
    assert find_trackers(spec.to_record()) == ("wandb", "mlflow")
    assert find_trackers("train: {track: [wandb]}\nspace: {}\ntrials: 2\n") == ()  # of its trials
    assert find_trackers("track: north\n") == ()  # of a user's own job
    with pytest.raises(ConfigError, match=r"track.*neptune"):
        TrainSpec().override(["track=[neptune]"])


def test_parameters_are_the_fields_of_the_spec_without_secrets() -> None:
    spec = (
        "task: lenet\noptimizer: {learning_rate: 0.1}\nargs: {sizes: [1, 2], api_key: abc}\nendpoint: {token: '***'}\n"
    )
    assert list_parameters(spec) == {"task": "lenet", "optimizer.learning_rate": 0.1, "args.sizes": "[1, 2]"}
