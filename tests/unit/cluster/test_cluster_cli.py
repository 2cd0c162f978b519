"""`shoal up`, `down` and `status` around a cluster that is a stand-in: what is shown, and in which order things end."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import psutil
import pytest
from click.testing import CliRunner

from shoal import runs
from shoal.cli.commands import cluster as verbs
from shoal.cli.support.groups import interrupt_on_termination
from shoal.cli.support.jobs import ignore_further_interrupts
from shoal.client.discovery import find_endpoint
from shoal.cluster import attach, embedded_cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.dashboard_api import ClusterResources
from shoal.cluster.jobs import SILENCE_TIMEOUT_S, JobHandle, JobInfo, JobStatus
from shoal.cluster.processes import CLUSTER_ID_VARIABLE
from shoal.errors import ClusterError, ConnectionLost, RunError, ShoalError
from shoal.runs.record.database import connect
from typed import said, typed


def show(*words: str) -> str:
    """What `shoal status` says."""
    return said("status", *words)


def attach_to(handle: ClusterHandle | None, monkeypatch: pytest.MonkeyPatch, *jobs: JobInfo) -> None:
    """The cluster that `shoal status` finds, with these jobs."""
    monkeypatch.setattr(verbs, "find_cluster", lambda address: handle)
    monkeypatch.setattr(verbs, "get_resources", lambda cluster: ClusterResources(1, 2.0, 0.0, 0, 0, 0.0))
    monkeypatch.setattr(verbs, "list_jobs", lambda cluster: [*jobs])


def test_status_shows_names_and_addresses_as_they_are_and_no_secret_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ClusterHandle("[fe80::1]:6379", "http://[fe80::1]:8265", "token", {}, temp_dir=None)
    command = "cd /tmp && exec python -m job 'endpoint.keys=[{name: ada, key: S3CRET}]' endpoint.port=80"
    attach_to(handle, monkeypatch, JobInfo("one", JobStatus.RUNNING, command, "", 0.0))
    with runs.create("play[fast]:key:", "", "one") as run:
        run.record_endpoint("shop[/]", "inference", "http://[fe80::1]:8000", "ready")
        for shown in (show(), show("--json")):
            for word in ("http://[fe80::1]:8265", "play[fast]:key:", "endpoint.keys=***", "endpoint.port=80"):
                assert word in shown
            assert "S3CRET" not in shown
        assert "shop[/]  http://[fe80::1]:8000" in show()


MANY_NEWER = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)
INSERT INTO runs (number, id, job, status, spec, command, git_revision, git_dirty, created_at, finished_at, host, pid,
    heartbeat_at, incarnation, error, kind)
SELECT number + i, id || i, job, 'finished', spec, command, git_revision, git_dirty, created_at + i, created_at + i,
    host, pid, heartbeat_at, incarnation, error, kind FROM runs, n
"""


