"""A run that waits for 99 CPUs, in the queue of this host's cluster.

Says "waiting" once it does, and for each line on standard input which runs the queue has.
"""

import sys
import threading

from shoal.cluster.admission import Entries, RunAdmission
from shoal.cluster.job_main import connect

RUN = "run-that-waits"


def _say(words: object) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _wait() -> None:
    with RunAdmission(RUN) as admission:
        admission.wait([{"CPU": 99.0}], "99 CPUs", 600.0, lambda *_, **__: _say("waiting"))


if __name__ == "__main__":
    connect()
    threading.Thread(target=_wait, daemon=True).start()
    for _ in sys.stdin:
        _say(f"queue: {' '.join(each.run_id for each in Entries().read())}")
