"""The films of a run and sheets of its predictions: files of its folder, sent by their names and as nothing else."""

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

_RETURN = r"-?(?:[\d.]+(?:e[-+]\d+)?|inf|nan)"  # as `:.6g` writes it
NAME = re.compile(rf"v(\d+)-e(\d+)-r({_RETURN})-([\w-]+)\.webp", re.ASCII)  # version, episode, return, actor
SHEET = re.compile(r"e([\d.]+)-s(\d+)\.json", re.ASCII)  # epoch, step
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


def list_sheets(request: Request) -> Response:
    """The evaluations whose predictions were drawn, oldest first."""
    paths = sorted(_find_folder(request, "samples").glob("e*.json"))
    found = [(path, match) for path in paths if (match := SHEET.fullmatch(path.name)) is not None]
    return answer_json(
        [
            {"name": path.stem, "epoch": float(match[1]), "step": int(match[2]), "drawn": _is_file(_find_picture(path))}
            for path, match in found[-MAX_FILMS:]
            if _is_file(path)
        ]
    )


def send_sheet(request: Request) -> Response:
    """Its rows as JSON, or with `.webp` its picture."""
    name = request.path_params["name"]
    path = _find_folder(request, "samples") / f"{name.removesuffix('.webp')}.json"
    chosen = _find_picture(path) if name.endswith(".webp") else path
    if SHEET.fullmatch(path.name) is None or not _is_file(chosen):
        raise RunError(f"there is no sheet {name[:80]!r}")
    kind = "image/webp" if chosen.suffix == ".webp" else "application/json"
    return FileResponse(chosen, media_type=kind)


def _find_picture(path: Path) -> Path:
    return path.with_suffix(".webp")


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _find_folder(request: Request, name: str = "films") -> Path:
    return load(request.path_params["run"]).folder / name


def _describe(path: Path) -> dict[str, Any] | None:
    if (found := NAME.fullmatch(path.name)) is None or not _is_file(path):
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


ROUTES = [
    Route("/api/runs/{run}/films", list_films),
    Route("/api/runs/{run}/films/{name}", send_film),
    Route("/api/runs/{run}/samples", list_sheets),
    Route("/api/runs/{run}/samples/{name}", send_sheet),
]