def test_an_endpoint_is_found_however_many_runs_are_newer(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach_to(None, monkeypatch)
    with runs.create("serve", "", "one") as run:
        run.record_endpoint("shop", "inference", "http://127.0.0.1:8000", "ready")
        with closing(connect(shoal_home)) as connection:
            connection.execute(MANY_NEWER)
        assert find_endpoint("shop").run_id == "one"
        assert "shop  http://127.0.0.1:8000" in show()
    with pytest.raises(RunError, match="no endpoint is up"):
        find_endpoint("shop")


def test_the_queue_shows_position_owner_priority_need_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    attach_to(None, monkeypatch)
    with runs.create("train", "", "late") as late, runs.create("train", "", "first") as first:
        for run, position, owner, priority in ((late, 2, "ann@a", 0), (first, 1, "bob@b", 5)):
            reason = f"4 workers need a GPU each: {position} of 8 GPUs free"
            entry = {"position": position, "owner": owner, "priority": priority, "since_s": time.time()}
            run.record_event("waiting", reason=reason, wait_s=1800.0, needs={"GPU": 4.0}, **entry)
        assert "queue\n  1  first  bob@b  priority 5  4 GPU  for 0 s\n     4 workers need a GPU each: 1 of 8" in show()
        assert "  2  late  ann@a  priority 0  4 GPU  for" in show()
        assert show().count("    waiting in the queue\n") == 2
        queue = json.loads(show("--json"))["queue"]
        assert [(each["run"], each["position"]) for each in queue] == [("first", 1), ("late", 2)]
        assert said("runs").count("waiting") == 2
        assert "waiting: 4 workers need a GPU each: 1 of 8 GPUs free (up to 30 min)" in (said("runs first"))
        first.record_event("waiting", reason="", wait_s=1800.0)
        assert "running" in said("runs first")
    assert "queue\n" not in show()
    with runs.reopen("late"):
        assert "queue\n" not in show(), "what it waited for before is past"


class Unexpected(Exception):
    """A signal that nobody handled."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those of this process come back; none that is left to its default ends it."""

    def unhandled(signum: int, frame: object) -> None:
        raise Unexpected(signal.Signals(signum).name)

    before = {each: signal.signal(each, unhandled) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("verb", [verbs.up, verbs.down])
def test_one_waits_for_the_other_but_not_for_ever(verb: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LOCK_TIMEOUT_S", 0.0)
    with attach.lock_cluster_state():
        error = CliRunner().invoke(verb, []).exception
    assert isinstance(error, ClusterError)
    assert "another `shoal up` or `shoal down` is at work" in str(error)


def test_between_looking_for_a_cluster_and_the_record_of_it_no_other_begins(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def require_locked(step: str, **options: object) -> None:
        monkeypatch.setattr(attach, "LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(ClusterError, match="is at work"), attach.lock_cluster_state():
            pass
        seen.append(step)

    def start(**options: object) -> SimpleNamespace:
        require_locked("start")
        assert options["save_as"] == shoal_home / "cluster.json"
        return ClusterHandle("127.0.0.1:1", "http://127.0.0.1:8265", "", {})

    monkeypatch.setattr(verbs, "find_running_cluster", lambda: require_locked("find"))
    monkeypatch.setattr(verbs, "start_cluster", start)
    said("up")
    assert seen == ["find", "start"]
    with attach.lock_cluster_state():
        pass


@pytest.fixture
def of_host_one(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterHandle:
    """A dead cluster, of which a host named "one" left word in the home."""
    token = {"RAY_AUTH_TOKEN_PATH": str(shoal_home / "token")}
    written = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "", token, shoal_home / "one", "id", os.getpid(), 0.0)
    with monkeypatch.context() as on_one:
        on_one.setattr(socket, "gethostname", lambda: "one")
        shoal_home.mkdir()
        written.save(shoal_home / "cluster.json")
    return written


@pytest.mark.parametrize("verb", [verbs.up, verbs.down])
def test_a_cluster_of_another_host_is_left_alone(
    verb: click.Command, of_host_one: ClusterHandle, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "start_cluster", None)
    monkeypatch.setattr(verbs, "end_cluster", None)
    monkeypatch.setattr(ClusterHandle, "is_head_alive", lambda _: True)  # a process here that has its number
    error = CliRunner().invoke(verb, []).exception
    assert isinstance(error, ClusterError)
    path = shoal_home / "cluster.json"
    assert str(error) == f"a cluster is up on one: end it there, or remove {path} if one is gone"
    assert path.exists()
    assert attach.find_cluster() is None
    tunnel = attach.find_cluster(of_host_one.dashboard_url)
    assert not tunnel.is_local


def test_a_dead_cluster_of_this_host_is_cleared_away(
    of_host_one: ClusterHandle, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(verbs, "end_cluster", lambda *which: ended.append(which))
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    assert "had died" in said("down")
    assert ended == [("id", shoal_home / "one")]
    assert not (shoal_home / "cluster.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_up_has_begun(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def start(**options: object) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except KeyboardInterrupt:
            ended.append("by the start itself")
            raise

    monkeypatch.setattr(verbs, "start_cluster", start)
    assert typed("up").exit_code == 128 + signal.SIGINT
    assert ended == ["by the start itself"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_word_of_the_cluster_is_named_with_what_to_do(shoal_home: Path, text: str) -> None:
    shoal_home.mkdir()
    (shoal_home / "cluster.json").write_text(text)
    with pytest.raises(ClusterError, match=r"cluster.json is no file of `shoal up` .*: delete it"):
        attach.find_cluster()


def test_a_cluster_of_which_no_word_can_be_left_is_ended(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[psutil.Process] = []

    def launch(options: object, environment: Mapping[str, str], detached: bool) -> subprocess.Popen[bytes]:
        assert CLUSTER_ID_VARIABLE in environment
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        head = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE)
        heads.append(psutil.Process(head.pid))
        return head

    report = {"address": "127.0.0.1:1", "dashboard_url": "http://127.0.0.1:2"}
    monkeypatch.setattr(embedded_cluster, "_launch", launch)
    monkeypatch.setattr(embedded_cluster, "_wait_until_ready", lambda *_: report)
    (shoal_home / "cluster.json").mkdir(parents=True)  # a file cannot take its place
    with pytest.raises(ClusterError, match=r"cluster.json cannot be written .*: make room, or set \$SHOAL_HOME"):
        embedded_cluster.start_cluster(detached=True, save_as=shoal_home / "cluster.json")
    assert not heads[0].is_running()
    assert sorted(path.name for path in shoal_home.iterdir()) == ["cluster.json", "ray-token"]


def test_a_program_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_on_termination()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_terminal_that_closes_interrupts_once() -> None:
    interrupt_on_termination()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)  # from the shell, after that of the kernel


def test_what_cleans_up_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_on_termination()
    try:
        ignore_further_interrupts()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), each)
    finally:
        signal.signal(signal.SIGINT, before)


SILENCE = [ConnectionLost("no answer from http://h: ReadTimeout"), ClusterError("http://h answered 500: no reason")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr("shoal.cluster.jobs.time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return clock


@pytest.mark.parametrize("silence", SILENCE)
@pytest.mark.parametrize("is_head_alive", [True, False])
def test_a_dashboard_that_does_not_answer_for_a_while_costs_no_job_of_a_head_that_lives(
    silence: ShoalError, is_head_alive: bool, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SimpleNamespace(is_local=True, is_head_alive=lambda: is_head_alive)
    job = JobHandle(cluster, "one")  # type: ignore[arg-type]

    def poll(after_s: float, answer: JobStatus | ShoalError) -> JobStatus | None:
        clock.now += after_s
        status = Mock(side_effect=[answer])
        monkeypatch.setattr(JobHandle, "status", lambda job: status())
        return job.poll_outcome()

    if not is_head_alive:
        with pytest.raises(type(silence)):
            poll(1.0, silence)
        return
    for _ in range(3):
        assert poll(SILENCE_TIMEOUT_S, silence) is None
        assert poll(SILENCE_TIMEOUT_S - 1.0, silence) is None
        assert poll(2.0, JobStatus.RUNNING) is None
    assert poll(1.0, JobStatus.FAILED) is JobStatus.FAILED
    assert poll(1.0, silence) is None
    with pytest.raises(type(silence)):
        poll(SILENCE_TIMEOUT_S, silence)


@pytest.mark.parametrize("silence", SILENCE)
def test_who_follows_a_job_elsewhere_outlasts_a_silence_but_not_for_ever(
    silence: ShoalError, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = itertools.chain(["RUNNING", silence, silence, "RUNNING"], itertools.repeat(silence))

    def ask(_client: object, _method: str, path: str) -> dict[str, str]:
        if path.endswith("/logs"):
            return {"logs": "one\ntwo\n" if next(pieces) else "one\n"}
        if isinstance(state := next(states), ShoalError):
            raise state
        return {"submission_id": "one", "status": state, "entrypoint": "python job.py"}

    pieces = iter(range(9))
    monkeypatch.setattr("shoal.cluster.jobs.request_json", ask)
    said = JobHandle(ClusterHandle("10.0.0.1:6379", "http://10.0.0.1:8265", "token", {}), "one").follow(1e9)
    assert [next(said), next(said)] == ["one\n", "two\n"]
    began_s = clock.now
    with pytest.raises(type(silence)):
        next(said)
    assert SILENCE_TIMEOUT_S <= clock.now - began_s < SILENCE_TIMEOUT_S + 2.0


def test_a_log_that_is_read_in_the_middle_of_a_character_is_followed_whole(
    clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "ray/session_2026-11-25_20-00-00_000000_1/logs/job-driver-one.log"
    log.parent.mkdir(parents=True)
    log.touch()
    written = iter([b"gr\xc3", b"\xbc\xc3", b"\x9fe \xff\n", b"\xe2\x82"])

    def ask(_client: object, _method: str, _path: str) -> dict[str, str]:
        piece = next(written)
        with log.open("ab") as file:
            file.write(piece)
        state = "SUCCEEDED" if piece == b"\xe2\x82" else "RUNNING"
        return {"submission_id": "one", "status": state, "entrypoint": "python job.py"}

    monkeypatch.setattr("shoal.cluster.jobs.request_json", ask)
    job = JobHandle(ClusterHandle("127.0.0.1:1", "http://127.0.0.1:1", "token", {}, temp_dir=tmp_path), "one")
    assert list(job.follow(1e9)) == ["gr", "ü", "ße �\n", "�"]


def test_a_log_is_read_while_the_link_to_its_session_is_renewed(tmp_path: Path) -> None:
    """Each process that connects to Ray removes `session_latest` and links it again."""
    log = tmp_path / "ray/session_2026-11-25_20-00-00_000000_1/logs/job-driver-one.log"
    log.parent.mkdir(parents=True)
    log.write_text("trained\n")
    job = JobHandle(ClusterHandle("127.0.0.1:1", "http://127.0.0.1:1", "token", {}, temp_dir=tmp_path), "one")
    link = tmp_path / "ray/session_latest"
    for is_linked in (False, True):
        if is_linked:
            link.symlink_to(log.parent.parent)
        assert job.read_logs() == "trained\n"
        assert job.read_logs_from(4, is_complete=True) == ("ned\n", 8)
