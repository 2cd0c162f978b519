"""Turns Ctrl-C and SIGTERM into an event that the run checks between steps, instead of an exception inside one.

Called by launchers, in the main thread of their process. Decides nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun


@contextmanager
def shutdown_event() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C raises KeyboardInterrupt at once.

    Under torchrun a second Ctrl-C is ignored: each rank receives one from the terminal and one from torchrun, which has
    a timeout of its own. Outside the main thread, which alone receives signals, the event is never set.
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
