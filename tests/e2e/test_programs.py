"""What the tests of programs rest on: none outlives its test, however that ends, and what it said is shown."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid

import pytest

from shoal.cluster.processes import CLUSTER_ID_VARIABLE, get_cluster_folder
from shoal_program import MARK, ROOT, Program, processes_with

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


def test_the_server_of_ranks_ends_with_the_session() -> None:
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="x.") as folder:  # pytest's own are too long for unix sockets
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder}
        with Program([sys.executable, "-c", SESSION], environment) as program:
            assert program.wait() == 0
            assert processes_with(MARK, program.mark) == []
        assert not [name for name in os.listdir(folder) if name.startswith("pymp-")]  # torch has a cache there
