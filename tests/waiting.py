"""Waiting for a state, with a deadline: the only sleep of the tests; and threads, whose state is waited for."""

import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

POLL_S = 0.02
STATE_S = 600.0  # a deadline is for what hangs: however slow the machine, no test depends on it
T = TypeVar("T")


def wait_for(predicate: Callable[[], T], timeout_s: float = STATE_S, what: str = "") -> T:
    """The first true value of `predicate`. Fails, naming `what` and the last value, after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := predicate()):
        assert time.monotonic() < deadline_s, f"no {what or predicate} within {timeout_s:g} s; last value: {value!r}"
        time.sleep(POLL_S)
    return value


def wait_until_none(left: Callable[[], Collection[object]], timeout_s: float, what: str) -> None:
    """Until nothing is left. Fails, naming `what`, and what is, after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while found := left():
        assert time.monotonic() < deadline_s, f"{what} are there after {timeout_s:g} s: {found}"
        time.sleep(POLL_S)


def start_thread(target: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs `target`, and ends with this process at the latest."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
