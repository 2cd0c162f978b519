"""Every verb has --help with an example, and a complaint names the field and the remedy, in one line."""

from pathlib import Path

import pytest

from shoal.cli import COMMANDS, HEADINGS, find_commands, main
from shoal.config import Spec
from shoal.config.field_help import choose_main, list_field_help
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.population.loop.spec import RLPopulationSpec
from shoal.libs.stream.spec import StreamSpec
from shoal.libs.sweep.spec import SweepSpec
from shoal.train.spec import TrainSpec
from typed import typed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_of_every_verb_has_an_example(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = typed("", verb, "--help")
    text = result.output + capfd.readouterr().out
    assert result.exit_code == 0
    assert "shoal" in text
    assert "xample" in text


def test_the_program_without_words_lists_its_verbs() -> None:
    result = typed("--help")
    assert all(verb in result.output for verb in COMMANDS)


def test_every_verb_has_a_heading() -> None:
    assert {verb: heading for verb, (_, heading, _) in find_commands().items() if heading not in HEADINGS} == {}


@pytest.mark.parametrize("spec", [TrainSpec, ActorLearnerSpec, AgentsSpec, StreamSpec, SweepSpec, RLPopulationSpec])
def test_the_help_of_a_job_begins_with_about_ten_fields_and_names_its_page(spec: type[Spec]) -> None:
    fields = list(list_field_help(spec()))
    main = choose_main(fields, spec.main_fields)
    assert [path for path in spec.main_fields if not any(f"{each.path}.".startswith(f"{path}.") for each in main)] == []
    assert 6 <= len(main) <= 12
    assert (ROOT / "docs" / spec.page).is_file()
    with pytest.raises(ConfigError, match=f"no such field.*See docs/{spec.page}$"):
        spec().override(["no_such_thing=1"])


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
    result = typed("", verb, "--help")
    listed = result.output.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
