"""What ends with the session. A worker of xdist that is slow to end is killed, and then runs nothing of `atexit`."""

from contextlib import ExitStack

at_session_end = ExitStack()
