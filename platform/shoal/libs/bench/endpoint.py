"""The load on an endpoint: its requests, of a file or drawn from the model's signature, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from shoal.client import Client, ConnectionLost, InferenceError, StreamedText
from shoal.extend.client import EndpointRequest, build_infer_request, build_text_request, encode_inputs
from shoal.extend.serve import PATHS, build_body, create_tls_context, has_batch_first, make_example
from shoal.libs.bench.sender import OK, LoadSender
from shoal.libs.predict import input_readers as read

MAX_REQUESTS = 1000  # different ones
NUM_DRAWN = 64
PERCENTILES = (50, 90, 99, 99.9)
BUSY = 0.8  # of a core
BUSY_WARNING = (
    "this program needed more than 80% of a core: some of these times are its own; take less load, or several"
)
LATE_SHARE = 0.5  # of the latency's p99


class TextSender(LoadSender):
    """Answers are server-sent events of texts. An endpoint sends an answer's head with its first token."""

    def judge(self, payload: int, kind: str, version: str, body: bytes) -> tuple[str, int]:
        kind, num_tokens = super().judge(payload, kind, version, body)
        if kind == OK:
            try:
                num_tokens = StreamedText(each for each in [body]).read().num_new_tokens
            except (InferenceError, ConnectionLost) as error:  # which its last event names
                kind = str(error)
        return kind, num_tokens


def build_requests(client: Client, model: str, rows: Path | None, rows_per_request: int) -> Iterator[EndpointRequest]:
    """Of a file's rows, or of drawn ones. Raises DataError, InferenceError."""
    signature = client.metadata(model)
    has_rows = all(map(has_batch_first, signature.inputs))
    inputs = signature.inputs if has_rows else read.add_rows(signature.inputs)
    arrays = _draw_rows(inputs, NUM_DRAWN * rows_per_request) if rows is None else _read_rows(rows, inputs)
    for part in read.split_requests(arrays, rows_per_request if has_rows else 1)[:MAX_REQUESTS]:
        given = part if has_rows else {name: each[0] for name, each in part.items()}
        headers, body = encode_inputs(signature, given, None, "", binary=True)
        yield build_infer_request(model, None, headers, body, sticky="", track="")


def _draw_rows(inputs: read.Inputs, num_rows: int) -> read.Arrays:
    """Numbers between 0 and 1; integers are one, and columns of tables gaps."""
    random = np.random.default_rng(0)
    example = make_example(inputs, num_rows)
    return {
        name: each * random.random(each.shape) if each.dtype.kind == "f" else each for name, each in example.items()
    }


def _read_rows(path: Path, inputs: read.Inputs) -> read.Arrays:
    read.require_file(str(path))
    match path.suffix:
        case ".npz" | ".npy":
            return read.from_arrays([str(path)], inputs)
        case ".jsonl":
            return read.from_rows(path.read_text().splitlines(), inputs)
    return read.from_table(path, (), inputs)


def build_text_requests(
    client: Client, model: str, texts: Sequence[Any], fields: Mapping[str, Any]
) -> Iterator[EndpointRequest]:
    """Raises InferenceError: 404 for a model that writes no text."""
    has_chat = client.has_chat(model)
    for text in texts:
        given = "messages" if has_chat or not isinstance(text, str) else "prompt"
        yield build_text_request(PATHS[given], build_body(model, given, text, fields), "", "")


def encode_request(request: EndpointRequest, url: str, token: str = "") -> bytes:
    """The bytes of a request to this URL."""
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "content-length": str(len(request.body)), **request.headers}
    headers |= {"authorization": f"Bearer {token}"} if token else {}
    lines = [f"{request.method} {parts.path}{request.path} HTTP/1.1", *map(": ".join, headers.items()), "\r\n"]
    return "\r\n".join(lines).encode() + request.body


def put_load(url: str, token: str, requests: Sequence[EndpointRequest], **plan: Any) -> dict[str, Any]:
    """Send the requests in turn, and describe what became of them, ready for JSON. plan: of `LoadSender`"""
    tls = create_tls_context(str(urlsplit(url).hostname)) if url.startswith("https:") else None
    kind = TextSender if requests[0].streams else LoadSender
    sender = kind(url, [encode_request(each, url, token) for each in requests], tls=tls, **plan)
    rows = sender.run()
    answered = rows[rows.kind == OK]
    parts = {f"version {each}": answered[answered.version == each] for each in np.unique(answered.version)}
    parts["all answers"] = answered
    late, *latencies = times = [
        measure("late when sent", rows.sent_s - rows.due_s),
        *(measure(name, part.done_s - part.due_s) for name, part in parts.items()),
    ]
    if answered.tokens.any():
        times.append(measure("first tokens", answered.first_s - answered.due_s))
    warnings = [BUSY_WARNING] if sender.cpu_share > BUSY else []
    if sender.is_full:
        warnings.append(f"requests waited for one of {sender.connections} connections, which the endpoint held")
    elif (late["p99_s"] or 0.0) > LATE_SHARE * (latencies[-1]["p99_s"] or np.inf):
        warnings.append("this program sent late, which latencies contain: other programs take its processor")
    kinds, counts = np.unique(rows.kind[rows.kind != OK], return_counts=True)
    return {
        "asked_per_s": sender.rate or None,
        "reached_per_s": float((answered.done_s <= sender.end_s).sum()) / sender.seconds,
        "tokens_per_s": float(answered.tokens.sum()) / sender.seconds,
        "times": times,
        "errors": dict(zip(kinds.tolist(), counts.tolist(), strict=True)),
        "examples": sender.examples,
        "cpu_share": sender.cpu_share,
        "warnings": warnings,
    }


def measure(of: str, seconds: np.ndarray) -> dict[str, Any]:
    """Percentiles; None where no number lies beyond."""
    found: dict[str, Any] = {"of": of, "count": len(seconds)}
    for each in PERCENTILES:
        is_known = len(seconds) * (100 - each) > 99
        found[f"p{each:g}_s"] = float(np.percentile(seconds, each)) if is_known else None
    return {**found, "max_s": float(seconds.max()) if len(seconds) else None}
