"""The OpenAPI 3.1 document of an endpoint: every path of `paths`, with what it takes, gives and refuses.

Called by the REST application for GET /openapi.json. The schemas of messages are made from the messages themselves, but
for the request of an inference, whose tensors the protocol describes in words. Pure.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from shoal.open_inference import messages
from shoal.open_inference.datatypes import DATATYPES
from shoal.serve.http.routes import ADMIN_ACTIONS, POST_ACTIONS, UNAUTHENTICATED_ACTIONS, RouteAction

Json = dict[str, Any]

_LENGTH = "Bytes of the JSON object, when the bytes of tensors follow it"

TITLE = "Shoal endpoint"
ABOUT = "The Open Inference Protocol v2 with its extensions; docs/inference-protocol.md says it in words."

TEMPLATES: dict[str, RouteAction] = {
    "/v2": RouteAction.SERVER,
    "/v2/health/live": RouteAction.LIVE,
    "/v2/health/ready": RouteAction.READY,
    "/v2/models/stats": RouteAction.STATISTICS,
    **{
        f"/v2/models/{{model}}{version}{rest}": action
        for version in ("", "/versions/{version}")
        for rest, action in {
            "": RouteAction.MODEL,
            "/ready": RouteAction.MODEL_READY,
            "/config": RouteAction.MODEL_CONFIG,
            "/infer": RouteAction.INFER,
            "/stats": RouteAction.STATISTICS,
        }.items()
    },
    "/v2/repository/index": RouteAction.INDEX,
    "/v2/repository/models/{model}/load": RouteAction.LOAD,
    "/v2/repository/models/{model}/unload": RouteAction.UNLOAD,
    "/shoal/v1/status": RouteAction.STATUS,
    "/shoal/v1/rollout": RouteAction.ROLLOUT,
    "/metrics": RouteAction.METRICS,
    "/openapi.json": RouteAction.OPENAPI,
}
SUMMARIES: dict[RouteAction, str] = {
    RouteAction.SERVER: "Who serves, and which extensions of the protocol",
    RouteAction.LIVE: "Whether the server can be reached",
    RouteAction.READY: "Whether every model can be asked",
    RouteAction.MODEL: "What a model takes and gives, and which versions there are",
    RouteAction.MODEL_READY: "Whether a model, or this version of it, can be asked",
    RouteAction.MODEL_CONFIG: "How a model is served",
    RouteAction.INFER: "Ask a model",
    RouteAction.STATISTICS: "What the replica that answers has counted of each version",
    RouteAction.INDEX: "Every version of every model that is, or could be, served",
    RouteAction.LOAD: "Serve a registered model",
    RouteAction.UNLOAD: "Stop serving a model, after what is queued was answered",
    RouteAction.STATUS: "The whole endpoint: models, versions, replicas",
    RouteAction.ROLLOUT: "Change which versions answer",
    RouteAction.METRICS: "Counters for Prometheus",
    RouteAction.OPENAPI: "This document",
}
REFUSALS: dict[int, str] = {
    400: "Not a request",
    401: "No known key",
    403: "Not with this key",
    404: "No such model or version",
    408: "The body comes too slowly",
    409: "It does not fit what is going on",
    413: "The body is too large",
    414: "The path is too long",
    415: "An encoding of the body that is not supported",
    422: "A tensor that does not fit: says which, what was expected, and what came",
    429: "The queue is full, or the key is over its rate",
    431: "The headers are too large",
    500: "The model failed",
    503: "Not ready, or closing",
    504: "Not before the deadline",
}
_OF_MODEL = {404}
_OWN: dict[RouteAction, set[int]] = {
    RouteAction.READY: {503},
    RouteAction.MODEL: _OF_MODEL,
    RouteAction.MODEL_READY: _OF_MODEL | {503},
    RouteAction.MODEL_CONFIG: _OF_MODEL,
    RouteAction.INFER: _OF_MODEL | {422, 500, 503, 504},
    RouteAction.STATISTICS: _OF_MODEL,
    RouteAction.LOAD: _OF_MODEL | {409, 503},
    RouteAction.UNLOAD: _OF_MODEL | {409, 503},
    RouteAction.STATUS: {503},
    RouteAction.ROLLOUT: _OF_MODEL | {409, 503},
    RouteAction.METRICS: _OF_MODEL,
}
_ANSWERS: dict[RouteAction, tuple[str, Any]] = {  # name of the schema, and the message that it is of, or the schema
    RouteAction.SERVER: ("ServerMetadata", messages.ServerMetadata),
    RouteAction.MODEL: ("ModelMetadata", messages.ModelMetadata),
    RouteAction.INFER: ("InferResponse", messages.InferResponse),
    RouteAction.STATISTICS: ("Statistics", messages.Statistics),
    RouteAction.INDEX: ("Index", {"type": "array", "items": {"$ref": "#/components/schemas/IndexedModel"}}),
    RouteAction.LIVE: ("Live", {"type": "object", "properties": {"live": {"const": True}}, "required": ["live"]}),
    RouteAction.READY: ("Ready", {"type": "object", "properties": {"ready": {"const": True}}, "required": ["ready"]}),
}
_BODIES: dict[RouteAction, str] = {
    RouteAction.INFER: "InferRequest",
    RouteAction.INDEX: "IndexRequest",
    RouteAction.LOAD: "RepositoryRequest",
    RouteAction.UNLOAD: "RepositoryRequest",
    RouteAction.ROLLOUT: "Change",
}


@functools.cache
def document() -> Json:
    """The document. Callers do not change it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": "2", "description": ABOUT},
        "paths": {
            template: {"post" if action in POST_ACTIONS else "get": _operation(template, action)}
            for template, action in TEMPLATES.items()
        },
        "components": {
            "schemas": _schemas(),
            "headers": {
                "shoal-model-version": _header("The version that answered", {"type": "integer"}),
                "retry-after": _header("Seconds until it may be worth to try again", {"type": "integer"}),
                "inference-header-content-length": _header(_LENGTH, {"type": "integer"}),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


_HEADERS: dict[str, tuple[str, Json]] = {
    "inference-header-content-length": (_LENGTH, {"type": "integer", "minimum": 0}),
    "shoal-deadline-ms": ("Nobody wants the answer later", {"type": "number", "exclusiveMinimum": 0}),
    "shoal-track": ("A side of a canary", {"enum": ["stable", "candidate"]}),
    "shoal-sticky": (
        "Calls with one key get one side of a canary; percent-decoded",
        {"type": "string", "maxLength": 256},
    ),
}


def _operation(template: str, action: RouteAction) -> Json:
    of = "_version" if "{version}" in template else "_all" if template == "/v2/models/stats" else ""
    operation: Json = {
        "operationId": action.name.lower() + of,
        "summary": SUMMARIES[action],
        "parameters": _parameters(template, action),
        "responses": {"200": _success(action), **{str(status): _refusal(status) for status in _statuses(action)}},
    }
    if action in UNAUTHENTICATED_ACTIONS:
        operation["security"] = []
    if action in _BODIES:
        content: Json = {"application/json": {"schema": _ref(_BODIES[action])}}
        if action is RouteAction.INFER:
            content["application/octet-stream"] = {}
        operation["requestBody"] = {"content": content, "required": action in (RouteAction.INFER, RouteAction.ROLLOUT)}
    return operation


def _parameters(template: str, action: RouteAction) -> list[Json]:
    found: list[Json] = []
    if "{model}" in template:
        found.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if "{version}" in template:
        version = {"type": "string", "pattern": "^[0-9]+$"}
        found.append({"name": "version", "in": "path", "required": True, "schema": version})
    if action is RouteAction.INFER:
        found += [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in _HEADERS.items()
        ]
    return found


def _statuses(action: RouteAction) -> list[int]:
    statuses = {414, 431} | _OWN.get(action, set())
    if action not in UNAUTHENTICATED_ACTIONS:
        statuses |= {401, 403, 429}
    if action in POST_ACTIONS:
        statuses |= {400, 408, 413, 415}
    if action in ADMIN_ACTIONS or action is RouteAction.INFER:
        statuses.add(503)
    return sorted(statuses)


def _success(action: RouteAction) -> Json:
    if action is RouteAction.METRICS:
        return {"description": SUMMARIES[action], "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = _ref(_ANSWERS[action][0]) if action in _ANSWERS else {"type": "object"}
    answer: Json = {"description": SUMMARIES[action], "content": {"application/json": {"schema": schema}}}
    names = {RouteAction.INFER: ["shoal-model-version", "inference-header-content-length"]}
    names[RouteAction.MODEL_READY] = ["shoal-model-version"]
    if action in names:
        answer["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names[action]}
    if action is RouteAction.INFER:
        answer["content"]["application/octet-stream"] = {}
    return answer


def _refusal(status: int) -> Json:
    answer: Json = {"description": REFUSALS[status], "content": {"application/json": {"schema": _ref("Error")}}}
    if status in (429, 503):
        answer["headers"] = {"retry-after": {"$ref": "#/components/headers/retry-after"}}
    return answer


def _schemas() -> Json:
    kinds = [kind for _, kind in _ANSWERS.values() if isinstance(kind, type)]
    kinds += [messages.IndexedModel, messages.IndexRequest, messages.RepositoryRequest, messages.Error]
    _, made = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    written = {name: kind for name, kind in _ANSWERS.values() if isinstance(kind, dict)}
    return {**made, **written, **_INFER_REQUEST, "Change": _CHANGE}


def _header(description: str, schema: Json) -> Json:
    return {"description": description, "schema": schema}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameters_of(**known: Json) -> Json:
    """The schema of a `parameters` object, of which the protocol knows these."""
    values = {"type": ["boolean", "number", "string"]}
    return {"type": ["object", "null"], "properties": known, "additionalProperties": values}


_INFER_REQUEST: Json = {
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": ["string", "null"], "description": "Comes back with the answer"},
            "inputs": {"type": "array", "items": _ref("InputTensor")},
            "outputs": {"type": ["array", "null"], "items": _ref("RequestedOutput"), "description": "All, when empty"},
            "parameters": _parameters_of(
                timeout={"type": "integer", "minimum": 0, "description": "Microseconds; 0 for none"},
                binary_data_output={"type": "boolean", "description": "Outputs go back as bytes"},
                priority={"type": "integer", "description": "Accepted, and ignored"},
            ),
        },
    },
    "InputTensor": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"enum": list(DATATYPES)},
            "parameters": _parameters_of(binary_data_size={"type": "integer", "minimum": 0}),
            "data": {"type": "array", "description": "Flat or nested, row-major; absent when the bytes follow"},
        },
    },
    "RequestedOutput": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "parameters": _parameters_of(binary_data={"type": "boolean"}),
        },
    },
}
_CHANGE: Json = {
    "type": "object",
    "required": ["action", "model"],
    "properties": {
        "action": {"enum": ["deploy", "canary", "shadow", "promote", "rollback", "delete", "metric"]},
        "model": {"type": "string", "minLength": 1},
        "version": {"type": ["integer", "string"]},
        "from_version": {"type": "integer"},
        "percent": {"type": "number", "minimum": 0, "maximum": 100},
        "options": {"type": "object"},
        "metric": {"type": "string"},
        "value": {"type": "number"},
        "reason": {"type": "string"},
        "timeout_s": {"type": "number"},
    },
}
