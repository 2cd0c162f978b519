"""A process that a benchmark starts, with everything that it starts in turn, and how all of it is ended.

Called by the benchmarks. Every child carries a marker in its environment, by which its descendants are found: nothing
else on the machine is ever signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.talk import parse
from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_processes, find_cluster_processes

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
DYNET = ROOT / ".venv-dynet"
TORCHFT = ROOT / ".venv-torchft"
SBX = ROOT / ".venv-sbx"
TORCHRL = ROOT / ".venv-torchrl"
DEEPRIVER = ROOT / ".venv-deepriver"
SOM = ROOT / ".venv-som"
GODOT = ROOT / ".venv-godot"
FILMS = ROOT / ".venv-films"
TRL = ROOT / ".venv-trl"
AGENTS = ROOT / ".venv-agents"
TERMINATE_S = 15.0
OUR_PYTHON = sys.executable
PEERS_PYTHON = str(PEERS / "bin" / "python")
DYNET_PYTHON = str(DYNET / "bin" / "python")
SBX_PYTHON = str(SBX / "bin" / "python")
DEEPRIVER_PYTHON = str(DEEPRIVER / "bin" / "python")
SOM_PYTHON = str(SOM / "bin" / "python")
TRL_PYTHON = str(TRL / "bin" / "python")
AGENTS_PYTHON = str(AGENTS / "bin" / "python")


class ChildFailed(Exception):
    """A child ended, or was silent for too long; the message has the end of its log."""


class Child:
    """`words` run from the repository's root. Use as a context manager: at its end every descendant is gone.

    `folder` takes its log. A child that starts a Ray is told where that keeps its files, in `ray_folder`, which no
    other child may use: some of Ray's processes are found by what they have open there. `goodbye_s` is how long it may
    take to end once its input is closed, 0 for one that does not read it.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        ray_folder: Path | None = None,
        goodbye_s: float = 15.0,
    ) -> None:
        self._marker = uuid.uuid4().hex
        self._ray_folder = ray_folder or folder / self._marker
        self._goodbye_s = goodbye_s
        self._log_path = folder / f"{self._marker[:8]}.log"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, **(env or {}), CLUSTER_ID_VARIABLE: self._marker}
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                list(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT,
                start_new_session=True, text=True,
            )  # fmt: skip
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.output: list[str] = []  # lines that were not addressed to us
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def answer(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next thing that the child says. Raises ChildFailed."""
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildFailed(f"{self._name()} said nothing for {timeout_s:.0f} s: {self.last_words()}") from None
        if said is None:
            self._said.put(None)
            raise ChildFailed(f"{self._name()} ended: {self.last_words()}")
        return said

    def heard(self) -> list[dict[str, Any]]:
        """What the child has said since, without waiting."""
        said: list[dict[str, Any]] = []
        while not self._said.empty() and (one := self._said.get()) is not None:
            said.append(one)
        return said

    def tell(self, **content: Any) -> None:
        """Say something to the child."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()

    def ask(self, wait_s: float = 60.0, **content: Any) -> dict[str, Any]:
        """`tell`, and the answer to it."""
        self.tell(**content)
        return self.answer(wait_s)

    def wait(self, timeout_s: float) -> int:
        """The exit status. Raises ChildFailed when it does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{self._name()} did not end in {timeout_s:.0f} s: {self.last_words()}") from None

    def cpu_s(self) -> float:
        """Processor seconds that the child and its living descendants have used."""
        total = 0.0
        for process in find_cluster_processes(self._marker, self._ray_folder):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def memory_bytes(self, word: str = "") -> int:
        """Resident memory of the child and its living descendants, or of those whose command line has `word`."""
        total = 0
        for process in self.processes(word):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The child and its living descendants, or those whose command line has `word`."""
        found = []
        for process in find_cluster_processes(self._marker, self._ray_folder):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        """Ask the child to end by closing its input, then with SIGTERM; at last end what is left. Idempotent."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self._goodbye_s)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(TERMINATE_S)
        end_processes(self._marker, self._ray_folder)
        self.process.wait()
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = parse(line)
            if said is None:
                self.output.append(line.rstrip("\n"))
            else:
                self._said.put(said)
        self._said.put(None)

    def _name(self) -> str:
        return " ".join(str(word) for word in self.process.args)[:120]  # type: ignore[union-attr]

    def last_words(self, num_lines: int = 15) -> str:
        """The ends of what it printed and logged."""
        log = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join([*self.output[-10:], *log[-num_lines:]]) or "no words were left"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with a short path (unix sockets may lie in it), removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pause_until(monotonic_s: float) -> None:
    """Sleep until that moment of time.monotonic(), which all processes of the machine share."""
    time.sleep(max(0.0, monotonic_s - time.monotonic()))
