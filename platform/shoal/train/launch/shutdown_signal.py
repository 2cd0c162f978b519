"""Ctrl-C and SIGTERM as a wish that is looked at between two things, and not as an exception in the middle of one.

Called by whoever drives a training run, in the main thread of its process. Decides nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable that torchrun sets


@contextmanager
def shutdown_event() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C raises KeyboardInterrupt at once.

    Not under torchrun: a rank hears of one Ctrl-C from the terminal and from torchrun, which has a patience of its own.
    In another thread than the main one, which hears of no signal, the event is never set.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(signum: int, frame: object) -> None:
        if asked.is_set() and TORCHRUN not in os.environ:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
