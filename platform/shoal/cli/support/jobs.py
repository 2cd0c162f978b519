"""The job that a command starts: its file and words, its environment, and its output without Ray's own messages.

Called by the commands that start jobs. Reads a job's log; starts and stops nothing but the check of a job's words.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import click

from shoal.cluster.embedded_cluster import make_python_path_variable
from shoal.cluster.job_main import PROGRAM
from shoal.cluster.jobs import JobHandle, JobStatus
from shoal.errors import ClusterError, ConfigError, ConnectionLost, RunError, suggest
from shoal.home import home, load_access_token
from shoal.recipes import find_recipe, recipe_names
from shoal.runs.record.provenance import make_command_variable, split_secrets
from shoal.store import store_variable

Line = TypeVar("Line")
CHECKED_RUN = "SHOAL_CHECKED_RUN"  # see shoal/train/launch/checked_run.py
_PREFIX, _MAX_VARIABLE_CHARS = "checked run: ", 100_000  # Linux takes 131,072 bytes
# In the file of a job that parses overrides by Shoal.
_TAKES_CHECK = re.compile(r"(?:job|population|stream|sweep|train)_main\b|\bRunFlow\b")

_TAKES_SPEC_FROM_OVERRIDES = re.compile(r"^    (train|sweep)_main\(\)", re.MULTILINE)

# Messages of Ray and Serve about themselves in a job's log.
RAY_LOG_LINE = re.compile(
    r" job_manager\.py:|^Running entrypoint for job|^INFO .* (serve|controller|proxy) \S+ -- |\(raylet\)"
    r"|core_worker\.cc:"
)
_ERROR_PREFIX = "error: "  # begins the line of a ShoalError: see cluster.job_main
_NUM_LAST_LINES = 15


def find_job(job: str) -> Path:
    """The file of a job: a path, or the name of one in ./jobs or of a recipe. Raises ConfigError with the known
    jobs."""
    for candidate in (Path(job), Path("jobs") / f"{job}.py", find_recipe(job)):
        if candidate is not None and candidate.is_file():
            text = candidate.read_text(errors="replace") if candidate.suffix == ".py" else ""
            task = re.search(r"^class (\w+)\(.*\bTask\)", text, re.MULTILINE)
            if task and not re.search(r"__main__|^(shoal\.)?fit\(|_main\(", text, re.MULTILINE):
                remedy = f"train it with: shoal run train task={candidate}:{task[1]} stop.epochs=3"
                raise ConfigError("job", str(candidate), "is the file of a Task, and no program", remedy)
            return candidate.resolve()
    if job.endswith(".py"):
        others = [str(path) for path in Path(job).parent.glob("*.py")]
        remedy = suggest(job, others, f"give the path from {Path.cwd()}")
        raise ConfigError("job", job, "is not a file", remedy)
    if Path(job.partition(":")[0]).is_file():
        remedy = f"train it: shoal run train task={job} stop.epochs=3"
        raise ConfigError("job", job, "is a Task, and no program", remedy)
    known = dict.fromkeys([*sorted(path.stem for path in Path("jobs").glob("*.py")), *recipe_names()])
    remedy = suggest(job, known, f"jobs: {', '.join(known) or 'none here'}")
    raise ConfigError("job", job, "is neither a file nor in ./jobs", remedy)


def split_secret_overrides(path: Path, overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The overrides without secrets, which travel in the environment; unchanged for a job that parses its own."""
    shown, secrets = split_secrets(overrides)
    return (shown, secrets) if secrets and _supports_check(path) else (list(overrides), {})


