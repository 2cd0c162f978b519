"""Jobs on a cluster: submit, follow, stop. Speaks Ray's job REST API; a job's driver runs on the head node.

Called by the CLI, the flows and the API. A job on this machine uses the files in place. For a remote cluster the
working folder and the `shoal` package are uploaded. No job is retried, and a job dies with its cluster: runs,
checkpoints and the registry hold whatever must survive.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import math
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

import httpx2

from shoal.cluster.cluster_handle import ClusterHandle, set_environment
from shoal.cluster.dashboard_api import connect, find_run_id, request_json
from shoal.errors import ClusterError, ConfigError, ConnectionLost, NotReached, RunError
from shoal.home import home
from shoal.recipes import stage_package
from shoal.runs.formatting import format_size

FoundT = TypeVar("FoundT")
FIRST_POLL_S, LAST_POLL_S = 0.1, 0.5
OUTCOME_POLL_S = 0.5  # a poll costs the dashboard and the caller 6 ms each, which a starting run needs
NUM_LAST_LINES = 10
NUM_LARGEST = 3
SILENCE_TIMEOUT_S = 30.0  # for a dashboard that does not answer while the head lives: the job still runs

# What a job never needs (gitignore patterns): of its working folder, and of the package `shoal`, to which Ray applies
# the same ones, so that no folder or file of ours may fit.
CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
# Of a folder that is uploaded, and of the package: its own `runs/` has folders of modules, a user's those of runs.
EXCLUDES = (*(".git", ".venv", ".venv-*", "venv", "/runs/*/", "!/runs/record/"), *(*CACHES, "*.sqlite*"))
NOISY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")  # loggers
HOME_EXCLUDES = (
    "runs/",
    "registry/",
    "endpoints/",
    "found/",
    "*token",
    "audit.jsonl",
)  # where that is below the folder


class JobStatus(StrEnum):
    """Ray's states of a job. PENDING -> RUNNING -> SUCCEEDED | FAILED | STOPPED, and PENDING -> FAILED."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_over(self) -> bool:
        """Whether the job can change no more."""
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


@dataclass(frozen=True)
class JobInfo:
    """Ray's entry of one job. `message` is Ray's description of a failure."""

    submission_id: str  # Ray's number of a program that was not submitted
    status: JobStatus
    entrypoint: str
    message: str
    started_at_s: float  # Unix time; 0 if not known
    metadata: Mapping[str, str] = field(default_factory=dict)  # what it was submitted with
    run: str = ""  # that it was submitted for
    driver: Mapping[str, str] = field(default_factory=dict)  # its newest process: node_ip_address, pid
    exit_status: int | None = None  # of its program, when that has ended by itself

    @property
    def has_missed_target(self) -> bool:
        """Whether it is over without the target that it was given, which Ray calls a failure."""
        return self.exit_status == NotReached.EXIT_STATUS


def new_submission_id() -> str:
    """Choose an id before submitting, so that the caller can stop the job even if the submission fails."""
    return f"shoal-{secrets.token_hex(8)}"


