"""One run under a list of faults: started, watched by its counts, struck, waited for, examined.

Started by `shoal chaos`. The run is `shoal run JOB ...` as a user types it, on an embedded cluster of its own, whose
processes are known by a mark in their environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shoal.checkpoint.directory import parse_step
from shoal.client.discovery import INFERENCE_KIND
from shoal.errors import RunError
from shoal.extend.cluster import end_programs, find_marked_processes, start_program
from shoal.extend.runs import Run, RunKind, load
from shoal.home import load_access_token
from shoal.libs.chaos.caller import EndpointCaller
from shoal.libs.chaos.plan import ROLES, Fault
from shoal.libs.chaos.promises import (
    Promise,
    check_accounts,
    check_checkpoints,
    check_versions,
)

MARK = "SHOAL_CHAOS"  # in the environment of each process of the run
POLL_S = 0.1
GRACE_S = 20.0  # for processes that end behind the run
STALL_S = 240.0  # without progress, after which the run has stopped
ORDERLY = {0, 3}  # 3: its target was not reached
LIMITS = {"fill_disk": psutil.RLIMIT_FSIZE, "fill_memory": psutil.RLIMIT_AS}
_RUN_LINE = re.compile(rb"^run (\S+?):", re.MULTILINE)
COUNTS: dict[str, Callable[[Run], float]] = {
    "segments": lambda run: run.latest().get("segments/received", 0),
    "versions": lambda run: run.num_versions(),
    "step": lambda run: run.latest().get("train/step", 0),
}


@dataclass
class Strike:
    """A fault that has struck.

    count: of its clock, as it was then
    at:    Unix time
    pid:   of the process, 0 where there was none
    saved: the step of the newest checkpoint; -1: there was none
    """

    fault: Fault
    count: int
    at: float
    pid: int
    saved: int


@dataclass
class CampaignResult:
    """What a campaign has found. began_at: Unix time; missed: faults whose event never came"""

    run_id: str
    status: str
    began_at: float
    seconds: float
    strikes: list[Strike] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return all(each.is_satisfied for each in self.promises)


class Campaign:
    """overrides: the job and its fields, as `shoal run` takes them; draw: the faults of a run of its kind

    folder: of its output; tell: takes a line
    """

    def __init__(
        self,
        overrides: Sequence[str],
        draw: Callable[[RunKind], Sequence[Fault]],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._overrides = overrides
        self._draw = draw
        self._waiting: list[Fault] = []
        self._log = folder / f"{uuid.uuid4().hex[:12]}.log"
        self._tell = tell
        self._mark = uuid.uuid4().hex
        self._remedies: list[tuple[float, psutil.Process, str]] = []  # what ends by itself, and when
        self._strikes: list[Strike] = []
        self._callers: dict[str, EndpointCaller] = {}
        self._saved = -1
        self._num_saved = 0

    def run(self) -> CampaignResult:
        """Raises RunError for a run that never began."""
        environment = {**os.environ, MARK: self._mark}
        began_s = time.monotonic()
        command = [sys.executable, "-m", "shoal", "run", *self._overrides, "--address", "local", "--plain"]
        program = start_program(command, self._log, environment)
        try:
            run = self._find_run(program)
            self._waiting = sorted(self._draw(run.kind), key=lambda each: (each.clock, each.at))
            self._tell(f"run {run.id} is struck by {len(self._waiting)} faults")
            stall = self._follow(program, run)
            run = run.reload()
            promises = [*stall, self._check_end(program, run), *check_accounts(run), *check_versions(run)]
            live = run.versions()["version"].tolist()
            for caller in self._callers.values():
                promises += caller.check(live)
            promises += check_checkpoints(run, [(each.at, each.saved) for each in self._strikes])
            return CampaignResult(
                run.id,
                run.status.value,
                run.created_at,
                time.monotonic() - began_s,
                self._strikes,
                self._waiting,
                promises,
            )
        finally:
            self._close_callers()
            self._remedy(everything=True)
            end_programs([program], GRACE_S)

    def find_leftovers(self) -> Promise:
        """After `run`: what has not ended."""
        end_s = time.monotonic() + GRACE_S
        while (processes := find_marked_processes(MARK, self._mark)) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        described = [f"{each.pid} {_describe(each)[:80]}" for each in processes]
        return Promise("no process is left", not described, "; ".join(described[:5]) or "none")

    def _find_run(self, program: subprocess.Popen[bytes]) -> Run:
        while program.poll() is None:
            if match := _RUN_LINE.search(self._log.read_bytes()):
                return load(match[1].decode())
            time.sleep(POLL_S)
        last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        raise RunError(f"the run never began: {' | '.join(last)}")

    def _follow(self, program: subprocess.Popen[bytes], run: Run) -> list[Promise]:
        """Strike until the run has ended; a promise where it has stopped without an end."""
        moved_s = time.monotonic()
        counts: dict[str, int] = {}
        while program.poll() is None:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            seen = {name: int(read(run)) for name, read in COUNTS.items()}
            newest = max((parse_step(path.name) for path in run.folder.glob("checkpoints/*")), default=-1)
            if newest > self._saved:
                self._saved = newest
                self._num_saved += 1
            seen["checkpoints"] = self._num_saved
            if any(seen[name] > counts.get(name, -1) for name in seen):
                moved_s = now_s
            counts |= seen
            self._remedy()
            self._call_endpoints(run)
            for fault in [each for each in self._waiting if counts[each.clock] >= each.at]:
                self._waiting.remove(fault)
                self._strike(fault, counts[fault.clock])
            if now_s - moved_s > STALL_S:
                self._tell("the run has stopped: it is ended")
                return [Promise("the run goes on", False, f"no step for {STALL_S:g} s, at {counts}")]
        return []

    def _call_endpoints(self, run: Run) -> None:
        """Ask the endpoints that are ready, and no longer ask those that close."""
        for each in run.endpoints():
            if each.kind == INFERENCE_KIND and each.state == "ready" and each.name not in self._callers:
                self._callers[each.name] = EndpointCaller(each.address, each.name, load_access_token())
            if each.state == "closed" and each.name in self._callers:
                self._callers[each.name].close()

    def _close_callers(self) -> None:
        for caller in self._callers.values():
            caller.close()

    def _strike(self, fault: Fault, count: int) -> None:
        pattern = re.compile(ROLES[fault.target])
        found = find_marked_processes(MARK, self._mark)
        victims = sorted((each for each in found if pattern.search(_describe(each))), key=_get_age)
        pid = 0
        if len(victims) > (fault.target == "actor"):  # nobody brings the last actor back
            victim = victims[int(fault.choice * len(victims))]
            pid = victim.pid
            with suppress(psutil.Error):  # it has just ended
                inject(victim, fault.kind)
                if fault.seconds:
                    self._remedies.append((time.monotonic() + fault.seconds, victim, fault.kind))
        self._strikes.append(Strike(fault, count, time.time(), pid, self._saved))
        self._tell(f"{fault}: {f'process {pid}, at {count:,}' if pid else 'there is none now'}")

    def _remedy(self, everything: bool = False) -> None:
        for each in [each for each in self._remedies if everything or time.monotonic() >= each[0]]:
            self._remedies.remove(each)
            with suppress(psutil.Error):
                remedy(*each[1:])

    def _check_end(self, program: subprocess.Popen[bytes], run: Run) -> Promise:
        is_orderly = program.returncode in ORDERLY and run.status.is_complete
        why = (run.error or "").partition("\n")[0]
        evidence = f"status {program.returncode}, the record says: {run.status.value} {why}"
        return Promise("the run ends in order", is_orderly, evidence.rstrip())


def inject(process: psutil.Process, kind: str) -> None:
    """Begin a fault. A full disk is one on which no file of the process grows."""
    match kind:
        case "kill":
            process.kill()
        case "pause":
            process.suspend()
        case "fill_disk" | "fill_memory":
            most = 0 if kind == "fill_disk" else process.memory_info().vms
            process.rlimit(LIMITS[kind], (most, process.rlimit(LIMITS[kind])[1]))


def remedy(process: psutil.Process, kind: str) -> None:
    """End a fault that lasts."""
    if kind == "pause":
        process.resume()
    else:
        _, highest = process.rlimit(LIMITS[kind])
        process.rlimit(LIMITS[kind], (highest, highest))


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _get_age(process: psutil.Process) -> Any:
    return process.create_time(), process.pid
