"""The states of a run, and the one function that defines which state may follow which.

Called by the recorder before it writes, and by the reader to tell running from lost runs. Never touches a file.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from enum import StrEnum

from shoal.errors import RunError

HEARTBEAT_TIMEOUT_S = 15.0
MIRROR_TIMEOUT_S = 30.0  # of a run in the store, whose heartbeat comes less often and over a network


class Status(StrEnum):
    """The state of a run. `LOST` is only shown, never stored: the record says running, but its writer is gone."""

    CREATED = "created"
    RUNNING = "running"
    FINISHED = "finished"
    NOT_REACHED = "not reached"  # ended by its limits, without its target
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def is_complete(self) -> bool:
        """Whether the run has done all that it was asked for, with its target or without."""
        return self in (Status.FINISHED, Status.NOT_REACHED)

    @classmethod
    def _missing_(cls, value: object) -> Status:
        raise RunError(
            f"the run record has the status {value!r}, which this release of Shoal does not have: upgrade it"
        )


TERMINAL = frozenset({Status.FINISHED, Status.NOT_REACHED, Status.FAILED, Status.STOPPED})

_NEXT: dict[Status, frozenset[Status]] = {
    Status.CREATED: frozenset({Status.RUNNING}),
    Status.RUNNING: TERMINAL,
    Status.LOST: frozenset({Status.RUNNING}),
    **{terminal: frozenset({Status.RUNNING}) for terminal in TERMINAL},
}


def transition(current: Status, to: Status) -> Status:
    """`to`, when a run may go there from `current`; any finished or lost run may be resumed. Raises RunError."""
    if to not in _NEXT[current]:
        allowed = ", ".join(sorted(_NEXT[current]))
        raise RunError(f"a run that is {current.value!r} cannot become {to.value!r}, only {allowed}")
    return to


def resolve_status(row: sqlite3.Row) -> Status:
    """The status of a row of `runs` as a reader must show it: a running run without a living writer is lost.

    The heartbeat decides; on the writer's own host a missing process counts as gone at once. That of a copy is by this
    host's clock (see `store_copies`), and its process is on no host that can be asked.
    """
    stored = Status(row["status"])
    if stored is not Status.RUNNING:
        return stored
    is_copy = "copied_from" in row.keys() and row["copied_from"] is not None  # noqa: SIM118 - a row contains its values
    timeout_s = MIRROR_TIMEOUT_S if is_copy else HEARTBEAT_TIMEOUT_S
    is_gone = not is_copy and row["host"] == socket.gethostname() and not is_alive(row["pid"])
    return Status.LOST if is_gone or time.time() - row["heartbeat_at"] > timeout_s else Status.RUNNING


def is_alive(pid: int) -> bool:
    """Whether this host has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