def submit(
    cluster: ClusterHandle,
    entrypoint: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    working_dir: Path | None = None,
    submission_id: str | None = None,
    runtime_env: Mapping[str, Any] = MappingProxyType({}),
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> JobHandle:
    """Start `entrypoint` (words, no shell) as a job.

    On a cluster of this machine it runs in `working_dir` (default: the current folder), in place. On a remote one
    `working_dir` is uploaded without EXCLUDES and HOME_EXCLUDES, and becomes the current folder: give paths
    relative to it. `env` reaches the driver and all its workers, and so does `runtime_env`: further fields of Ray's.
    `list_jobs` has the `metadata`.

    Raises ClusterError if the cluster refuses, ConnectionLost if it does not answer.
    """
    if not entrypoint:
        raise ConfigError("entrypoint", entrypoint, "is empty", "give the words of a command")
    if not cluster.is_local:
        return _submit_remote(cluster, entrypoint, dict(env or {}), working_dir, submission_id, runtime_env, metadata)
    folder = (working_dir or Path.cwd()).resolve()
    request: dict[str, Any] = {
        # `exec`: no shell stays between Ray and the driver.
        "entrypoint": f"cd {shlex.quote(str(folder))} && exec {shlex.join(entrypoint)}",
        "runtime_env": {**runtime_env, **({"env_vars": dict(env)} if env else {})},
        "metadata": dict(metadata),
    }
    if submission_id is not None:
        request["submission_id"] = submission_id
    with connect(cluster) as client:
        answer = request_json(client, "POST", "/api/jobs/", json=request)
    return JobHandle(cluster, answer["submission_id"])


def _submit_remote(
    cluster: ClusterHandle,
    entrypoint: Sequence[str],
    env: dict[str, str],
    working_dir: Path | None,
    submission_id: str | None,
    added: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> JobHandle:
    """Upload and start. Ray puts the working folder FIRST on every worker's import path (ray-project/ray#58772)."""
    runtime_env: dict[str, Any] = {**added, "excludes": list(EXCLUDES)}
    if env:
        runtime_env["env_vars"] = env
    if working_dir is not None:
        require_no_shadowing(working_dir)
        folder = working_dir.resolve()
        runtime_env["working_dir"] = str(folder)
        runtime_env["excludes"] += list_home_excludes(folder)
    from ray.job_submission import JobSubmissionClient

    # Ray's client prefers its variables to its argument, and logs each file that it excludes.
    ours = {"RAY_API_SERVER_ADDRESS": cluster.dashboard_url, "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES": ""}
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with set_environment(ours), TemporaryDirectory(prefix="shoal-package-") as staging:
            runtime_env["py_modules"] = [str(stage_package(Path(staging)))]
            client = JobSubmissionClient(headers={"Authorization": f"Bearer {cluster.token}"})
            chosen = client.submit_job(
                entrypoint=shlex.join(entrypoint),
                runtime_env=runtime_env,
                submission_id=submission_id,
                metadata=dict(metadata),
            )
    except ConnectionError as error:
        raise ConnectionLost(f"no answer from {cluster.dashboard_url}: {error}") from None
    except OSError as error:  # an unreadable file or a lost connection
        raise ClusterError(f"{cluster.dashboard_url} did not get the job: {error}") from None
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"{cluster.dashboard_url} refused the job: {error}") from None
    return JobHandle(cluster, chosen)


def list_home_excludes(folder: Path) -> list[str]:
    """What an upload of `folder` leaves out of $SHOAL_HOME, where that lies in it."""
    if folder not in home().parents:
        return []
    return [f"/{home().relative_to(folder)}/{name}" for name in HOME_EXCLUDES]


def describe_upload(folder: Path) -> str:
    """What an upload of `folder` takes along, and what its ignore files leave out, in one line.

    Raises ConfigError, with the largest files, for more than Ray takes.
    """
    from ray._private.runtime_env import packaging

    sizes: dict[Path, int] = {}
    ours = packaging._get_excludes(folder, [*EXCLUDES, *list_home_excludes(folder)])

    def count(path: Path) -> None:
        sizes[path] = path.stat().st_size if path.is_file() else 0

    has_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    logger = logging.getLogger(__name__)  # Ray names each ignore file
    packaging._dir_travel(folder, [ours], count, include_gitignore=has_gitignore, logger=logger)
    total, most = sum(sizes.values()), packaging.GCS_STORAGE_MAX_SIZE
    if total >= most:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:NUM_LARGEST]
        named = ", ".join(f"{path.relative_to(folder)} {format_size(sizes[path])}" for path in largest)
        problem = f"has {format_size(total)}, and Ray takes less than {format_size(most)}; the largest are {named}"
        remedy = "name what stays here in a file .rayignore; large data belongs in a folder or bucket of the hosts'"
        raise ConfigError("working_dir", str(folder), problem, remedy)
    ignored = sorted(each.name for each in folder.iterdir() if each not in sizes and not ours(each))
    left = f"; not {', '.join(ignored)}, by .gitignore or .rayignore" if ignored else ""
    num_files = sum(path.is_file() for path in sizes)
    return f"uploading {folder}: {num_files:,} files, {format_size(total)}{left}"


