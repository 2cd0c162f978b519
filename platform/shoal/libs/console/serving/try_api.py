"""Try a model: a request that fits it, the answer to one, and the code of a client that sends the same.

The endpoint gets exactly the request that the page shows, at the path that the code names.
"""

from __future__ import annotations

import json
import shlex
import time
from io import BytesIO
from pprint import pformat
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.client.discovery import FoundEndpoint, token_for
from shoal.errors import ConfigError, RegistryError
from shoal.extend.cli import begin_curl, can_be_picture, make_request
from shoal.extend.registry import Registry
from shoal.extend.serve import (
    AsyncTransport,
    EndpointRequest,
    ModelOptions,
    Reply,
    RetryPolicy,
    has_batch_first,
    read_picture,
    request_with_retries,
)
from shoal.libs.console.answers import answer_json, read_bytes
from shoal.open_inference.messages import ModelMetadata

ANSWER_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 32 << 20  # of a request or a picture
ACTIONS = ("rows", "infer")
_MODEL = "/api/endpoints/{endpoint}/models/{model}"
MAX_INLINE_CHARS = 2000
REQUEST_FILE = "request.json"  # of a longer request, which the page saves
_PYTHON = """\
{imports}from shoal.client import Client
from shoal.client.discovery import token_for

url = {url!r}
request = {request}
with Client(url, token=token_for(url)) as client:
    {call}
"""
_INFER = """\
inputs = {{each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in request["inputs"]}}
    answer = client.infer({model!r}, inputs{option})
    print(answer.version, answer.outputs)"""
_JAVASCRIPT = """\
// SHOAL_TOKEN="{token}" node request.mjs
{imports}const response = await fetch({url}, {{
  method: "POST",
  headers: {{ "authorization": `Bearer ${{process.env.SHOAL_TOKEN}}`, "content-type": "application/json" }},
  body: {body},
}});
console.log("version", response.headers.get("shoal-model-version"), await response.json());
"""


async def describe_request(request: Request) -> Response:
    """The model's inputs and outputs, and a request that it answers, with its code."""
    found, model = await _find(request), request.path_params["model"]
    metadata = msgspec.json.decode((await _exchange(found, "GET", _path(model))).body, type=ModelMetadata)
    config = msgspec.json.decode((await _exchange(found, "GET", f"{_path(model)}/config")).body)
    batch_dim = json.loads(config["parameters"].get("batch_dim", {}).get("string_value", "{}"))
    options = ModelOptions.parse(
        {"batch_dim": batch_dim} if batch_dim else {"max_batch_size": config["max_batch_size"]}
    )
    example = await run_in_threadpool(_read_example, metadata)
    action, content = make_request(metadata.inputs, options, example)
    pictures = [spec.name for spec in metadata.inputs if can_be_picture(spec)]
    described = {**msgspec.to_builtins(metadata), "url": found.url, "action": action, "pictures": pictures}
    return answer_json({**described, "request": content, "code": write_code(found.url, model, action, content)})


