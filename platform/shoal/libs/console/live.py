"""What is new in the runs that are looked at, as server-sent events: one stream for each page.

A stream asks the record for the newest values three times a second: that costs the number of metrics, not the length
of a run, and the run itself nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shoal.errors import RunError
from shoal.extend.runs import MetricSummary, load, summarize_metrics
from shoal.libs.console.answers import answer_json

POLL_S = 0.3
MAX_STREAMS = 64
MAX_RUNS = 32  # of one stream
_streams: set[object] = set()


async def stream_news(request: Request) -> Response:
    """Events `news`: for each of the `runs` its status and the metrics with a newer value."""
    names = request.query_params.getlist("runs")[:MAX_RUNS]
    if len(_streams) >= MAX_STREAMS:
        return answer_json({"error": f"{MAX_STREAMS} pages are open already: close some"}, 503)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_stream(names), media_type="text/event-stream", headers=headers)


async def _stream(names: list[str]) -> AsyncIterator[bytes]:
    mark, seen = object(), {name: _Seen(name) for name in names}
    _streams.add(mark)
    try:
        yield b": the newest values follow\n\n"
        while True:
            news = await asyncio.to_thread(_find_news, seen)
            yield b"event: news\ndata: " + msgspec.json.encode(news) + b"\n\n" if news else b": \n\n"
            await asyncio.sleep(POLL_S)
    finally:
        _streams.discard(mark)


class _Seen:
    """What a stream has sent of a run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = ""
        self.times: dict[str, float] = {}


def _find_news(seen: dict[str, _Seen]) -> dict[str, Any]:
    news: dict[str, dict[str, Any]] = {}
    for name, each in seen.items():
        try:
            run = load(name)
        except RunError:  # it was removed
            if each.status != "removed":
                news[name], each.status = {"status": "removed", "metrics": []}, "removed"
            continue
        newer = [metric for metric in summarize_metrics(run) if metric.time > each.times.get(metric.name, 0.0)]
        if newer or run.status.value != each.status:
            each.status = run.status.value
            each.times |= {metric.name: metric.time for metric in newer}
            news[name] = {"status": each.status, "metrics": [_describe(metric) for metric in newer]}
    return news


def _describe(metric: MetricSummary) -> dict[str, Any]:
    return {"name": metric.name, "step": metric.step, "time": metric.time, "value": metric.value}


ROUTES = [Route("/api/stream", stream_news)]
