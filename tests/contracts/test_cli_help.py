"""Every verb has --help with an example, and a complaint names the field and the remedy, in one line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shoal.cli import COMMANDS, cli, main


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_of_every_verb_has_an_example(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    text = result.output + capfd.readouterr().out
    assert result.exit_code == 0
    assert "shoal" in text
    assert "xample" in text


def test_the_program_without_words_lists_its_verbs() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert all(verb in result.output for verb in COMMANDS)


def test_a_mistake_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shoal", "run", "no_such_job"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.strip().startswith("error: job = 'no_such_job': is neither a file nor in ./jobs")


@pytest.mark.parametrize("verb", ["serve", "find", "models"])
def test_the_list_of_a_groups_verbs_cuts_no_sentence(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    listed = result.output.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