def validate_overrides(
    path: Path, overrides: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Let the job check its overrides, and what the `variables` say, before a cluster starts. Raises RunError with the
    job's own error.

    Returns variables for the job, with what its check has found: it need not check again.
    """
    is_complete = not _TAKES_SPEC_FROM_OVERRIDES.search(path.read_text(errors="replace"))  # without overrides too
    if (is_complete and not (overrides or variables)) or not _supports_check(path):
        return {}
    command = [sys.executable, str(path), *overrides, "--check"]
    environment = {**os.environ, **variables, CHECKED_RUN: "print"}
    checked = subprocess.run(command, capture_output=True, text=True, env=environment)
    if checked.returncode:
        message = checked.stderr.strip() or "it said nothing"
        _, is_typed, error = f"\n{message}".rpartition("\nerror: ")
        raise RunError(error if is_typed else message)  # an untyped error is the user's own, with its traceback
    results = [line.removeprefix(_PREFIX) for line in checked.stdout.splitlines() if line.startswith(_PREFIX)]
    return {CHECKED_RUN: results[-1]} if results and len(results[-1]) < _MAX_VARIABLE_CHARS else {}


def show_fields(job: str, overrides: Sequence[str]) -> int:
    """Print the fields of a job, as they are with these overrides; returns its exit status. Raises ConfigError."""
    path = find_job(job)
    if not _supports_check(path):
        raise ConfigError("job", job, "is a program that takes words of its own", f"see python {path} --help")
    environment = {**os.environ, PROGRAM: f"shoal run {job}"}
    return subprocess.run([sys.executable, str(path), *overrides, "--help"], env=environment).returncode


def _supports_check(path: Path) -> bool:
    return bool(_TAKES_CHECK.search(path.read_text(errors="replace")))  # whatever its encoding


def job_environment(run_id: str, command: str) -> dict[str, str]:
    """The variables of a job that records as `run_id`, started by `command`."""
    return {
        "SHOAL_RUN_ID": run_id,
        "SHOAL_HOME": str(home()),
        "SHOAL_TOKEN": load_access_token(),
        **store_variable(),
        **make_command_variable(command),
        # The job finds this process's modules, also on a cluster that another user has started.
        **make_python_path_variable(),
    }


class JobLogReader:
    """The lines of a job as it writes them, each once, without a final ShoalError."""

    def __init__(self, job: JobHandle) -> None:
        self._job = job
        self._start = 0
        self._partial_line = ""
        self._has_failed = False

    def read_new_lines(self, *, is_over: bool) -> list[str]:
        """The new lines; an incomplete line is left for the next call unless the job is over."""
        piece, self._start = self._job.read_logs_from(self._start, is_complete=is_over)
        lines = (self._partial_line + piece).splitlines(keepends=True)
        is_whole = is_over or not lines or (lines[-1].splitlines() != [lines[-1]] and not lines[-1].endswith("\r"))
        self._partial_line = "" if is_whole else lines.pop()
        ours = [line.splitlines()[0] for line in lines if not RAY_LOG_LINE.search(line)]
        new = [] if self._has_failed else list(takewhile(lambda line: not line.startswith(_ERROR_PREFIX), ours))
        self._has_failed = self._has_failed or len(new) < len(ours)
        return new


def follow_lines(job: JobHandle, timeout_s: float) -> Iterator[str]:
    """The lines of the job as they come, until it is over. Raises as `JobHandle.follow` does."""
    begun = ""
    for piece in job.follow(timeout_s):
        *lines, begun = (begun + piece).split("\n")
        yield from (line for line in lines if not RAY_LOG_LINE.search(line))
    if begun and not RAY_LOG_LINE.search(begun):
        yield begun


def follow_output(
    read_new: Callable[..., Iterable[Line]], is_over: Callable[[], bool], every_s: float
) -> Iterator[Line]:
    """What a reader reads until what is read is over."""
    while True:
        has_ended = is_over()  # before it is read for the last time
        yield from read_new(is_over=has_ended)
        if has_ended:
            return
        time.sleep(every_s)


def describe_failure(job: JobHandle, what: str, outcome: JobStatus) -> str:
    """Why the job ended as `outcome`, without success: its own error, or the last lines of its log.

    what: names the job if there is no error
    """
    lines = [line for line in job.read_logs().splitlines() if line.strip() and not RAY_LOG_LINE.search(line)]
    begins = [index for index, line in enumerate(lines) if line.startswith(_ERROR_PREFIX)]
    if begins:
        error = "\n".join(lines[begins[-1] :])  # a Task's own has a traceback of many lines
        return error.removeprefix(_ERROR_PREFIX)
    ended = "was stopped by another" if outcome is JobStatus.STOPPED else "failed"
    return "\n".join([f"{what} {ended}; its last words:", *lines[-_NUM_LAST_LINES:]])


def ignore_further_interrupts() -> None:
    """Ignore signals during the cleanup, which takes seconds."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def end_on_interrupt(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` to remove the job of an endpoint that never becomes ready; exit when interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        ignore_further_interrupts()
        end()
        click.echo("stopped: nothing is served", err=True)
        sys.exit(130)
    except (ClusterError, ConnectionLost):
        end()
        raise
