"""Writes docs/reference: every verb with its help, and every field of each kind of job. `make docs` runs it.

    python docs/make_reference.py [--check]

--check: exit with 1 where a page is not as it would be written
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from shoal.cli import HEADINGS, cli, find_commands
from shoal.config import Spec
from shoal.config.field_help import FieldHelp, list_field_help
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.serving_spec import ServingSpec
from shoal.libs.batch_predict.flow import BatchPredictSpec
from shoal.libs.kube.spec import KubeSpec
from shoal.libs.population.loop.spec import RLPopulationSpec
from shoal.libs.population.spec import PopulationSpec
from shoal.libs.stream.spec import StreamSpec
from shoal.libs.sweep.spec import SweepSpec
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions
from shoal.rl.algorithm_config import CONFIGS, GROUP
from shoal.sync.config import list_kinds
from shoal.train.spec import TrainSpec

FOLDER = Path(__file__).parent / "reference"
WIDTH = 100
JOBS: dict[str, tuple[Spec, str]] = {
    "A training": (TrainSpec(), "shoal run train task=my_task.py:MyTask stop.epochs=3"),
    "An endpoint": (ServingSpec(), "shoal serve deploy cartpole@champion"),
    "A run of the loop": (ActorLearnerSpec(env="CartPole-v1"), "shoal run actor_learner env=CartPole-v1"),
    "A sweep": (SweepSpec(), "shoal sweep lenet 'optimizer.learning_rate=log(1e-4,1e-1)'"),
    "A population": (PopulationSpec(), "shoal run population"),
    "A population of learners": (RLPopulationSpec(), "shoal run rl_population"),
    "A stream": (StreamSpec(), "shoal run stream"),
    "A batch prediction": (BatchPredictSpec(), "shoal batch-predict cartpole rows.csv predicted"),
    "Manifests": (
        KubeSpec(name="lab", image="example.org/lab/shoal:1", store="s3://BUCKET/shoal"),
        "shoal kube render job lenet",
    ),
}
# What a word chooses: the prefix of its fields, the page about it, and its configurations by their words.
CHOICES: dict[str, tuple[str, str, Callable[[], dict[str, str]]]] = {
    "Algorithms": (
        "algorithm.",
        "[the algorithms](../algorithms.md) say what they do",
        lambda: {**CONFIGS, **collect_extensions(GROUP)},
    ),
    "Synchronisation": (
        "sync.",
        "[training without waiting](../training/synchronisation.md) says what they do",
        list_kinds,
    ),
}


def main() -> int:
    """Write the pages, or compare them."""
    pages = {"commands.md": "\n".join(write_commands()), "fields.md": "\n".join(write_fields())}
    if "--check" in sys.argv[1:]:
        wrong = [name for name, text in pages.items() if (FOLDER / name).read_text() != text]
        for name in wrong:
            print(f"docs/reference/{name} is not what the code says: run python docs/make_reference.py")
        return bool(wrong)
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages.items():
        (FOLDER / name).write_text(text)
    return 0


def write_commands() -> Iterator[str]:
    """Lines of the page of verbs."""
    yield "# Every command\n"
    yield "The program's own help, by `docs/make_reference.py`. [The command line](../commands.md) has examples.\n"
    commands = find_commands()
    with click.Context(cli, info_name="shoal", **cli.context_settings) as context:
        for heading in HEADINGS:
            yield f"## {heading.capitalize()}\n"
            for verb in [each for each, (_, belongs, _) in commands.items() if belongs == heading]:
                command = cli.get_command(context, verb)
                assert command is not None
                yield from _write_command(command, verb, context)


def _write_command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    if name == "actor":  # the program of the package for actors, which takes words of its own
        from shoal.actor.__main__ import make_parser

        yield f"### shoal {name}\n\n```text\n{make_parser().format_help().strip()}\n```\n"
        return
    with click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    ) as context:
        path = context.command_path
        yield f"### {path}\n\n```text\n{command.get_help(context).strip()}\n```\n"
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                inner = command.get_command(context, each)
                assert inner is not None
                yield from _write_command(inner, each, context)


def write_fields() -> Iterator[str]:
    """Lines of the page of fields. A field of several jobs is described once, and the others name it."""
    yield "# Every field\n"
    yield "Made from the specs by `docs/make_reference.py`: fields as an override names them.\n"
    jobs = {title: list(list_field_help(spec)) for title, (spec, _) in JOBS.items()}
    words = {
        title: {
            word: list(list_field_help(load_reference(place)(), prefix)) for word, place in sorted(places().items())
        }
        for title, (prefix, _, places) in CHOICES.items()
    }
    described = {each: word for tables in words.values() for word, fields in tables.items() for each in fields}
    for title, fields in jobs.items():
        described = dict.fromkeys(fields, title) | described
        yield f"## {title}\n\n`{JOBS[title][1]}`\n"
        yield from _write_table(each for each in fields if described[each] == title)
        for other in dict.fromkeys(described[each] for each in fields if described[each] != title):
            paths = ", ".join(f"`{each.path}`" for each in fields if described[each] == other)
            yield f"Also {paths}: see [{other}](#{other.lower().replace(' ', '-')}).\n"
    for title, tables in words.items():
        prefix, text, _ = CHOICES[title]
        yield f"## {title}\n\nThe fields of each, below `{prefix}`; {text}.\n"
        for word, fields in tables.items():
            yield f"### {word}\n"
            yield from _write_table(fields)


def _write_table(fields: Iterable[FieldHelp]) -> Iterator[str]:
    yield "| field | default | type | meaning |\n|---|---|---|---|"
    for each in fields:
        cells = (f"`{each.path}`", f"`{each.value}`", each.type, each.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    sys.exit(main())
