"""What is new in the runs that are looked at, as server-sent events: one stream for each page.

A run is asked for its newest values three times a second while it goes on, however many pages look at it: that costs
the number of its metrics and of the new values, not the length of the run, and the run itself nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.errors import RunError
from shoal.extend.runs import Run, Status, load, read_curves, summarize_metrics, thin
from shoal.libs.console.answers import answer_json

POLL_S, IDLE_POLL_S = 0.3, 3.0  # of a run that goes on, and of one that has ended, which may be resumed
MAX_STREAMS, MAX_ANONYMOUS_STREAMS = 64, 48  # some are left for who has logged in
MAX_RUNS = 32  # of one stream
MAX_POINTS = 200  # of a curve in one event
_streams: set[object] = set()
_watched: WeakValueDictionary[str, WatchedRun] = WeakValueDictionary()


class WatchedRun:
    """The newest state of a run, for all streams. Any thread may use it.

    metrics: its newest values, by name
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: tuple[str, int] = ("", 0)  # status and incarnation
        self.metrics: dict[str, tuple[int, float, float]] = {}
        self.run: Run | None = None
        self._lock = threading.Lock()
        self._asked_at = 0.0

    def refresh(self) -> None:
        """Ask the record, unless that was done just now."""
        with self._lock:
            age_s = time.monotonic() - self._asked_at
            if age_s < (POLL_S if self.state[0] in ("", Status.RUNNING) else IDLE_POLL_S) * 0.9:
                return
            self._asked_at = time.monotonic()
            try:
                self.run = load(self.name)
                metrics = {each.name: (each.step, each.time, each.value) for each in summarize_metrics(self.run)}
            except RunError:  # it was removed
                self.run, self.state = None, ("removed", 0)
                return
            self.metrics, self.state = metrics, (self.run.status.value, self.run.incarnation)


class RunFeed:
    """What one stream has sent of a run."""

    def __init__(self, watched: WatchedRun) -> None:
        self.watched = watched
        self._state: tuple[str, int] = ("", 0)
        self._times: dict[str, float] = {}
        self._step: int | None = None  # up to which all values were sent; None: none yet

    def find_news(self) -> dict[str, Any] | None:
        """Status and new values; None where nothing is new. The first time the newest values alone."""
        self.watched.refresh()
        state = self.watched.state
        metrics = self.watched.metrics
        run = self.watched.run
        newer = {name: each for name, each in metrics.items() if each[1] > self._times.get(name, 0.0)}
        if state == self._state and not newer:
            return None
        curves: dict[str, Any] = {
            name: {"steps": [step], "times": [at], "values": [value]} for name, (step, at, value) in newer.items()
        }
        if run is not None and newer and self._step is not None:
            later = read_curves(run, after_step=self._step)
            curves |= {name: thin(curve, MAX_POINTS) for name, curve in later.items()}
        self._state = state
        self._times |= {name: at for name, (_, at, _) in newer.items()}
        self._step = max([-1 if self._step is None else self._step, *(step for step, _, _ in newer.values())])
        return {"status": state[0], "incarnation": state[1], "curves": curves}


async def stream_news(request: Request) -> Response:
    """Events `news`: for each of the `runs` its status, and the points that are new in its curves."""
    names = request.query_params.getlist("runs")[:MAX_RUNS]
    if len(_streams) >= (MAX_STREAMS if request.scope["state"]["may_write"] else MAX_ANONYMOUS_STREAMS):
        answer = answer_json({"error": f"{len(_streams)} pages are followed already: close some"}, 503)
        answer.headers["connection"] = "close"
        return answer
    feeds = {name: RunFeed(_watched.setdefault(name, WatchedRun(name))) for name in dict.fromkeys(names)}
    return NewsStream(feeds)


class NewsStream(StreamingResponse):
    """Counted from when it is made, before anything is awaited, to its end: so there are never more."""

    def __init__(self, feeds: dict[str, RunFeed]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(_follow(feeds), media_type="text/event-stream", headers=headers)
        _streams.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _streams.discard(self)


async def _follow(feeds: dict[str, RunFeed]) -> AsyncIterator[bytes]:
    yield b": the newest values follow\n\n"
    while True:
        news = await asyncio.to_thread(_find_news, feeds)
        yield b"event: news\ndata: " + msgspec.json.encode(news) + b"\n\n" if news else b": \n\n"
        await asyncio.sleep(POLL_S)


def _find_news(feeds: dict[str, RunFeed]) -> dict[str, Any]:
    found = {name: each.find_news() for name, each in feeds.items()}
    return {name: news for name, news in found.items() if news is not None}


ROUTES = [Route("/api/stream", stream_news)]
