"""Workers that are forked: what they find is what a fresh process would find."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.libs.forking import fork_client
from shoal.libs.forking.fork_client import ADDRESS_VARIABLE, WorkerRequest, parse_worker_request
from shoal.libs.forking.fork_server import can_fork
from waiting import wait_for

# A worker's script, as Ray's is: it says what it finds, then imports torch when Ray would have told it its processors.
SCRIPT = """
import json, os, random, resource, signal, sys
found = {
    "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path, "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(), "environment": dict(os.environ),
    "torch": "torch" in sys.modules, "shoal": "shoal" in sys.modules, "children": str(signal.getsignal(signal.SIGCHLD)),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    "oom": open("/proc/self/oom_score_adj").read(), "streams": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
}
os.environ["OMP_NUM_THREADS"] = "1"
import asyncio, multiprocessing, numpy, sympy, tempfile, torch
import torch.nn.functional
assert torch.nn.functional.relu(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
found |= {"threads": torch.get_num_threads(), "origin": torch.__spec__.origin}
own = {"process": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "random": random.random()}
own |= {"numpy": numpy.random.rand(), "torch": torch.rand(1).item(), "sympy": sympy.core.random.rng.random()}
own |= {"key": multiprocessing.current_process().authkey.hex()}
found |= {"pickled": asyncio.Future.__module__ in sys.modules}
found |= {"temporary": tempfile.gettempdir(), "modules": [one.__spec__.origin for one in (numpy, sympy, tempfile)]}
print(json.dumps([found, own]), flush=True)
"""


@contextmanager
def fork_server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A fork server, and its address."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        address = f"{folder}/fork.sock"
        command = [sys.executable, "-P", "-m", "shoal.libs.forking.fork_server", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                wait_for(lambda: Path(address).exists(), what="fork server")
                yield process, address
            finally:
                process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with fork_server() as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "worker" / "script.py"
    file.parent.mkdir()
    file.write_text(SCRIPT)
    return file


def start(script: Path, address: str, **environment: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the worker finds that is started through the fork server, or by itself without an address."""
    said = script.with_suffix(".out")
    command = [sys.executable, str(script), "--node-id=1", "a b"]
    if address:
        command = [sys.executable, fork_client.__file__, *command[1:], "--language=PYTHON"]
    with said.open("w") as out:
        variables = os.environ | {ADDRESS_VARIABLE: address} | environment
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=script.parent,
            preexec_fn=as_a_raylet_does,
            check=True,
            timeout=180,
        )
    wait_for(lambda: said.read_text().endswith("\n"), what=f"word of the worker: {said}")
    found, own = json.loads(said.read_text())
    del found["environment"][ADDRESS_VARIABLE]
    return found, own


def as_a_raylet_does() -> None:
    os.setpgid(0, 0)
    os.nice(1)
    Path("/proc/self/oom_score_adj").write_text("900")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_forked_worker_finds_what_a_fresh_one_does(server: tuple[subprocess.Popen[bytes], str], script: Path) -> None:
    process, address = server
    own_module = script.parent / "brought_along"
    own_module.mkdir()
    path = os.pathsep.join([str(own_module), *filter(None, [os.environ.get("PYTHONPATH")]), "brought_along", ""])
    words = {"PYTHONPATH": path, "A_JOB": "its own", "TMPDIR": str(own_module)}
    found, own = start(script, address, **words)
    expected, fresh = start(script, "", **words)
    assert own["parent"] == process.pid != fresh["parent"]
    assert own["group"] == own["process"]
    assert found == expected
    assert (found["threads"], found["niceness"], found["blocked"]) == (1, os.getpriority(os.PRIO_PROCESS, 0) + 1, [2])
    assert expected["pickled"]


def test_forked_workers_draw_random_numbers_of_their_own(
    server: tuple[subprocess.Popen[bytes], str], script: Path
) -> None:
    _, one = start(script, server[1])
    _, other = start(script, server[1])
    assert not [name for name in ("random", "numpy", "torch", "sympy", "key") if one[name] == other[name]]


def test_what_lies_beside_a_job_is_found_before_what_was_imported(
    server: tuple[subprocess.Popen[bytes], str], script: Path
) -> None:
    """Ray tells a worker of the driver's folder when it has begun."""
    beside = script.parent / "beside"
    beside.mkdir()
    for name in ("rich", "statistics"):
        (beside / f"{name}.py").touch()
    lines = [
        f"import json, os, sys; sys.path.insert(0, {str(beside)!r})",
        "import rich, statistics, unittest.mock, yaml",
        "own = {'parent': os.getppid()}",
        "print(json.dumps([{'environment': dict(os.environ), 'rich': rich.__file__, 'statistics': statistics.__file__,",
        "    'unittest': unittest.mock.__file__, 'yaml': yaml.__file__}, own]))",
    ]
    script.write_text("\n".join(lines))
    found, own = start(script, server[1])
    assert own["parent"] == server[0].pid
    assert (found["rich"], found["statistics"]) == (str(beside / "rich.py"), str(beside / "statistics.py"))
    assert found == start(script, "")[0]


