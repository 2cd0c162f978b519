"""What a job says, line by line, as it comes; `shoal runs --follow`, to a run's end or until one has seen enough."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from shoal import runs
from shoal.cli.commands.run_session import RunArguments
from shoal.cli.commands.run_session import RunSession as Session
from shoal.cli.display.run_view import KINDS_WITHOUT_DISPLAY, follow_run, make_view
from shoal.cli.support.console import make_literal_console
from shoal.cli.support.jobs import (
    JobLogReader,
    describe_failure,
    follow_lines,
    split_secret_overrides,
    validate_overrides,
)
from shoal.cluster.jobs import JobHandle, JobStatus
from shoal.errors import ConfigError, RunError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.serving_spec import ServingSpec
from shoal.runs import Run, RunKind, Status
from shoal.train.spec import TrainSpec
from typed import said, typed


class SaysInPieces:
    """Of a job, its words as they come from a cluster elsewhere: cut anywhere."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def follow(self, timeout_s: float) -> Iterator[str]:
        yield from self.pieces


def test_lines_are_whole_and_rays_own_are_left_out() -> None:
    pieces = ["2026 INFO job_manager.py:5", "81 -- Runtime env is set up.\nst", "ep 1\n\nstep", " 2\nand no new line"]
    job = cast(Any, SaysInPieces(*pieces))
    assert list(follow_lines(cast(JobHandle, job), 1.0)) == ["step 1", "", "step 2", "and no new line"]


@pytest.mark.parametrize(
    ("log", "outcome", "said"),
    [
        ("step 1\n", JobStatus.FAILED, "the job failed; its last words:\nstep 1"),
        ("step 1\nstopped\n", JobStatus.STOPPED, "the job was stopped by another; its last words:\nstep 1\nstopped"),
        ("step 1\nerror: no room\n", JobStatus.FAILED, "no room"),
    ],
)
def test_a_job_that_another_has_stopped_did_not_fail(log: str, outcome: JobStatus, said: str) -> None:
    assert describe_failure(cast(JobHandle, SimpleNamespace(read_logs=lambda: log)), "the job", outcome) == said


class Grows:
    """A job that keeps no record; at each look at it, what it has written by then, until it has succeeded."""

    def __init__(self, *looks: str) -> None:
        self.looks, self.log = list(looks), ""

    def read_logs_from(self, start: int, *, is_complete: bool) -> tuple[str, int]:
        return self.log[start:], len(self.log)

    def poll_outcome(self) -> JobStatus | None:
        self.log = self.looks.pop(0)
        return None if self.looks else JobStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("log", "lines", "at_the_end"),
    [
        ("", [], []),
        ("step 1\nstep", ["step 1"], ["step 1", "step"]),
        ("step 1\n\nstep 2\n", ["step 1", "", "step 2"], ["step 1", "", "step 2"]),
        (" 10%\r 20%\r 3", [" 10%", " 20%"], [" 10%", " 20%", " 3"]),
        ("step 1\r\n2026 job_manager.py: Ray\r\nstep 2\r\n", ["step 1", "step 2"], ["step 1", "step 2"]),
        ("step 1\nerror: no\nstep 2", ["step 1"], ["step 1"]),
    ],
)
def test_a_line_that_has_only_begun_is_said_when_it_is_whole(log: str, lines: list[str], at_the_end: list[str]) -> None:
    for size in (1, 4, 100):
        job = Grows(*(log[: begin + size] for begin in range(0, len(log), size)), log)
        words = JobLogReader(cast(JobHandle, job))
        seen = []
        for _ in range(len(job.looks) - 1):
            job.poll_outcome()
            seen += words.read_new_lines(is_over=False)
        assert seen == lines
        assert seen + words.read_new_lines(is_over=True) == at_the_end
        assert words.read_new_lines(is_over=True) == []


