"""`shoal new`: copy a template under another name.

A template is a folder of files, which would run without `.template` at their ends. Their names and texts have `my_KIND`
and `MyKind` where the user's name comes.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import click

from shoal.errors import ConfigError
from shoal.extend.cli import verb

TEMPLATES = Path(__file__).parent / "templates"
NEXT = {
    "task": (
        "python -m shoal.train task=my_task.py:MyTask stop.epochs=5 optimizer.learning_rate=0.01",
        "shoal run train task=my_task.py:MyTask stop.epochs=5 optimizer.learning_rate=0.01",
        "pytest test_my_task.py",
    ),
    "actor": (
        "shoal run actor_learner env=ask target_return=8 algorithm.learning_rate=0.01",
        "python my_actor.py tcp://127.0.0.1:PORT     # in another terminal, with the address that the run prints",
        "shoal play my_actor --env my_actor.py:Alone --record film.webp     # once the run has ended",
        "pytest test_my_actor.py",
    ),
    "endpoint": (
        "python my_endpoint.py",
        "shoal up     # unless a cluster is up",
        "shoal serve deploy my_endpoint.yaml",
        "pytest test_my_endpoint.py",
    ),
    "library": ("pip install --no-deps -e ./my_library", "shoal my_library", "pytest my_library"),
}
PAGES = {
    "task": "tutorials/from-a-script.md",
    "actor": "tutorials/your-game.md",
    "endpoint": "serving/hooks.md",
    "library": "extending.md#a-library",
}


@verb()
def new(kind: Annotated[str, click.Choice(list(NEXT))], name: str | None = None) -> Iterator[str]:
    """Write files to begin with into this folder: something small of this KIND that runs, and its test.

    NAME is what it is called, a name of Python's; by default my_task, my_actor, my_endpoint or my_library. Where a file
    is there already, nothing is written.

    \b
    Examples:
      shoal new task digits
      shoal new actor paddle
      shoal new endpoint ranker
      shoal new library reports
    """
    written = write_template(kind, name or f"my_{kind}", Path())
    yield from (f"{path} is written" for path in written)
    yield "\nNext:\n"
    yield from (f"  {rename(line, kind, name or f'my_{kind}')}" for line in NEXT[kind])
    yield f"\ndocs/{PAGES[kind]} goes on from there."


def write_template(kind: str, name: str, folder: Path) -> list[Path]:
    """Copy the template of a kind into a folder; returns the files.

    Raises ConfigError for a name that is none of Python's, and where one of the files is there already.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError("name", name, "is no name of a module", "use small letters, digits and _, as in my_game")
    template = TEMPLATES / kind
    files = {
        folder / rename(str(path.relative_to(template)).removesuffix(".template"), kind, name): path
        for path in sorted(template.rglob("*"))
        if path.is_file()
    }
    if there := [path for path in files if path.exists()]:
        raise ConfigError("name", name, f"{there[0]} is there already", "choose another name")
    for path, source in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rename(source.read_text(), kind, name))
    return list(files)


def rename(text: str, kind: str, name: str) -> str:
    """A text of a template with the user's name: `my_task` becomes `digits`, and `MyTask` becomes `Digits`."""
    return text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", name.title().replace("_", ""))
