"""What is said while a command has nothing else to say."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shoal.api import Attachment
from shoal.cli.support import verbs
from shoal.errors import ClusterError
from shoal.runs import waits
from shoal.runs.waits import WaitReporter
from waiting import wait_for


def test_what_is_waited_for_is_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waits, "INTERVAL_S", 0.01)
    with WaitReporter("starting workers") as reporter:
        wait_for(lambda: "starting workers, 0 s" in capsys.readouterr().err)
        reporter.wait_for("training")
        wait_for(lambda: "training, 0 s" in capsys.readouterr().err)


def test_a_program_says_that_it_waits_for_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_cluster() -> None:
        wait_for(lambda: "starting Ray, 0 s" in capsys.readouterr().err)
        raise ClusterError("no port is free")

    monkeypatch.setattr(waits, "INTERVAL_S", 0.01)
    monkeypatch.setattr("shoal.cluster.attach.find_cluster", lambda: None)
    monkeypatch.setattr("shoal.cluster.embedded_cluster.start_cluster", start_cluster)
    with pytest.raises(ClusterError, match="no port"):
        Attachment().acquire()


def test_a_verb_that_works_for_long_cleans_up_when_it_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(verbs, "interrupt_on_termination", lambda: prepared.append("SIGTERM is Ctrl-C"))
    for decorate in (verbs.verb(work="working"), verbs.verb()):
        CliRunner().invoke(decorate(lambda: prepared.append("worked")), catch_exceptions=False)
    assert prepared == ["SIGTERM is Ctrl-C", "worked", "worked"]
