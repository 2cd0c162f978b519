"""One call and its retries: the requests to send, their time limits, and the handling of replies.

A transport sends and waits, each client's in its own way, so that the rules are here once:

    what happened                                             then
    no connection: nothing was sent                           again, soon, while the caller's time lasts
    429, 503 with Retry-After                                 again after that time, if the caller's lasts so long
    the connection broke after the request was sent           ConnectionLost; again if `retry_lost`
    the caller's time is over                                 InferenceError (504)
    any other status but 2xx                                  InferenceError with the endpoint's words

A change of an endpoint is retried only in the first case: an endpoint that answers 503, or nothing, may have made it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.open_inference.messages import Error

FIRST_WAIT_S, LAST_WAIT_S = 0.05, 1.0
JITTER = 0.25  # so that callers refused together do not return together
DEADLINE_HEADER = "shoal-deadline-ms"
_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """A request. `path` begins with a slash. streams: the blocking client reads the body while it comes."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply. The names of the headers are in lower case. chunks: of a request that `streams`, the body to
    come, unless it failed: closing it closes the connection."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: Generator[bytes] | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a caller waits, and which failures are retried meanwhile.

    timeout_s:      for the full call with its retries
    num_retries:    the most retries
    retry_lost:     retry also when the connection broke after the request was sent. Inference changes nothing, so a
                    retry costs only time; but the model may compute twice
    is_change:      a sent request is never retried, whatever the reply
    sends_deadline: whether the request carries its deadline, so that the endpoint refuses one that it cannot meet
    end_s:          when that time ends, by `time.monotonic()`; None when it begins with this call
    """

    timeout_s: float
    num_retries: int = 3
    retry_lost: bool = False
    is_change: bool = False
    sends_deadline: bool = False
    end_s: float | None = None

    def get_remaining_s(self) -> float | None:
        """The seconds until `end_s`, by time.monotonic(); None before it has begun."""
        return None if self.end_s is None else self.end_s - time.monotonic()


class Transport(Protocol):
    """What sends requests. Those of a blocking transport never suspend."""

    async def send(self, request: EndpointRequest, timeout_s: float) -> Reply:
        """Send a request. Raises TimeoutError without an answer within the time, RequestLost when the connection broke
        after the request, or a part of it, was sent, ConnectionLost without a connection, Closed."""
        ...

    async def sleep(self, seconds: float) -> None: ...


async def request_with_retries(
    request: EndpointRequest,
    policy: RetryPolicy,
    transport: Transport,
    clock: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
) -> Reply:
    """Send a request until a reply of status 2xx comes, or nothing more may. Raises InferenceError, ConnectionLost."""
    end_s = clock() + policy.timeout_s if policy.end_s is None else policy.end_s
    failure: Exception = timeout_error(policy)
    for attempt in range(policy.num_retries + 1):
        is_last = attempt == policy.num_retries
        remaining_s = end_s - clock()
        if remaining_s <= 0:
            raise failure  # a wait may overrun: the error before it is more useful than a timeout
        if policy.sends_deadline:
            request = replace(request, headers={**request.headers, DEADLINE_HEADER: f"{remaining_s * 1000:.3f}"})
        wait_s = min(LAST_WAIT_S, FIRST_WAIT_S * 2**attempt)
        try:
            reply = await transport.send(request, remaining_s)
        except TimeoutError:
            raise timeout_error(policy) from None
        except ConnectionLost as lost:
            failure = lost
            if isinstance(lost, RequestLost) and (policy.is_change or not policy.retry_lost):
                raise
        else:
            if 200 <= reply.status < 300:
                return reply
            failure = refused = decode_error(reply)
            if refused.retry_after_s is None or policy.is_change or is_last:
                raise refused
            wait_s = refused.retry_after_s
        wait_s *= 1.0 + JITTER * jitter()
        if is_last or clock() + wait_s >= end_s:
            raise failure
        await transport.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def decode_error(reply: Reply) -> InferenceError:
    """The endpoint's error as an exception. `retry_after_s` is set for a 429 or 503 with Retry-After."""
    field = code = ""
    try:
        content = msgspec.json.decode(reply.body)
        if isinstance(inner := content.get("error") if isinstance(content, dict) else None, dict):  # of texts
            content, code = {"error": inner.get("message"), "field": inner.get("param") or ""}, inner.get("code") or ""
        error = msgspec.convert(content, Error)
        message, field = error.error, error.field
    except msgspec.DecodeError:
        message = reply.body[:_MESSAGE_CHARS].decode(errors="replace").strip() or f"HTTP status {reply.status}"
    retry_after_s: float | None = None
    if reply.status in (429, 503):
        with suppress(KeyError, ValueError):  # absent, or a date, which our endpoints never send
            retry_after_s = max(0.0, float(reply.headers["retry-after"]))
    return InferenceError(reply.status, message, retry_after_s, field, code)


def timeout_error(policy: RetryPolicy) -> InferenceError:
    """The error of a caller whose time is over."""
    return InferenceError(504, f"no answer within {policy.timeout_s:g} s")
