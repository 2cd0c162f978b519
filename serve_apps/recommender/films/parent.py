"""A process that ends with the one that started it, however that ended: its standard input is a pipe from there."""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_parent() -> None:
    """Send this process SIGTERM when its standard input is closed."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
