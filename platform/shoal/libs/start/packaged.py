"""`shoal client` and `shoal where`: files that come with the package, and are used outside of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import click

from shoal.extend.cli import verb
from shoal.recipes import find_packaged

# The client of each engine: the file that a game needs. A folder is needed as it is.
CLIENTS = {
    "cpp": "cpp/shoal.hpp",
    "csharp": "csharp/Shoal.cs",
    "godot": "godot/shoal4.gd",
    "godot3": "godot/shoal3.gd",
    "javascript": "javascript",
}


@verb()
def client(
    engine: Annotated[str, click.Choice(list(CLIENTS))],
    *,
    out: Annotated[Path | None, "--out FOLDER", "Write it to a new folder, with a game that uses it."] = None,
) -> str:
    """Print the client of an ENGINE: the file by which a game joins a run, without packages.

    That of JavaScript is several files, and becomes a folder. docs/games/ has a page for each.

    \b
    Examples:
      shoal client godot > shoal.gd
      shoal client cpp --out clients/cpp
      shoal client javascript --out clients/javascript
    """
    path = find_packaged("clients") / CLIENTS[engine]
    if path.is_file() and out is None:
        return path.read_text().removesuffix("\n")
    folder, target = path if path.is_dir() else path.parent, out or Path(engine)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("node_modules"))
    return f"{target} is written"


@verb()
def where(name: Annotated[str, click.Choice(["clients", "constraints.txt", "jobs", "serve_apps"])]) -> str:
    """Print the path of something that comes with Shoal: the clients of engines, the versions of packages that this
    release was tested with, recipes.

    \b
    Examples:
      pip install -c $(shoal where constraints.txt) 'CHECKOUT[cluster]'     # Shoal's sources, or its wheel
      cp $(shoal where jobs)/lenet.py my_lenet.py
    """
    return str(find_packaged(name))
