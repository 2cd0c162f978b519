"""Registered models: versions, aliases, what each came from and what it serves.

A promotion moves an alias of the registry, as `shoal models promote` does; endpoints that follow it serve the version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ConfigError, RunError
from shoal.extend.registry import ModelVersion, Registry
from shoal.extend.runs import Run, load
from shoal.extend.serve import EndpointStatus
from shoal.libs.console.answers import answer_json, with_fields
from shoal.libs.console.serving.endpoints_api import Endpoints
from shoal.store import store_url

MAX_DRAWN = 12  # versions of a lineage, beside those with an alias and those that an endpoint serves
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*@[0-9]+")


@cache
def _open_registry(url: str) -> Registry:
    """One that remembers the manifests that it has read, and waits for no store that is away."""
    registry = Registry()
    registry.store = registry.store.without_waiting()
    return registry


def list_models(request: Request) -> Response:
    """Every version of every model, oldest first."""
    return answer_json([_describe_row(each) for each in _open_registry(store_url()).list()])


def describe_model(request: Request) -> Response:
    """The versions of a model, and the moves of its aliases, oldest first."""
    registry, name = _open_registry(store_url()), request.path_params["name"]
    versions, aliases = registry.list(name), registry.aliases(name)
    moves = {alias: [each.model_dump() for each in moves] for alias, moves in aliases.moves.items()}
    return answer_json({"versions": [_describe_row(each) for each in versions], "moves": moves})


def describe_version(request: Request) -> Response:
    """Everything of a version's manifest, but for the text of its code."""
    version = _open_registry(store_url()).get("{name}@{version}".format(**request.path_params))
    manifest = json.loads(version.manifest.model_dump_json(exclude={"model": {"code"}}))
    code, run = version.manifest.model.code, _find_run(version.manifest.run_id)
    return answer_json(
        {
            **manifest,
            "aliases": list(version.aliases),
            "location": version.location,
            "code": [] if code is None else [*code.files, *code.binary],
            "run": run and {name: getattr(run, name) for name in ("name", "owner")},
        }
    )


def _describe_row(found: ModelVersion) -> dict[str, Any]:
    manifest = found.manifest
    return {
        **{name: getattr(manifest, name) for name in ("name", "version", "created_at", "run_id", "size_bytes")},
        "aliases": list(found.aliases),
        "metrics": manifest.metrics,
        "format": manifest.model.format,
    }


def promote(request: Request, fields: Mapping[str, Any]) -> Response:
    """Point `alias` at this version."""
    alias = fields.get("alias", "champion")
    if not isinstance(alias, str):
        raise ConfigError("alias", alias, "is not a name", "such as champion")
    found = Registry().promote("{name}@{version}".format(**request.path_params), alias)
    return answer_json({"aliases": list(found.aliases)})


def roll_back(request: Request, fields: Mapping[str, Any]) -> Response:
    """Move an alias back by one promotion."""
    found = Registry().rollback(request.path_params["name"], request.path_params["alias"])
    return answer_json({"version": found.version})


def draw_lineage(request: Request) -> Response:
    """Nodes and edges from what a model's versions were made of to the requests that they answer."""
    name, endpoints = request.path_params["name"], request.app.state.endpoints
    versions = _open_registry(store_url()).list(name)
    return answer_json(build_lineage(versions, endpoints, {each.manifest.run_id for each in versions[-100:]}))


def build_lineage(versions: Sequence[ModelVersion], endpoints: Endpoints, runs: set[str | None]) -> dict[str, Any]:
    """`nodes`: {id, kind, label, note, to}, where `to` is the page that one opens; `edges`: pairs of ids; `left_out`:
    the number of older versions. kind: run, checkpoint, version, alias, endpoint, requests, or base."""
    name = versions[-1].name
    served = list(_find_served(name, endpoints))
    wanted = {each["version"] for each in served}
    drawn = [
        each for index, each in enumerate(versions)
        if each.aliases or each.version in wanted or index >= len(versions) - MAX_DRAWN
    ]  # fmt: skip
    nodes: dict[str, dict[str, str]] = {}
    edges: dict[tuple[str, str], None] = {}

    def add(kind: str, key: str, label: str, note: str, to: str, *before: str) -> str:
        node = f"{kind} {key}"
        nodes.setdefault(node, {"id": node, "kind": kind, "label": label, "note": note, "to": to})
        edges.update({(each, node): None for each in before if each})
        return node

    for version in drawn:
        manifest, run_id = version.manifest, version.manifest.run_id
        number, origins = version.version, list[str]()
        if run_id:
            recorded, weights = _find_run(run_id), manifest.weights_version
            step = None if recorded is None else recorded.find_step(weights)
            title = recorded.name if recorded else "its record is not here"
            run_node = add("run", run_id, run_id, title, f"run/{run_id}")
            note = "" if step is None else f"step {step:,}"
            key, label = f"{run_id} {weights}", f"weights {weights}"
            origins.append(add("checkpoint", key, label, note, f"run/{run_id}?checkpoint", run_node))
        for word, value in manifest.lineage.items():
            if isinstance(value, str) and _REFERENCE.fullmatch(value):
                origins.append(add("base", value, value, word, f"models/{value.replace('@', '/')}"))
        note = ", ".join(f"{key} {value:.4g}" for key, value in list(manifest.metrics.items())[:1])
        own = add("version", f"{number}", f"{name}@{number}", note, f"models/{name}/{number}", *origins)
        for alias in version.aliases:
            add("alias", alias, alias, "", f"models/{name}/{number}?alias={alias}", own)
    for each in served:
        number = each["version"]
        endpoint = each["endpoint"]
        word = each["word"]
        by_alias = f"alias {word}" in nodes and (f"version {number}", f"alias {word}") in edges
        before = f"alias {word}" if by_alias else f"version {number}" if f"version {number}" in nodes else ""
        place = add("endpoint", endpoint, endpoint, each["state"], f"endpoints/{endpoint}", before)
        label = f"{each['requests']:,} requests"
        note = f"{each['rate']:.3g}/s by {number}, {each['track'] or 'loaded'}"
        add("requests", f"{endpoint} {number}", label, note, f"endpoints/{endpoint}/{name}", place)
    return {"nodes": list(nodes.values()), "edges": list(edges), "left_out": len(versions) - len(drawn)}


def _find_served(name: str, endpoints: Endpoints) -> Iterator[dict[str, Any]]:
    """Each version of the model that an endpoint has loaded, with the word by which it was deployed."""
    for found, reading in endpoints.read_all():
        status = reading.value or EndpointStatus(found.name)
        for model in status.models:
            is_registered = model.name == name and model.phase != "live"  # a run that is followed numbers its own
            for each in model.versions if is_registered else ():
                yield {
                    "endpoint": found.name,
                    "state": "asleep" if status.asleep else "ready" if status.ready else "not ready",
                    "word": model.source.partition("@")[2],
                    "version": each.version,
                    "track": each.track,
                    "requests": each.requests,
                    "rate": each.requests_per_s,
                }


def _find_run(run_id: str | None) -> Run | None:
    """The run that made a version; None where no record of it is here."""
    try:
        return load(run_id) if run_id else None
    except RunError:
        return None


ROUTES = [
    Route("/api/models", list_models),
    Route("/api/models/{name}", describe_model),
    Route("/api/models/{name}/lineage", draw_lineage),
    Route("/api/models/{name}/aliases/{alias}/rollback", with_fields(roll_back), methods=["POST"]),
    Route("/api/models/{name}/{version:int}", describe_version),
    Route("/api/models/{name}/{version:int}/promote", with_fields(promote), methods=["POST"]),
]
