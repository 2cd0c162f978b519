"""`python -m shoal.libs.tracking RUN TRACKER`: sends a run to a tracker until it has ended.

Started by the recorder of a run with `track`. It loads the tracker's library at normal priority: at a low one it would
have nothing to send for minutes where the run uses every core, and the work is the same. Then it is nicer.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from shoal.errors import RunError
from shoal.extend.runs import load, load_tracker
from shoal.libs.tracking.follower import Follower, watch

NICENESS = 5


def lower_priority() -> None:
    """Of this process, and of its session, among which Linux may divide a core first (autogroups)."""
    os.nice(NICENESS)
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(NICENESS))


def main() -> None:
    """Follow; the exit status is 1 when the tracker lacks something."""
    run_id, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    follower = Follower(load(run_id), name, load_tracker(name), on_start=lower_priority)

    def give_up() -> None:
        try:
            if not follower.state.is_complete:
                follower.record_problem(follower.state.problem or "its server does not answer")
        finally:
            os._exit(1)  # a call that does not return holds the interpreter

    watch(follower, give_up)
    try:
        is_complete = follower.follow().is_complete
        if follower.has_expired():
            give_up()
    except RunError as error:  # the run was removed
        logging.warning("%s", error)
        sys.exit(1)
    sys.exit(0 if is_complete else 1)  # a library may send what it has queued: `watch` limits that too


if __name__ == "__main__":
    main()