async def describe_code(request: Request) -> Response:
    """The code of clients that send this body, of the query's `version` or of the one that answers."""
    found, action, version = await _find(request), *_read_target(request)
    try:
        content = msgspec.json.decode(await read_bytes(request, MAX_BODY_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("request", "***", f"is no JSON: {error}") from None
    return answer_json(write_code(found.url, request.path_params["model"], action, content, version))


async def send_request(request: Request) -> Response:
    """The endpoint's answer to this body, the version that gave it, and the seconds that it took."""
    found, action, version = await _find(request), *_read_target(request)
    body, begun_s = await read_bytes(request, MAX_BODY_BYTES), time.monotonic()
    reply = await _exchange(found, "POST", _path(request.path_params["model"], action, version), body)
    took_s = time.monotonic() - begun_s
    answered = {"version": reply.headers.get("shoal-model-version"), "took_s": took_s}
    return answer_json({**answered, "answer": msgspec.Raw(reply.body)})


async def read_image(request: Request) -> Response:
    """A picture, the body, as the values of one row of the query's `input`. `white`: the number of a white pixel."""
    found, asked = await _find(request), request.query_params
    reply = await _exchange(found, "GET", _path(request.path_params["model"]))
    inputs = {spec.name: spec for spec in msgspec.json.decode(reply.body, type=ModelMetadata).inputs}
    if (spec := inputs.get(asked.get("input", ""))) is None:
        raise ConfigError("input", asked.get("input", ""), "is no input of the model", f"it has {', '.join(inputs)}")
    if not has_batch_first(spec):
        spec = msgspec.structs.replace(spec, shape=[-1, *spec.shape])
    try:
        white = float(asked["white"]) if asked.get("white") else None
    except ValueError:
        raise ConfigError("white", asked["white"], "is no number of a pixel", "for example 1 or 255") from None
    name, body = asked.get("name", "the picture"), BytesIO(await read_bytes(request, MAX_BODY_BYTES))
    values = await run_in_threadpool(read_picture, body, name, spec, white)
    if values.dtype.kind == "f" and values.itemsize < 8:
        values = values.astype("U").astype(float)  # 0.2039, not 0.20392157137393951
    return answer_json(values.tolist())


async def _find(request: Request) -> FoundEndpoint:
    found, _ = await run_in_threadpool(request.app.state.endpoints.find, request.path_params["endpoint"])
    endpoint: FoundEndpoint = found
    return endpoint


def _read_target(request: Request) -> tuple[str, int | None]:
    action, version = (request.query_params.get(name, "") for name in ("action", "version"))
    if action not in ACTIONS:
        raise ConfigError("action", action, "is no call of a model", f"one of {', '.join(ACTIONS)}")
    if not (version or "0").isdecimal():
        raise ConfigError("version", version, "is no number of a version")
    return action, int(version) if version else None


def _path(model: str, action: str = "", version: int | None = None) -> str:
    of_version = "" if version is None else f"/versions/{version}"
    return f"/v2/models/{quote(model, safe='')}{of_version}{action and f'/{action}'}"


async def _exchange(found: FoundEndpoint, method: str, path: str, body: bytes = b"") -> Reply:
    """Call the endpoint as its administrator. Raises InferenceError with what it refuses, ConnectionLost."""
    transport = AsyncTransport(found.url, token_for(found.url), 1)
    headers = {"content-type": "application/json"} if body else {}
    try:
        policy = RetryPolicy(ANSWER_TIMEOUT_S, num_retries=0)
        return await request_with_retries(EndpointRequest(method, path, headers, body), policy, transport)
    finally:
        await transport.close()


def _read_example(metadata: ModelMetadata) -> dict[str, Any]:
    """The row that was registered with the version; {} for a model that follows a run, or of another registry."""
    try:
        return Registry().get(f"{metadata.name}@{metadata.versions[-1]}").manifest.example if metadata.versions else {}
    except (RegistryError, ConfigError):
        return {}


ROUTES = [
    Route(f"{_MODEL}/request", describe_request),
    Route(f"{_MODEL}/code", describe_code, methods=["POST"]),
    Route(f"{_MODEL}/try", send_request, methods=["POST"]),
    Route(f"{_MODEL}/picture", read_image, methods=["POST"]),
]


def write_code(url: str, model: str, action: str, content: Any, version: int | None = None) -> dict[str, str]:
    """`python`, `javascript` and `curl`; `file`: the name of the file that they read, "" where the request is in them.

    action:  `rows`: content is a row or a list of rows; `infer`: a request of the protocol
    version: None: the one that answers
    """
    text = json.dumps(content, ensure_ascii=False)
    is_long = len(text) > MAX_INLINE_CHARS
    target = f"{url}{_path(model, action, version)}"
    curl, token = begin_curl(target), begin_curl("").partition("Bearer ")[2].partition('" ')[0]
    imports = 'import { readFile } from "node:fs/promises";\n' if is_long else ""
    body = f'await readFile("{REQUEST_FILE}")' if is_long else f"JSON.stringify({text})"
    standard = "import json\nfrom pathlib import Path\n\n" if is_long else ""
    third_party = "import numpy as np\n\n" if action == "infer" else ""
    option = "" if version is None else f", version={version}"
    request = (
        f'json.loads(Path("{REQUEST_FILE}").read_text())'
        if is_long
        else pformat(content, width=100, compact=True, sort_dicts=False)
    )
    rows = f"print(client.predict({model!r}, request{option}))"
    call = _INFER.format(model=model, option=option) if action == "infer" else rows
    return {
        "python": _PYTHON.format(imports=standard + third_party, url=url, request=request, call=call),
        "javascript": _JAVASCRIPT.format(token=token, imports=imports, url=json.dumps(target), body=body),
        "curl": f"{curl} -d @{REQUEST_FILE}" if is_long else f"{curl} -d {shlex.quote(text)}",
        "file": REQUEST_FILE if is_long else "",
    }