def test_a_folder_is_looked_into_that_was_not_there_for_an_earlier_worker(
    server: tuple[subprocess.Popen[bytes], str], script: Path
) -> None:
    later = script.parent / "later"
    script.write_text(
        "import json, os, importlib.util as util\n"
        "found = {'environment': dict(os.environ), 'is_there': util.find_spec('of_later') is not None}\n"
        "print(json.dumps([found, {'parent': os.getppid()}]))"
    )
    words = {"PYTHONPATH": os.pathsep.join([str(later), *filter(None, [os.environ.get("PYTHONPATH")])])}
    assert not start(script, server[1], **words)[0]["is_there"]
    later.mkdir()
    (later / "of_later.py").touch()
    found, own = start(script, server[1], **words)
    assert own["parent"] == server[0].pid
    assert found["is_there"]
    (later / "sitecustomize.py").touch()
    assert start(script, server[1], **words)[1]["parent"] != server[0].pid


@pytest.mark.soak
def test_a_library_that_was_replaced_is_imported_as_it_is_now(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an upgrade while the cluster is up: a job's driver has the new one, and so must its workers."""
    library = tmp_path / "libraries" / "jsonschema.py"
    library.parent.mkdir()
    library.write_text("VERSION = 'before'")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(library.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    lines = ["found = {'environment': dict(os.environ), 'version': jsonschema.VERSION}"]
    lines.append("print(json.dumps([found, {'parent': os.getppid()}]))")
    script.write_text("\n".join(["import json, jsonschema, os", *lines]))
    with fork_server() as (process, address):
        found, own = start(script, address)
        assert (found["version"], own["parent"]) == ("before", process.pid)
        library.unlink()
        library.write_text("VERSION = 'after it'")
        assert start(script, address)[0]["version"] == "after it"


def test_who_asks_and_ends_leaves_a_server_that_answers(
    server: tuple[subprocess.Popen[bytes], str], script: Path
) -> None:
    for streams in ([], [0, 1, 2]):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(server[1])
            socket.send_fds(asking, [(1 << 40).to_bytes(8, "big") + b"{"], streams)
    assert start(script, server[1])[1]["parent"] == server[0].pid


def test_a_worker_that_nobody_waits_for_any_more_is_none(
    server: tuple[subprocess.Popen[bytes], str], script: Path
) -> None:
    text = json.dumps(request(command=[str(script)])).encode()
    with socket.socket(socket.AF_UNIX) as asking, script.with_suffix(".out").open("w") as out:
        asking.connect(server[1])
        socket.send_fds(asking, [len(text).to_bytes(8, "big")], [out.fileno()] * 3)
        asking.sendall(text)
    wait_for(lambda: "BrokenPipeError" in script.with_suffix(".out").read_text(), what="word of the worker")
    wait_for(lambda: not psutil.Process(server[0].pid).children(), what="end of the worker")


def test_the_server_ends_with_the_head_and_the_worker_stays(tmp_path: Path) -> None:
    script, said = tmp_path / "worker.py", tmp_path / "out"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    with fork_server() as (server, address), said.open("w") as out:
        words = [fork_client.__file__, str(script), "--language=PYTHON"]
        subprocess.run([sys.executable, *words], stdout=out, env=os.environ | {ADDRESS_VARIABLE: address}, check=True)
        worker = psutil.Process(int(wait_for(said.read_text, what="word of the worker")))
        try:
            assert worker.ppid() == server.pid
            server.stdin.close()
            assert server.wait(180) == 0
            assert worker.status() == psutil.STATUS_SLEEPING
        finally:
            worker.kill()


def request(**changes: Any) -> WorkerRequest:
    worker = parse_worker_request(["/ray/default_worker.py", "--language=PYTHON"], dict(os.environ))
    assert worker is not None
    return WorkerRequest(**(worker | changes))


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD", "MKL_DYNAMIC", "TORCH_LOGS", "PYTORCH_JIT", "TZ", "LC_ALL"],
)
def test_who_would_have_read_something_else_as_it_began_is_not_forked(name: str) -> None:
    assert can_fork(request())
    assert not can_fork(request(environment=os.environ | {name: "1234"}))


@pytest.mark.parametrize(
    ("file", "is_forked"),
    [("json.py", False), ("psutil/__init__.py", False), ("sitecustomize.py", False), ("psutil/data.txt", True)],
)
def test_who_would_import_something_else_is_not_forked(tmp_path: Path, file: str, is_forked: bool) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert can_fork(request(environment=os.environ | {"PYTHONPATH": path})) == is_forked


@pytest.mark.parametrize(
    "context",
    [
        {"py_executable": "/another/python"},
        {"command_prefix": ["nsys", "profile"]},
        {"override_worker_entrypoint": "/in/a/container.py"},
        {"env_vars": {"A": "${HOME}/a"}},
    ],
)
def test_what_ray_does_to_start_some_workers_is_left_to_ray(context: dict[str, object]) -> None:
    words = ["/ray/default_worker.py", "--language=PYTHON", "--node-id=1"]
    plain = parse_worker_request(
        [*words, "--serialized-runtime-env-context=" + json.dumps({"env_vars": {"A": "1"}})], {"B": "2"}
    )
    assert plain["command"] == ["/ray/default_worker.py", "--node-id=1"]
    assert plain["environment"] == {"A": "1", "B": "2"}
    assert parse_worker_request([*words, "--serialized-runtime-env-context=" + json.dumps(context)], {}) is None
    assert parse_worker_request(["/ray/cpp/default_worker", "--language=CPP"], {}) is None
