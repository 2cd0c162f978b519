"""What a command says: a line at once, and on stderr what it waits for, after each ten seconds without a line.

Called by verbs and by trainings. Standard output has the result alone.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import Self

INTERVAL_S = 10.0
print_line = partial(print, flush=True)  # at once, also where no terminal reads it


class WaitReporter:
    """Until its block ends, says after each INTERVAL_S what is waited for, and how long the block has lasted.

    what: "" says nothing
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started_s = time.monotonic()
        self._is_over = False
        self._has_news = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._report, name="waits", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._has_news.set()

    def wait_for(self, what: str) -> None:
        """From now on it waits for this."""
        self._what = what

    def note_line(self) -> None:
        """Another line was printed: another interval begins."""
        self._has_news.set()

    def _report(self) -> None:
        while not self._is_over:
            if self._has_news.wait(INTERVAL_S):
                self._has_news.clear()
            elif self._what:
                sys.stderr.write(f"{self._what}, {time.monotonic() - self._started_s:.0f} s\n")
