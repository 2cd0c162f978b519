"""The first requests to a model that was deployed: `shoal predict` and `curl`, with values that fit it.

Called by `shoal serve deploy`, and by libraries that try a model. Functions of a signature, which send nothing.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.home import home
from shoal.open_inference.messages import TensorDescription
from shoal.registry import ModelVersion
from shoal.serve.spec.batch_layout import has_batch_first
from shoal.serve.spec.model_options import ModelOptions

MAX_SUGGESTED_VALUES = 12  # of one input in a suggested command
OPEN_SIZE = 3  # used there for a dimension of variable size
MIN_PIXELS = 8  # the smallest side of an image
MAX_BODY_CHARS = 300  # a longer one is written by a command
_ZEROS: dict[str, Any] = {"BOOL": False, "BYTES": "a text"}


def suggest_predict_command(version: ModelVersion) -> str:
    """`shoal predict` with a row of zeros, a text, or the name of an image; `--help` where that would be too long."""
    inputs = version.manifest.signature.inputs
    if version.manifest.example or any(spec.kind for spec in inputs):
        row = _make_row(inputs, version.manifest.example)
        return shlex.join(["shoal", "predict", version.name, json.dumps(row, ensure_ascii=False)])
    words = ["--image", "FILE"] if len(inputs) == 1 and can_be_picture(inputs[0]) else _make_row_options(inputs)
    return shlex.join(["shoal", "predict", version.name, *(words or ["--help"])])


def suggest_curl_command(version: ModelVersion, options: ModelOptions, url: str) -> str:
    """A request that this model answers, with the token of this machine: a row, or tensors where it takes no rows."""
    action, request = make_request(version.manifest.signature.inputs, options, version.manifest.example)
    curl, body = begin_curl(f"{url}/v2/models/{version.name}/{action}"), json.dumps(request, ensure_ascii=False)
    if len(body) <= MAX_BODY_CHARS:
        return f"{curl} -d {shlex.quote(body)}"
    make = f"python3 -c {shlex.quote(f'import json; print(json.dumps({_write_code(request)}))')}"
    return f"{make} | {curl} -d @-"


def suggest_text_commands(name: str, endpoint: str, url: str, has_chat: bool) -> tuple[str, str]:
    """Those for a model that writes text: `shoal chat` or `shoal predict`, and `curl`."""
    words = ["chat", name]
    messages = [{"role": "user", "content": "What is a shoal?"}]
    path, body = "chat/completions", {"model": name, "messages": messages, "max_tokens": 60}
    if not has_chat:
        words = ["predict", name, "--text", "Once upon a time"]
        path, body = "completions", {"model": name, "prompt": "Once upon a time"}
    words = ["shoal", *words, "--endpoint", endpoint]
    return shlex.join(words), f"{begin_curl(f'{url}/v1/{path}')} -d {shlex.quote(json.dumps(body))}"


def begin_curl(url: str) -> str:
    """`curl` with the token of this machine, which is not in the text, up to the body."""
    token = "$SHOAL_TOKEN" if os.environ.get("SHOAL_TOKEN") else f"$(cat {shlex.quote(str(home() / 'token'))})"
    return " ".join(
        ["curl -s", f'-H "Authorization: Bearer {token}"', *(["--cacert FILE"] * url.startswith("https:")), url]
    )


def make_request(
    inputs: Sequence[TensorDescription], options: ModelOptions, example: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The last word of the path, `rows` or `infer`, and a body: a row, or tensors where the model takes no rows."""
    if options.max_batch_size and not options.batch_dim:
        return "rows", _make_row(inputs, example)
    return "infer", {"inputs": [_make_tensor(spec, options) for spec in inputs]}


def _make_row(inputs: Sequence[TensorDescription], example: Mapping[str, Any]) -> dict[str, Any]:
    """The example of the version, or a row of zeros, texts and gaps."""
    row: dict[str, Any] = dict(example)
    for spec in inputs:
        if spec.columns and len(spec.shape) == 2:
            row |= {name: _ZEROS.get(spec.datatype, 0) for name in spec.columns if name not in row}
        elif spec.name not in row:
            row[spec.name] = None if spec.kind else _fill(_get_row_shape(spec), _ZEROS.get(spec.datatype, 0))
    return row


def _make_tensor(spec: TensorDescription, options: ModelOptions) -> dict[str, Any]:
    batch = options.get_batch_dim(spec.name)
    shape = [(1 if index == batch else OPEN_SIZE) if size == -1 else size for index, size in enumerate(spec.shape)]
    data = [_ZEROS.get(spec.datatype, 0)] * math.prod(shape)
    return {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": data}


def _fill(sizes: Sequence[int], value: Any) -> Any:
    """Nested lists of these sizes."""
    for size in reversed(sizes):
        value = [value] * (OPEN_SIZE if size == -1 else size)
    return value


def _write_code(value: Any) -> str:
    """A value in Python, in which a list of equal elements is written as one of them: [[0] * 28] * 28."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {_write_code(each)}' for name, each in value.items())}}}"
    if not isinstance(value, list):
        return json.dumps(value) if isinstance(value, str) else repr(value)  # no quote that a shell would need
    if len(value) > OPEN_SIZE and all(each == value[0] for each in value):
        return f"[{_write_code(value[0])}] * {len(value)}"
    return f"[{', '.join(map(_write_code, value))}]"


def _make_row_options(inputs: Sequence[TensorDescription]) -> list[str]:
    """Options that give one row of every input; [] when an input is too large."""
    words: list[str] = []
    for spec in inputs:
        sizes = [OPEN_SIZE if size == -1 else size for size in _get_row_shape(spec)]
        is_text = spec.datatype == "BYTES"
        if len(sizes) > (0 if is_text else 1) or math.prod(sizes) > MAX_SUGGESTED_VALUES:
            return []
        name = "" if len(inputs) == 1 else f"{spec.name}="
        words += ["--input", name + ("a text" if is_text else ",".join(["0"] * math.prod(sizes)))]
    return words


def _get_row_shape(spec: TensorDescription) -> list[int]:
    return spec.shape[1:] if has_batch_first(spec) else spec.shape


def can_be_picture(spec: TensorDescription) -> bool:
    """[1 or 3, H, W] or [H, W, 1 or 3]."""
    sizes = _get_row_shape(spec)
    if len(sizes) != 3 or spec.datatype == "BYTES":
        return False
    sides = sizes[1:] if sizes[0] in (1, 3) else sizes[:2] if sizes[2] in (1, 3) else [0]
    return min(sides) >= MIN_PIXELS
