"""A process beside a replica, a *guard*: it holds duplicates of the replica's sockets, and sees to them once that has
ended, by bytes of memory that both share.

Nothing waits for a guard: a message that it does not read stays with the replica, until `flush`. Imports the standard
library only, for the guard's sake, which has no other.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

COMMAND = "import sys; sys.path.append({root!r}); from {module} import main; main(*sys.argv[1:])"


class GuardProcess:
    """The replica's side. The guard runs `main` of a module, with the number of a socket whose other side is the
    replica's and ends with it, and that of the shared memory."""

    def __init__(self, module: str, states_bytes: int, *arguments: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.waiting: deque[tuple[bytes, list[int]]] = deque()
        states = os.memfd_create("states")
        os.truncate(states, states_bytes)
        self.states = memoryview(mmap.mmap(states, states_bytes))
        command = COMMAND.format(root=str(Path(__file__).parents[3]), module=module)
        fds = theirs.fileno(), states
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", command, *map(str, fds), *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        os.close(states)

    def send(self, message: bytes, *fds: int) -> None:
        if self.waiting or not self._pass(message, fds):
            self.waiting.append((message, [os.dup(fd) for fd in fds]))

    def _pass(self, message: bytes, fds: Sequence[int]) -> bool:
        """False: the guard has not read the earlier ones."""
        try:
            socket.send_fds(self.control, [message], fds)
        except BlockingIOError:
            return False
        except OSError:  # it was killed
            pass
        return True

    def flush(self) -> bool:
        """Send what waits, as far as the guard reads it. Returns whether nothing is left."""
        while self.waiting and self._pass(*self.waiting[0]):
            for fd in self.waiting.popleft()[1]:
                os.close(fd)
        return not self.waiting
