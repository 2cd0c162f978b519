"""`shoal runs --follow`: a run watched from anywhere, to its end or until one has seen enough."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from shoal import runs
from shoal.cli.runs import runs as runs_command
from shoal.cli.watch import follow
from shoal.errors import ConfigError
from shoal.runs import Run, Status


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))


def typed(*words: str) -> str:
    result = CliRunner().invoke(runs_command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_is_followed_to_its_end_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with runs.create("x", "target_return: 475", "one") as run:
        run.event("gateway_ready", address="tcp://h", env="E", server_key="")
        run.endpoint("inference", "inference", "http://h", "ready")
        run.endpoint("gateway", "gateway", "tcp://h", "ready")
        looks = iter(["steps", "end"])

        def look(seconds: float) -> None:
            if next(looks) == "end":
                run.finish("finished")
                return
            run.log(1, {"return/mean_100": 100.0, "steps/total": 7.0})
            run.flush()

        monkeypatch.setattr("shoal.cli.watch.time", SimpleNamespace(sleep=look, monotonic=time.monotonic))
        said = typed("latest", "--follow").splitlines()
    assert "waiting for actors" in said[0]
    assert "learning: return 100.0" in said[1]
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
        monkeypatch.setattr("shoal.cli.watch.time", SimpleNamespace(sleep=look, monotonic=lambda: now.s))
        ended = follow(replace(load("one"), status=Status.RUNNING), Console(quiet=True))
    assert (ended.status, now.s > 5.0) == (Status.FINISHED, True)


def test_who_has_seen_enough_of_a_run_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def enough(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.watch.time", SimpleNamespace(sleep=enough, monotonic=time.monotonic))
    with runs.create("train", "", "one"):
        said = typed("one", "--follow")
        assert "starting workers" in said
        assert said.endswith("one goes on: shoal runs one --follow\n")
        assert runs.load("one").status.value == "running"


@pytest.mark.parametrize(("words", "said"), [([], "needs one run"), (["one"], "look at it with shoal serve status")])
def test_what_cannot_be_followed_is_refused(words: list[str], said: str) -> None:
    with runs.create("serve", "", "one"):
        refused = CliRunner().invoke(runs_command, [*words, "--follow"]).exception
    assert isinstance(refused, ConfigError)
    assert said in str(refused)
