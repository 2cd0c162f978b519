"""The films of a run: what its folder has in `films`, served as pictures and as nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from shoal.errors import RunError
from shoal.extend.runs import load
from shoal.libs.console.answers import answer_json

NAME = re.compile(r"v(\d+)-e(\d+)-r([-+.\deinfa]+?)-([\w-]+)\.webp", re.ASCII)  # version, episode, return, actor
MAX_FILMS = 500


def list_films(request: Request) -> Response:
    """By version, then by episode."""
    found = [each for path in _find_folder(request).glob("*.webp") if (each := _describe(path)) is not None]
    return answer_json(sorted(found, key=lambda each: (each["version"], each["episode"]))[-MAX_FILMS:])


def send_film(request: Request) -> Response:
    """A file of the folder whose name is a film's; a link leads nowhere."""
    path = _find_folder(request) / request.path_params["name"]
    if _describe(path) is None:
        raise RunError(f"there is no film {path.name[:80]!r}")
    return FileResponse(path, media_type="image/webp", headers={"cache-control": "private, max-age=86400, immutable"})


def _find_folder(request: Request) -> Path:
    return load(request.path_params["run"]).folder / "films"


def _describe(path: Path) -> dict[str, Any] | None:
    if (found := NAME.fullmatch(path.name)) is None or path.is_symlink() or not path.is_file():
        return None
    version, episode, returned, actor = found.groups()
    status = path.stat()
    return {
        "name": path.name,
        "version": int(version),
        "episode": int(episode),
        "return": returned,
        "actor": actor,
        "time": status.st_mtime,
        "size_bytes": status.st_size,
    }


ROUTES = [Route("/api/runs/{run}/films", list_films), Route("/api/runs/{run}/films/{name}", send_film)]
