"""The followers of a run: one process for each of its trackers, started and awaited by the run's recorder."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.extend.cluster import Program, start_program, wait_for_programs
from shoal.libs.tracking.follower import make_file_name, read_state

CLOSE_TIMEOUT_S = 10.0
CHECK_S = 5.0
BEHIND_S = 30.0  # after which a tracker should have a value

_log = logging.getLogger(__name__)
_unfinished: list[Program] = []  # that outlive their run in this process


class Followers:
    """The processes that follow one incarnation of a run. They outlive the recorder's process if it is killed.

    Their output is `tracking-NAME.log` in the run's folder.
    """

    def __init__(self, run_id: str, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._processes: dict[str, Program] = {}
        self._unreported = list(names)
        self._checked_s = self._marked_s = time.monotonic()
        self._due = 0.0  # when a value was logged that trackers should have BEHIND_S after `_marked_s`; Unix time
        _unfinished[:] = [process for process in _unfinished if process.poll() is None]
        for name in names:
            words = [sys.executable, "-P", "-m", "shoal.libs.tracking", run_id, name]
            try:
                log = folder / make_file_name(name, "log")
                self._processes[name] = start_program(words, log, has_lifeline=False)
            except OSError as error:
                _log.warning("run %s goes on, but %s does not follow it: %s", run_id, name, error)

    def check(self, newest: float) -> list[dict[str, object]]:
        """Details of an event for each tracker that falls behind or cannot deliver: the first time.

        newest: when the newest value was logged; Unix time in seconds
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return []
        self._checked_s, found = now_s, list[dict[str, object]]()
        is_late = now_s - self._marked_s >= BEHIND_S
        for name in tuple(self._unreported):
            state = read_state(self._folder, name)
            problem = state.problem
            if not problem and is_late and state.time < self._due:
                problem = f"it is behind: a value was logged more than {BEHIND_S:g} s ago, and {state.sent:,} were sent"
            if problem:
                self._unreported.remove(name)
                found.append({"tracker": name, "problem": problem})
        if is_late:
            self._marked_s, self._due = now_s, newest
        return found

    def close(self) -> list[dict[str, object]]:
        """Wait until the trackers have everything, or for CLOSE_TIMEOUT_S: details of an event for each.

        tracker, run: its name, and the run's id there; url; values: sent so far; problem: "" if it has them all
        """
        wait_for_programs(self._processes.values(), CLOSE_TIMEOUT_S)
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
