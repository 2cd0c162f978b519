"""Every fenced command of the README and the guides is understood as the program would, or marked as one that is not.

A line of a block of the shell is one of ours: its verb, options and fields are parsed, and a training run says when it
ends. Or it is a program's of others, `OF_OTHERS`. Or its block is below `<!-- not run: REASON -->`. Nothing is started
here: pages with commands that run have tests beside the code (test_training_docs, test_serving_docs).
"""

import functools
import importlib.util
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from blocks import read_blocks, read_files
from shoal.cli import cli
from shoal.cli.support.jobs import find_job
from shoal.cli.support.verbs import DefaultCommandGroup
from shoal.config import Spec, last_override
from shoal.errors import ShoalError
from shoal.flows.serving_spec import ServingSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.launch.validate import validate_spec
from shoal_program import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("", "bash", "sh")
OF_OTHERS = {  # programs of which a test here can know nothing
    *("aws", "cd", "cp", "curl", "docker", "echo", "eval", "export", "grep", "head", "helm", "kubectl", "ssh", "tail"),
    *("./catch", "g++", "mcs", "mono"),
    *("godot3-server", "node", "npm", "pip", "printf", "python3", "ray", "source"),
}
_BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n\n?)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read_commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in its shell blocks, without comments and the variables before it."""
    for mark, info, text in _BLOCK.findall(page.read_text()):
        if info not in SHELL or mark:
            continue
        waiting = ""
        for line in re.sub(r"\$\(.*?\)|\$PWD/", "", text.replace("\\\n", " ")).splitlines():
            waiting += line.partition("  #")[0] + "\n"
            try:
                words = shlex.split(waiting)
            except ValueError:  # a quotation that the next line closes
                continue
            waiting = ""
            for separates, command in itertools.groupby(
                words, lambda word: word in ("&", "&&", "|", "{", "}", "};", "}|")
            ):
                if not separates:
                    words = itertools.dropwhile(lambda word: re.match(r"\w+=", word), command)
                    yield list(itertools.takewhile(lambda word: word != ">", words))
        assert not waiting, f"{page}: {waiting}"


def check_command(words: list[str]) -> None:
    """Raises AssertionError, ClickException or a ShoalError for what the program would not understand."""
    match words:
        case ["shoal", verb, *rest]:
            check_shoal(verb, rest)
            if verb == "new":  # later commands of the page name what it writes
                CliRunner().invoke(cli, ["new", *rest])
        case ["torchrun", *rest]:
            check_command(["python", *rest[rest.index("-m") :]])
        case ["python", "-m", "shoal.train", *fields]:
            check_fields(Path("train"), fields)
        case ["python", "-c", *_]:
            pass
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, module
        case ["python", file, *fields]:
            check_fields(find_file(file), [each for each in fields if not each.startswith("-")])
        case ["ray", "job", "submit", *rest]:
            check_command(rest[rest.index("--") + 1 :])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case []:  # variables alone
            pass
        case [program, *_]:
            assert program in OF_OTHERS, f"{program} is no program of ours; mark the block, or add it to OF_OTHERS"


def check_shoal(verb: str, words: list[str]) -> None:
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None, verb
    while isinstance(found, click.Group):
        context = click.Context(found)
        if isinstance(found, DefaultCommandGroup) and not (words and words[0] in found.list_commands(context)):
            words.insert(0, found.default)
        inner = found.get_command(context, words.pop(0))
        assert inner is not None
        found = inner
    shown = ("--help", "--all") if "--help" in words else ()  # `--all` is of the help of a job
    with found.make_context(verb, [each for each in words if each not in shown]) as context:
        if verb == "run":
            check_fields(find_file(context.params["job"]), context.params["overrides"])
        if (verb, found.name) == ("serve", "deploy"):
            ServingSpec(models=["mine"]).override([each for each in context.params["arguments"] if "=" in each])
        if (verb, found.name) == ("serve", "set"):
            ModelOptions().override(list(context.params["overrides"]))


def find_file(job: str) -> Path:
    """The file of a job, of this repository or of the page's own."""
    near = [place / job for place in (Path(), ROOT) if (place / job).is_file()]
    return near[0] if near else find_job(job)


def check_fields(job: Path, fields: list[str]) -> None:
    """The fields of a run, by the spec of its job; a training run says when it ends."""
    if any(each.startswith("resume=") for each in fields):
        return  # of a run that is not here
    if job.stem == "train":  # of a file that the page does not have, the fields alone are of interest
        task = last_override(fields, "task").partition(":")[0]
        is_absent = task.endswith(".py") and not Path(task).exists()
        spec = spec_from_overrides([*fields, *(["task=my_task.py:MyTask"] * is_absent)])
        if not is_absent:
            validate_spec(spec)
    elif job.stem == "policies":  # of a game that the page does not have: that of the recipe
        words = [each for each in fields if not each.startswith("env=my_games")]
        runpy.run_path(str(job))["spec"](words).override(words)
    elif job.parent == ROOT / "jobs" and (spec := make_spec(job)):
        spec.override(fields)


@functools.cache
def make_spec(job: Path) -> Spec | None:
    """What a job of the repository changes by its fields; None where it is made of them."""
    make = runpy.run_path(str(job)).get("spec")
    return make() if make else None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shoal_home: Path) -> Iterator[Path]:
    """A folder with the Task and the network that many commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for page, name, wanted in (
        ("training", "my_task.py", "class MyTask"),
        ("algorithms/own-network", "my_net.py", "class Net"),
    ):
        (tmp_path / name).write_text(next(block for block in read_blocks(f"{page}.md") if wanted in block))
    yield tmp_path
    for name in [name for name, each in sys.modules.items() if str(tmp_path) in (getattr(each, "__file__", "") or "")]:
        del sys.modules[name]


def test_every_command_of_the_pages_is_understood(place: Path) -> None:
    wrong = []
    for page in PAGES:
        for name, text in read_files(str(page)).items():
            (place / name).write_text(text)
        for words in read_commands(page):
            try:
                check_command(words)
            except (AssertionError, click.ClickException, ShoalError) as error:
                wrong.append(f"{page.relative_to(ROOT)}: {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command",
    [
        "shoal runn lenet",
        "shoal serve deploy mine --replica 2",
        "shoal serve deploy mine endpoint.num_replica=2",
        "shoal serve set mine deadline=0.1",
        "shoal run lenet batch_sise=3",
        "shoal run train task=my_task.py:MyTask",
        "python -m shoal.train task=my_task.py:MyTask",
        "python -m shoal.nothing",
        "python jobs/nothing.py",
        "ray job submit -- python jobs/train.py task=my_task.py:MyTask",
        "make nothing",
        "unknown program",
    ],
)
def test_what_would_fail_is_noticed(place: Path, command: str) -> None:
    with pytest.raises((AssertionError, click.ClickException, ShoalError)):
        check_command(shlex.split(command))


def test_ones_own_game_takes_eight_commands(tmp_path: Path) -> None:
    """From a clone until it is trained, watched and served."""
    page, is_there, _ = (ROOT / "docs/tutorials/your-game.md").read_text().partition("## Clear up")
    assert is_there
    (tmp_path / "page.md").write_text(page)
    assert len([words for words in read_commands(tmp_path / "page.md") if words]) <= 8
