"""What the tests of programs rest on: none outlives its test, however that ends, and what it said is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from shoal.cluster.processes import CLUSTER_ID_VARIABLE, get_cluster_folder
from shoal_program import MARK, ROOT, Program, end_marked, last_words, logs, processes_with
from waiting import wait_for

# It has a child in a session of its own, which heeds no signal and holds its output, and itself heeds no interruption.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
print("it is up", flush=True)
time.sleep(600 if "stay" in sys.argv else 0)
"""
# As the head of a cluster, as far as its mark goes.
CLUSTER = "import time; print('it is up', flush=True); time.sleep(600)"
# As a session of tests, in a worker that is killed before it runs what `atexit` has.
SESSION = """
import os
from programs import run_ranks
from session_end import at_session_end
print(run_ranks(repr, 1), flush=True)
at_session_end.close()
os._exit(0)
"""


def python(code: str, *words: str) -> Program:
    return Program([sys.executable, "-c", code, *words])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_program.GRACE_S", 0.2)


def fail(program: Program) -> None:
    """As a test that fails once its program is up."""
    with program:
        program.wait_for_line("is up")
        assert processes_with(MARK, program.mark)
        raise ValueError


@pytest.mark.parametrize("words", [["stay"], []], ids=["goes on", "has ended"])
def test_of_a_failed_test_no_process_stays_and_what_was_said_is_shown(words: list[str]) -> None:
    program = python(STUBBORN, *words)
    with pytest.raises(ValueError) as raised:
        fail(program)
    assert processes_with(MARK, program.mark) == []
    (note,) = raised.value.__notes__
    assert "it has said:\nit is up\n" in note


def test_of_a_test_that_forgets_its_program_none_stays() -> None:
    with python(STUBBORN, "stay") as program:
        program.wait_for_line("is up")
    assert processes_with(MARK, program.mark) == []


def test_a_cluster_ends_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_id = uuid.uuid4().hex
    monkeypatch.setenv(CLUSTER_ID_VARIABLE, cluster_id)
    folder = get_cluster_folder(cluster_id)
    folder.mkdir()
    (folder / "cluster-id").write_text(cluster_id)
    with pytest.raises(ValueError):
        fail(python(CLUSTER))
    assert processes_with(CLUSTER_ID_VARIABLE, cluster_id) == []
    assert not folder.exists()


def test_each_wait_ends_with_what_did_not_come() -> None:
    with (
        pytest.raises(AssertionError, match="has ended and has not said 'never'") as raised,
        python("print('no')") as program,
    ):
        program.wait_for_line("never")
    assert "ended with 0; it has said:\nno\n" in raised.value.__notes__[0]
    with pytest.raises(AssertionError, match=r"has not said 'never' within 0\.1 s"), python(CLUSTER) as program:
        program.wait_for_line("never", timeout_s=0.1)
    with pytest.raises(AssertionError, match=r"has not ended within 0\.1 s"), python(CLUSTER) as program:
        program.wait(0.1)
    with pytest.raises(AssertionError, match="has ended with 3 before the state"), python("exit(3)") as program:
        program.wait_until(lambda: False, "the state")
    with python(STUBBORN) as program:
        wait_for(lambda: program.process.poll() is not None)
        with pytest.raises(AssertionError, match="something that it has started goes on"):
            program.wait(0.3)
        end_marked(program.mark)


def test_a_program_that_hears_its_interruption_ends_by_itself() -> None:
    with Program([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        program.interrupt()
        assert program.wait() != 0
        assert processes_with(MARK, program.mark) == []


def test_the_end_of_each_log_goes_with_a_failed_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 100_000 + "at last")
    monkeypatch.setitem(logs, "an endpoint", tmp_path / "log")
    monkeypatch.setitem(logs, "one that is gone", tmp_path / "none")
    ((name, text),) = [each for each in last_words() if "an endpoint" in each[0] or "gone" in each[0]]
    assert name == "the end of an endpoint"
    assert text.endswith("xat last")
    assert len(text) < 100_000


def test_the_server_of_ranks_ends_with_the_session() -> None:
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="x.") as folder:  # pytest's own are too long for unix sockets
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder}
        with Program([sys.executable, "-c", SESSION], environment) as program:
            assert program.wait() == 0
            assert processes_with(MARK, program.mark) == []
        assert not [name for name in os.listdir(folder) if name.startswith("pymp-")]  # torch has a cache there
