"""The command line as a whole: what a job gets of its environment, and an interruption while a verb is loaded."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shoal.cli import cli
from shoal.cli.job_words import job_environment


def test_a_job_finds_what_is_found_where_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/here")
    assert job_environment("one", "shoal run x")["PYTHONPATH"] == "/here"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in job_environment("one", "shoal run x")


def test_ctrl_c_while_a_verb_is_loaded_ends_as_any_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    result = CliRunner().invoke(cli, ["runs"])
    assert (result.exit_code, result.output) == (130, "")