def test_a_kind_of_run_is_checked_before_a_cluster_starts_in_any_encoding(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_bytes(b"# coding: latin-1\n# \xfcber RunFlow\nimport sys\nsys.exit('error: ' + sys.argv[2])\n")
    with pytest.raises(RunError, match=r"^--check$"):
        validate_overrides(job, ["a=1"])
    shown, secrets = split_secret_overrides(job, ["args.token=hush"])
    assert shown == ["args.token=***"]
    assert secrets


def test_what_a_program_says_last_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shoal.cli.display.run_view.REFRESH_S", 0.0)
    session = Session(RunArguments("x", (), 0), Path("x.py"), make_literal_console(), plain=True)
    whole = "counting ... 1 2\nthe answer is 42"
    job = cast(Any, Grows("", "counting ... 1", whole[:-2], whole))
    session._job, session._job_log = job, JobLogReader(job)
    assert session._follow() is JobStatus.SUCCEEDED
    assert capsys.readouterr().out == whole + "\n"
    session._view = cast(Any, SimpleNamespace(notes=("the answer is 42", "a worker died")))
    assert session._take_new_notes() == ["a worker died"]  # and not again what the job has said


def test_a_run_is_followed_to_its_end_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with runs.create("x", "target_return: 475", "one") as run:
        run.record_event("gateway_ready", address="tcp://h", env="E", server_key="")
        run.record_endpoint("inference", "inference", "http://h", "ready")
        run.record_endpoint("gateway", "gateway", "tcp://h", "ready")
        looks = iter(["steps", "end"])

        def look(seconds: float) -> None:
            if next(looks) == "end":
                run.finish("finished")
                return
            run.log(1, {"return/mean_100": 100.0, "steps/total": 7.0})
            run.flush()

        monkeypatch.setattr("shoal.cli.display.run_view.time", SimpleNamespace(sleep=look, monotonic=time.monotonic))
        lines = said("runs latest --follow").splitlines()
    assert "waiting for actors" in lines[0]
    assert "learning: return 100" in lines[1]
    assert "finished" in "".join(lines[2:6])


def test_a_heartbeat_that_is_late_once_does_not_end_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the machine was asleep: the run goes on, and says so a moment later."""
    with runs.create("x", "target_return: 475", "one") as run:
        looks = iter([Status.LOST, Status.LOST, Status.RUNNING])
        load, now = runs.load, SimpleNamespace(s=0.0)

        def seen(run_id: str) -> Run:
            return replace(load(run_id), status=next(looks, Status.RUNNING))

        def look(seconds: float) -> None:
            now.s += seconds
            if now.s > 5.0:
                run.finish("finished")
                monkeypatch.setattr("shoal.runs.load", load)

        monkeypatch.setattr("shoal.runs.load", seen)
        monkeypatch.setattr("shoal.cli.display.run_view.time", SimpleNamespace(sleep=look, monotonic=lambda: now.s))
        ended = follow_run(replace(load("one"), status=Status.RUNNING), Console(quiet=True))
    assert (ended.status, now.s > 5.0) == (Status.FINISHED, True)


def test_who_has_seen_enough_of_a_run_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def enough(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.display.run_view.time", SimpleNamespace(sleep=enough, monotonic=time.monotonic))
    with runs.create("train", "task: lenet", "one"):
        shown = said("runs one --follow")
        assert "starting workers" in shown
        assert shown.endswith("one goes on: shoal runs one --follow\n")
        assert runs.load("one").status.value == "running"


SPECS = {
    RunKind.LOOP: ActorLearnerSpec().to_yaml(),
    RunKind.TRAINING: TrainSpec(task="lenet").to_yaml(),
    RunKind.POPULATION: "{task: lenet, members: 4, evolution: {}}",
    RunKind.SERVING: ServingSpec(models=["cartpole@champion"]).to_yaml(),
    RunKind.PREDICTION: "{model: lenet, input: a, output: b}",
    RunKind.STREAM: "{mqtt: {}, online: {}, commit: {}}",
    RunKind.SWEEP: "{train: {task: lenet}, space: {}, trials: 4}",
}
VIEWS = {
    RunKind.LOOP: "LoopView",
    RunKind.TRAINING: "TrainView",
    RunKind.POPULATION: "PopulationView",
    RunKind.SWEEP: "SweepView",
}


@pytest.mark.parametrize("kind", RunKind)
def test_what_is_shown_of_a_run_depends_on_what_it_does_and_not_on_its_name(kind: RunKind) -> None:
    with runs.create("mine", SPECS.get(kind, "seed: 3"), "one"):
        record = runs.load("one")
        assert record.kind is kind
        assert type(make_view(record, None)).__name__ == VIEWS.get(kind, "NoneType")
        if kind in KINDS_WITHOUT_DISPLAY:
            refused = typed("runs one --follow").exception
            assert isinstance(refused, ConfigError)
            assert KINDS_WITHOUT_DISPLAY[kind] in str(refused)


def test_the_kind_that_is_written_goes_before_the_fields_of_the_spec() -> None:
    with runs.create("mine", "task: lenet", "one", kind=RunKind.LOOP):
        assert runs.load("one").kind is RunKind.LOOP
    with runs.recording("models: []", "mine", begun="training", kind=RunKind.TRAINING, run_id="two"):
        assert runs.load("two").kind is RunKind.TRAINING
