"""The followers of a run: one process for each of its trackers, started and awaited by the run's recorder."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.atomic_file import create_private
from shoal.libs.tracking.follower import make_file_name, read_state

CLOSE_TIMEOUT_S = 10.0
NICENESS = 15  # as Ray's own workers: 3% of a core that the run uses

# Linux may divide a core among sessions first (autogroups), and by niceness within each: the session's is set too.
_START = f'{{ echo {NICENESS} >/proc/self/autogroup; }} 2>/dev/null; exec nice -n {NICENESS} "$@"'

_log = logging.getLogger(__name__)
_unfinished: list[subprocess.Popen[bytes]] = []  # that outlive their run in this process


class Followers:
    """The processes that follow one incarnation of a run. They outlive the recorder's process if it is killed.

    Their output is `tracking-NAME.log` in the run's folder.
    """

    def __init__(self, run_id: str, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        _unfinished[:] = [process for process in _unfinished if process.poll() is None]
        for name in names:
            words = ["sh", "-c", _START, "sh", sys.executable, "-P", "-m", "shoal.libs.tracking", run_id, name]
            try:
                with create_private(folder / make_file_name(name, "log")).open("ab") as log:
                    self._processes[name] = subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
            except OSError as error:
                _log.warning("run %s goes on, but %s does not follow it: %s", run_id, name, error)

    def close(self) -> list[dict[str, object]]:
        """Wait until the trackers have everything, or for CLOSE_TIMEOUT_S: details of an event for each.

        tracker, run: its name, and the run's id there; url; values: sent so far; problem: "" if it has them all
        """
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))
        _unfinished.extend(process for process in self._processes.values() if process.returncode is None)
        return [self._describe(name) for name in self._names]

    def _describe(self, name: str) -> dict[str, object]:
        state = read_state(self._folder, name)
        has_all = name in self._processes and self._processes[name].returncode == 0
        problem = (
            ""
            if has_all
            else state.problem
            or f"not all was sent {CLOSE_TIMEOUT_S:g} s after the end, see {make_file_name(name, 'log')}"
        )
        return {"tracker": name, "run": state.tracker_run, "url": state.url, "values": state.sent, "problem": problem}
