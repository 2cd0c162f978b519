"""`shoal runs --follow`: a run watched from anywhere, to its end or until one has seen enough."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from shoal import runs
from shoal.cli.commands.runs import runs as runs_command
from shoal.cli.display.run_view import KINDS_WITHOUT_DISPLAY, follow_run, make_view
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.serving_spec import ServingSpec
from shoal.runs import Run, RunKind, Status
from shoal.train.spec import TrainSpec


def typed(*words: str) -> str:
    result = CliRunner().invoke(runs_command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


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
        said = typed("latest", "--follow").splitlines()
    assert "waiting for actors" in said[0]
    assert "learning: return 100" in said[1]
    assert "finished" in "".join(said[2:6])


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
        said = typed("one", "--follow")
        assert "starting workers" in said
        assert said.endswith("one goes on: shoal runs one --follow\n")
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
            refused = CliRunner().invoke(runs_command, ["one", "--follow"]).exception
            assert isinstance(refused, ConfigError)
            assert KINDS_WITHOUT_DISPLAY[kind] in str(refused)


def test_the_kind_that_is_written_goes_before_the_fields_of_the_spec() -> None:
    with runs.create("mine", "task: lenet", "one", kind=RunKind.LOOP):
        assert runs.load("one").kind is RunKind.LOOP
    with runs.recording("models: []", "mine", begun="training", kind=RunKind.TRAINING, run_id="two"):
        assert runs.load("two").kind is RunKind.TRAINING
