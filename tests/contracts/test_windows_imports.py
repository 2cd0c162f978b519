"""An external actor and a client of an endpoint also run on Windows, which has no `fcntl` and no `os.fork`."""

import subprocess
import sys

# What Python on Windows lacks. The standard library's own posix halves stay: they are what runs this test.
MODULES = ["fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "readline"]
NAMES = ["fork", "register_at_fork", "sched_getaffinity", "geteuid", "getuid", "uname", "setsid", "killpg", "fchmod"]
PROGRAM = f"""
import os, sys
import importlib.metadata, numpy, zmq, msgspec, safetensors.numpy, httpx2  # theirs, which have a Windows of their own
for name in {MODULES}:
    sys.modules[name] = None  # so that an import of it raises ImportError
for name in {NAMES}:
    delattr(os, name)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *arguments], capture_output=True, text=True, cwd="/"
    )


def test_what_runs_outside_the_cluster_imports_without_posix_and_the_actor_program_starts() -> None:
    modules = "import shoal, shoal.home, shoal.wire, shoal.client, runpy"
    start = "sys.argv[0] = 'actor'; runpy.run_module('shoal.actor', run_name='__main__')"
    done = run(f"{modules}\n{start}", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--connect" in done.stdout


def test_the_block_is_a_block() -> None:
    done = run("import fcntl")
    assert "import of fcntl halted" in done.stderr
