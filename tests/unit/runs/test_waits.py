"""What is said while a command has nothing else to say."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shoal.cli.support import verbs
from shoal.runs import waits
from shoal.runs.waits import WaitReporter
from waiting import wait_for


def test_what_is_waited_for_is_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waits, "INTERVAL_S", 0.01)
    with WaitReporter("starting workers") as reporter:
        wait_for(lambda: "starting workers, 0 s" in capsys.readouterr().err)
        reporter.wait_for("training")
        wait_for(lambda: "training, 0 s" in capsys.readouterr().err)


def test_a_verb_that_works_for_long_cleans_up_when_it_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(verbs, "interrupt_on_termination", lambda: prepared.append("SIGTERM is Ctrl-C"))
    for decorate in (verbs.verb(work="working"), verbs.verb()):
        CliRunner().invoke(decorate(lambda: prepared.append("worked")), catch_exceptions=False)
    assert prepared == ["SIGTERM is Ctrl-C", "worked", "worked"]
