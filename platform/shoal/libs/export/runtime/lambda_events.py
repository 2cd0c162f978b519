"""The handler of an exported folder on AWS Lambda: events of API Gateway and of function URLs, and plain invocations.

| event                                      | its result                                                     |
|--------------------------------------------|----------------------------------------------------------------|
| of an HTTP API or a function URL (payload 2.0) | the same answer as of an endpoint for that path            |
| any other JSON: the body of an inference   | the JSON of its answer; an error fails the invocation          |

Made once by the folder's `lambda_function.py`, as the environment starts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from shoal.errors import InferenceError
from shoal.libs.export.runtime.model import FolderModel
from shoal.serve.http.response import RestResponse

Handler = Callable[[Any, Any], dict[str, Any]]


def make_handler(folder: Path) -> Handler:
    """Load the folder's model, and make its handler."""
    model = FolderModel(folder)

    def handle(event: Any, context: Any) -> dict[str, Any]:
        if isinstance(event, dict) and "requestContext" in event:
            return _answer_http(model, event)
        return _answer_plain(model, event)

    return handle


def _answer_http(model: FolderModel, event: dict[str, Any]) -> dict[str, Any]:
    if event.get("version") != "2.0":
        remedy = "choose payload format 2.0 (an HTTP API or a function URL)"
        raise InferenceError(400, f"version = {event.get('version')!r}: this payload format is not taken. {remedy}")
    context, body = event["requestContext"], event.get("body") or ""
    content = base64.b64decode(body) if event.get("isBase64Encoded") else body.encode()
    path, stage = unquote(event.get("rawPath") or "/"), f"/{context.get('stage') or '$default'}"
    path = path.removeprefix(stage) if path.startswith(f"{stage}/") else path
    headers = [(name.lower().encode(), str(text).encode()) for name, text in (event.get("headers") or {}).items()]
    response = model.answer(context["http"]["method"], path, headers, content)
    return {
        "statusCode": response.status,
        "headers": {"content-type": response.content_type.decode()}
        | {name.decode(): text.decode() for name, text in response.headers},
        **_encode_body(response),
    }


def _encode_body(response: RestResponse) -> dict[str, Any]:
    if not response.parts:
        return {"body": response.body.decode(), "isBase64Encoded": False}
    content = b"".join([response.body, *response.parts])
    return {"body": base64.b64encode(content).decode(), "isBase64Encoded": True}


def _answer_plain(model: FolderModel, event: Any) -> dict[str, Any]:
    """Answer the body of an inference. Raises InferenceError, which Lambda reports as the invocation's error."""
    response = model.answer("POST", f"/v2/models/{model.description.name}/infer", [], msgspec.json.encode(event))
    answer: dict[str, Any] = msgspec.json.decode(response.body)
    if response.status != 200:
        raise InferenceError(response.status, answer["error"])
    if response.parts:
        raise InferenceError(400, "a plain invocation answers in JSON: leave out binary_data and binary_data_output")
    return answer