def require_no_shadowing(working_dir: Path) -> None:
    """Raise ConfigError for a module at the top of `working_dir` that would hide one of the standard library's.

    A stray `platform/__init__.py` or `stat.py` kills the job before its first line, with an obscure message.
    """
    for path in sorted([*working_dir.glob("*.py"), *working_dir.glob("*/__init__.py")]):
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if name in sys.stdlib_module_names:
            remedy = f"rename or move {path}: the working folder comes first on the import path of every worker"
            raise ConfigError("working_dir", str(working_dir), f"hides Python's own module {name!r}", remedy)


def list_jobs(cluster: ClusterHandle, *, has_drivers: bool = False) -> list[JobInfo]:
    """The submitted jobs of the cluster, newest first. has_drivers: and programs that connected to it by themselves"""
    with connect(cluster) as client:
        answer: list[dict[str, Any]] = request_json(client, "GET", "/api/jobs/")
    jobs = [_parse_job_info(entry) for entry in answer if has_drivers or entry.get("submission_id")]
    return sorted(jobs, key=lambda job: job.started_at_s, reverse=True)


class JobHandle:
    """One submitted job. The job runs on without this object."""

    def __init__(self, cluster: ClusterHandle, submission_id: str) -> None:
        self.submission_id = submission_id
        self._cluster = cluster
        self._path = f"/api/jobs/{submission_id}"
        self._silent_since_s: float | None = None  # monotonic
        self._outcome_at_s = -math.inf  # when it last asked

    def info(self) -> JobInfo:
        """Its present entry in Ray. Raises RunError when Ray has no such job."""
        with connect(self._cluster) as client:
            return _parse_job_info(request_json(client, "GET", self._path))

    def status(self) -> JobStatus:
        """Its state now."""
        return self.info().status

    def poll_outcome(self) -> JobStatus | None:
        """The final state, or None while the job runs. For polling, on a cluster of this machine: the dashboard is
        asked every OUTCOME_POLL_S.

        Raises ClusterError or ConnectionLost when the dashboard has not answered for its timeout, or the head is dead.
        """
        now = time.monotonic()
        if now - self._outcome_at_s < OUTCOME_POLL_S:
            return None
        self._outcome_at_s = now
        status = self._tolerate_silence(self.status)
        return status if status is not None and status.is_over else None

    def read_logs(self) -> str:
        """Its whole output so far, standard output and standard error mixed."""
        if self._cluster.temp_dir is not None:
            return self._read_file(self._cluster.temp_dir, 0).decode(errors="replace")
        with connect(self._cluster) as client:
            text: str = request_json(client, "GET", f"{self._path}/logs")["logs"]
            return text

    def read_logs_from(self, start: int, *, is_complete: bool) -> tuple[str, int]:
        """The output after `start` (0 at first), and the next start. For polling.

        is_complete: the output is complete; otherwise an incomplete last character is left for the next call
        """
        if self._cluster.temp_dir is not None:
            return self._read_log_from(None, start, is_complete)
        with connect(self._cluster) as client:
            return self._read_log_from(client, start, is_complete)

    def try_read_logs(self) -> str | None:
        """Like `read_logs`, for polling: None without an answer. Raises as `poll_outcome` does."""
        return self._tolerate_silence(self.read_logs)

    def wait(self, timeout_s: float) -> JobStatus:
        """Wait for the end; returns the final state, SUCCEEDED or STOPPED.

        Raises RunError with the last log lines if it failed, ClusterError if it still runs after `timeout_s`.
        """
        for _ in self.follow(timeout_s):
            pass
        info = self.info()
        if info.status is JobStatus.FAILED:
            lines = self.read_logs().strip().splitlines()[-NUM_LAST_LINES:]
            reason = "the last lines of its log are\n" + "\n".join(lines) if lines else info.message
            raise RunError(f"job {self.submission_id} failed: {reason}")
        return info.status

    def follow(self, timeout_s: float) -> Iterator[str]:
        """The log as it grows, piece by piece, until the job is over. Raises ClusterError after `timeout_s`, and like
        `poll_outcome` when the dashboard does not answer.

        On this machine the file is read incrementally; from a remote cluster the whole log comes each time.
        """
        deadline_s = time.monotonic() + timeout_s
        status = JobStatus.PENDING
        num_seen = 0
        poll_s = FIRST_POLL_S
        with connect(self._cluster) as client:

            def poll() -> tuple[JobStatus, str, int]:
                now = _parse_job_info(request_json(client, "GET", self._path)).status
                return now, *self._read_log_from(client, num_seen, is_complete=now.is_over)

            while True:
                if (found := self._tolerate_silence(poll)) is not None:
                    status, piece, num_seen = found
                    if piece:
                        yield piece
                    if status.is_over:
                        return
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"job {self.submission_id} is still {status} after {timeout_s:g} s")
                time.sleep(poll_s)
                poll_s = min(LAST_POLL_S, poll_s * 1.1)

    def request_stop(self) -> None:
        """Send SIGTERM; Ray sends SIGKILL after $RAY_JOB_STOP_WAIT_TIME_S."""
        with connect(self._cluster) as client:
            request_json(client, "POST", f"{self._path}/stop")

    def stop(self, timeout_s: float = 30.0) -> JobStatus:
        """Stop it and wait for its end."""
        self.request_stop()
        for _ in self.follow(timeout_s):
            pass
        return self.status()

    def stop_quietly(self, timeout_s: float = 30.0) -> None:
        """Like `stop`, without raising, for cleanup: also after an interrupted submission, or on a cluster that ended
        or fails."""
        with contextlib.suppress(ClusterError, RunError, ConnectionLost):
            self.stop(timeout_s)

    def _tolerate_silence(self, question: Callable[[], FoundT]) -> FoundT | None:
        """The answer; None without one, for SILENCE_TIMEOUT_S in a row at most and while the head may live. Then raises
        the reason (ClusterError, ConnectionLost)."""
        try:
            result = question()
        except (ClusterError, ConnectionLost):
            now = time.monotonic()
            self._silent_since_s = self._silent_since_s or now
            is_dead = self._cluster.is_local and not self._cluster.is_head_alive()
            if is_dead or now - self._silent_since_s >= SILENCE_TIMEOUT_S:
                raise
            return None
        self._silent_since_s = None
        return result

    def _read_log_from(self, client: httpx2.Client | None, start: int, is_complete: bool) -> tuple[str, int]:
        """As `read_logs_from`; `start` counts bytes of a local file, or characters of a remote log."""
        if self._cluster.temp_dir is None:
            assert client is not None
            text: str = request_json(client, "GET", f"{self._path}/logs")["logs"]
            return text[start:], len(text)
        new = self._read_file(self._cluster.temp_dir, start)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text, (left, _) = decoder.decode(new, final=is_complete), decoder.getstate()
        return text, start + len(new) - len(left)

    def _read_file(self, temp_dir: Path, start: int) -> bytes:
        """The local log after byte `start`; empty while there is no file.

        The session's own folder, never its link `session_latest`: each process that connects to Ray removes and
        renews the link.
        """
        for path in temp_dir.glob(f"ray/session_[0-9]*/logs/job-driver-{self.submission_id}.log"):
            with path.open("rb") as file:
                file.seek(start)
                return file.read()
        return b""


def _parse_job_info(entry: Mapping[str, Any]) -> JobInfo:
    return JobInfo(
        submission_id=entry["submission_id"] or entry["job_id"],
        status=JobStatus(entry["status"]),
        entrypoint=entry["entrypoint"],
        message=entry.get("message") or "",
        started_at_s=(entry.get("start_time") or 0) / 1000,
        metadata=entry.get("metadata") or {},
        exit_status=entry.get("driver_exit_code"),
        run=find_run_id(entry),
        driver=entry.get("driver_info") or {},
    )
