"""Programs that tests start: what they say is kept, each wait has a deadline, and none outlives its test.

    with shoal_program("run", "actor_learner") as program:
        program.wait_for_line("learning")
        program.interrupt()
        assert program.wait() == 130

A program has a session of its own and a mark in its environment, which all that it starts inherits. When the block is
left and the program goes on, or the test has failed, it is interrupted, as a user would, and what then still has its
mark is killed: also its cluster. What it has said goes with the error.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_cluster, get_cluster_folder
from waiting import wait_for, wait_until_none

if TYPE_CHECKING:
    from shoal.cluster.jobs import JobHandle

ROOT = Path(__file__).parents[1]
MARK = "TESTS_PROGRAM"
# Deadlines for what hangs, of things that take seconds: a loaded machine must not fail a test.
STATE_S, END_S = 600.0, 400.0
GRACE_S = 120.0  # for a program whose test has failed, to end by itself what it has begun
KILLED_S = 60.0
LAST_CHARACTERS = 20_000

logs: dict[str, Path] = {}
"""Of what lives longer than a test: a name, and the file to which it writes. A failed test shows how they end."""


class Program:
    """A program, from the beginning of a block to its end. Waits fail with AssertionError."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: int = subprocess.DEVNULL,
        mark: str = "",
    ) -> None:
        self.words, self.mark = words, mark or uuid.uuid4().hex
        environment = {**(os.environ if env is None else env), MARK: self.mark}
        self._start = lambda: subprocess.Popen(
            words,
            env=environment,
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._is_silent = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Program:
        self.process = self._start()
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_silent:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # it is about to end
        status = self.process.poll()
        try:
            if status is None or error is not None:
                self._end()
        finally:
            if self.process.stdin is not None:
                with suppress(BrokenPipeError):
                    self.process.stdin.close()
            self._reader.join(KILLED_S)
            if error is not None:
                became = "went on" if status is None else f"ended with {status}"
                error.add_note(f"`{shlex.join(self.words)}` {became}; it has said:\n{self.said[-LAST_CHARACTERS:]}")

    @property
    def said(self) -> str:
        """All that it has said, on both of its outputs."""
        with self._news:
            return "".join(self._lines)

    def wait_for_line(self, pattern: str, timeout_s: float = STATE_S) -> re.Match[str]:
        """What matches `pattern` in the first line, of all, in which something does. Fails when it ends without."""
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            looked_at = 0
            while True:
                for line in self._lines[looked_at:]:
                    if found := re.search(pattern, line):
                        return found
                looked_at = len(self._lines)
                assert not self._is_silent, f"it has ended and has not said {pattern!r}"
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"it has not said {pattern!r} within {timeout_s:g} s"
                self._news.wait(left_s)

    def wait_until(self, predicate: Callable[[], object], what: str, timeout_s: float = STATE_S) -> None:
        """Until `predicate` holds. Fails at once when the program has ended and it does not."""
        wait_for(lambda: self.process.poll() is not None or predicate(), timeout_s, what)
        status = self.process.poll()
        assert status is None or predicate(), f"it has ended with {status} before {what}"

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = END_S) -> int:
        """The exit status, once the program, and whatever shares its output, has ended."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {timeout_s:g} s") from None
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), f"it has ended with {status}, but something that it has started goes on"
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._is_silent = True
            self._news.notify_all()

    def _end(self) -> None:
        clusters = _clusters_of(processes_with(MARK, self.mark))
        with suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGINT)
            self.process.wait(GRACE_S)
        end_marked(self.mark, clusters)
        self.process.wait(KILLED_S)


def shoal_program(*words: str, env: Mapping[str, str] | None = None) -> Program:
    """`shoal ...`, of the package that is tested, in the project's folder."""
    return Program([sys.executable, "-c", "from shoal.cli import main; main()", *words], env)


def shoal_command(*words: str, timeout_s: float = STATE_S + END_S) -> tuple[int, str]:
    """The exit status of `shoal ...`, and what it said."""
    with shoal_program(*words) as program:
        return program.wait(timeout_s), program.said


@contextmanager
def ended(job: JobHandle) -> Iterator[None]:
    """When the block fails, the job ends with it, and what it has said goes with the error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the job has said:\n{job.read_logs()[-LAST_CHARACTERS:]}")
        job.stop_quietly(END_S)
        raise


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Those but this one whose environment has the variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is somebody else's
            if process.environ().get(name) == value and process.pid != os.getpid():
                found.append(process)
    return found


def commands_with(name: str, value: str) -> list[str]:
    """Their command lines."""
    found = []
    for process in processes_with(name, value):
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def last_words() -> list[tuple[str, str]]:
    """The names of the logs of what lives now, and how they end."""
    found = {name: file.read_text(errors="replace") for name, file in logs.items() if file.exists()}
    return [(f"the end of {name}", text[-LAST_CHARACTERS:]) for name, text in found.items() if text]


def end_marked(mark: str, clusters: Collection[str] = ()) -> None:
    """Kill what carries the mark, and end its clusters, and these. Fails when something survives."""
    known = set(clusters)

    def left() -> list[object]:
        found = processes_with(MARK, mark)
        known.update(_clusters_of(found))
        for cluster_id in known:
            with suppress(FileNotFoundError):  # its head ends it, too, when its owner is gone
                end_cluster(cluster_id, get_cluster_folder(cluster_id), grace_s=0.5)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        return [*found, *(folder for folder in map(get_cluster_folder, known) if folder.exists())]

    wait_until_none(left, KILLED_S, "killed processes")


def _clusters_of(processes: Collection[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found.add(process.environ().get(CLUSTER_ID_VARIABLE, ""))
    return found - {""}
