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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from shoal.checkpoint.directory import parse_step
from shoal.client.discovery import INFERENCE_KIND, FoundEndpoint
from shoal.errors import ConnectionLost, InferenceError, RunError
from shoal.extend.cluster import end_programs, find_free_port, find_marked_processes, start_program
from shoal.extend.runs import Run, RunKind, load
from shoal.libs.chaos.caller import EndpointCaller, close_callers, open_callers
from shoal.libs.chaos.link import FaultyLink
from shoal.libs.chaos.plan import ACTOR_LINK, STORE, Fault, require_links
from shoal.libs.chaos.promises import (
    Promise,
    check_accounts,
    check_checkpoints,
    check_versions,
)
from shoal.libs.chaos.striker import Strike, Striker, describe

MARK = "SHOAL_CHAOS"  # in the environment of each process of the run
POLL_S = 0.1
GRACE_S = 20.0  # for processes that end behind the run
STALL_S = 240.0  # without progress, after which the run has stopped
MORE_ANSWERS = 200  # of each model of an endpoint, after the last fault
ORDERLY = {0, 3}  # 3: its target was not reached
ADDRESS = "AWS_ENDPOINT_URL"  # of a store, in the environment
_RUN_LINE = re.compile(rb"^run (\S+?):", re.MULTILINE)
COUNTS: dict[str, Callable[[Run], float]] = {
    "segments": lambda run: run.latest().get("segments/received", 0),
    "versions": lambda run: run.num_versions(),
    "step": lambda run: run.latest().get("train/step", 0),
}


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
    """overrides: the job and its fields, as `shoal run` takes them

    draw:   the faults of a run of its kind, whose links have these roles
    folder: of its output; tell: takes a line
    """

    def __init__(
        self,
        overrides: Sequence[str],
        draw: Callable[[RunKind, Sequence[str]], Sequence[Fault]],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._draw = draw
        self._log = folder / f"{uuid.uuid4().hex[:12]}.log"
        self._tell = tell
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, MARK: self._mark}
        self._links: dict[str, FaultyLink] = {}
        self._overrides = [*overrides, *self._open_links(overrides)]
        self._striker = Striker(lambda: find_marked_processes(MARK, self._mark), self._links, tell)
        self._callers: dict[str, list[EndpointCaller]] = {}
        self._saved = -1
        self._num_saved = 0

    def run(self) -> CampaignResult:
        """Raises RunError for a run that never began."""
        began_s = time.monotonic()
        command = [sys.executable, "-m", "shoal", "run", *self._overrides, "--address", "local", "--plain"]
        program = start_program(command, self._log, self._environment)
        try:
            run = self._find_run(program)
            faults = self._draw(run.kind, [*self._links])
            require_links(faults, self._links)
            self._striker.faults += faults
            self._tell(f"run {run.id} is struck by {len(self._striker.faults)} faults")
            stall = self._follow(program, run)
            run = run.reload()
            promises = [*stall, self._check_end(program, run), *check_accounts(run), *check_versions(run)]
            live = run.versions()["version"].tolist()
            callers = [caller for each in self._callers.values() for caller in each]
            self._striker.remedy(everything=True)
            close_callers(callers)
            for caller in callers:
                promises += caller.check(live)
            strikes = self._striker.strikes
            promises += check_checkpoints(run, [(each.at, each.saved) for each in strikes])
            seconds = time.monotonic() - began_s
            return CampaignResult(
                run.id, run.status.value, run.created_at, seconds, strikes, self._striker.faults, promises
            )
        finally:
            self._striker.remedy(everything=True)
            close_callers([caller for each in self._callers.values() for caller in each])
            end_programs([program], GRACE_S)
            for link in self._links.values():
                link.close()

    def find_leftovers(self) -> Promise:
        """After `run`: what has not ended."""
        end_s = time.monotonic() + GRACE_S
        while (processes := find_marked_processes(MARK, self._mark)) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        described = [f"{each.pid} {describe(each)[:80]}" for each in processes]
        return Promise("no process is left", not described, "; ".join(described[:5]) or "none")

    def _open_links(self, overrides: Sequence[str]) -> list[str]:
        """Relays before the gateway of a run with actors, and before a store that speaks HTTP; words of the run."""
        store = urlsplit(os.environ.get(ADDRESS, ""))
        if os.environ.get("SHOAL_STORE") and store.scheme == "http" and store.hostname:
            self._links[STORE] = FaultyLink(store.hostname, store.port or 80)
            self._environment[ADDRESS] = f"http://127.0.0.1:{self._links[STORE].port}"
        given = {each.partition("=")[0] for each in overrides}
        if "--actors" not in given or given & {"gateway.port", "gateway.advertise"}:
            return []
        port = find_free_port()
        self._links[ACTOR_LINK] = link = FaultyLink("127.0.0.1", port)
        return [f"gateway.port={port}", f"gateway.advertise=127.0.0.1:{link.port}"]

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
            seen = self._read_counts(run)
            if any(seen[name] > counts.get(name, -1) for name in seen):
                moved_s = time.monotonic()
            counts |= seen
            self._call_endpoints(run)
            self._striker.follow(counts, self._saved)
            if time.monotonic() - moved_s > STALL_S:
                self._tell("the run has stopped: it is ended")
                return [Promise("the run goes on", False, f"no step for {STALL_S:g} s, at {counts}")]
        return []

    def _read_counts(self, run: Run) -> dict[str, int]:
        newest = max((parse_step(path.name) for path in run.folder.glob("checkpoints/*")), default=-1)
        if newest > self._saved:
            self._saved = newest
            self._num_saved += 1
        return {name: int(read(run)) for name, read in COUNTS.items()} | {"checkpoints": self._num_saved}

    def _call_endpoints(self, run: Run) -> None:
        """Ask the endpoints that are ready, and no longer ask those that close."""
        for each in run.endpoints():
            if each.kind == INFERENCE_KIND and each.state == "ready" and each.name not in self._callers:
                with suppress(ConnectionLost, InferenceError):  # its first version is on its way
                    self._callers[each.name] = open_callers(FoundEndpoint(each.name, each.address), [each.name])
            if each.state == "closed" and each.name in self._callers:
                close_callers(self._callers[each.name])

    def _check_end(self, program: subprocess.Popen[bytes], run: Run) -> Promise:
        is_orderly = program.returncode in ORDERLY and run.status.is_complete
        why = (run.error or "").partition("\n")[0]
        evidence = f"status {program.returncode}, the record says: {run.status.value} {why}"
        return Promise("the run ends in order", is_orderly, evidence.rstrip())


class EndpointCampaign:
    """An endpoint that is up under a list of faults: called all the time, struck, waited for, examined.

    faults: tied to the number of its answers; find_processes: those of its cluster; live: versions, by model
    """

    def __init__(
        self,
        found: FoundEndpoint,
        faults: Sequence[Fault],
        find_processes: Callable[[], Sequence[psutil.Process]],
        live: Callable[[str], Collection[int]],
        tell: Callable[[str], None],
    ) -> None:
        self._found = found
        self._live = live
        self._striker = Striker(find_processes, {}, tell)
        self._striker.faults += faults
        self._callers: list[EndpointCaller] = []

    def run(self) -> CampaignResult:
        """Raises RunError for an endpoint that serves nothing, ConnectionLost, InferenceError."""
        began_at = time.time()
        status = self._found.read_status()
        models = [each.name for each in status.models if each.state == "READY"]
        if not models:
            raise RunError(f"{self._found.name} has no model that is ready")
        self._callers = open_callers(self._found, models)
        try:
            stall = self._follow()
            self._striker.remedy(everything=True)
            promises = [*stall, self._check_replicas(status.num_replicas)]
            close_callers(self._callers)
            for caller in self._callers:
                promises += caller.check(self._live(caller.model))
            strikes = self._striker.strikes
            return CampaignResult(
                self._found.run_id, "up", began_at, time.time() - began_at, strikes, self._striker.faults, promises
            )
        finally:
            self._striker.remedy(everything=True)
            close_callers(self._callers)

    def _follow(self) -> list[Promise]:
        """Until all faults are over, and each model has answered some more requests."""
        moved_s = time.monotonic()
        counts = [0]
        goal: list[int] = []
        while not goal or any(num < least for num, least in zip(counts, goal, strict=True)):
            time.sleep(POLL_S)
            seen = [caller.num_answers for caller in self._callers]
            if seen != counts:
                moved_s = time.monotonic()
            counts = seen
            self._striker.follow({"requests": sum(counts)})
            if self._striker.is_over and not goal:
                goal = [num + MORE_ANSWERS for num in counts]
            if time.monotonic() - moved_s > STALL_S:
                return [Promise("the endpoint goes on", False, f"no answer for {STALL_S:g} s, after {sum(counts):,}")]
        return []

    def _check_replicas(self, wanted: int) -> Promise:
        """The replicas come back."""
        end_s = time.monotonic() + STALL_S
        ready = 0
        while time.monotonic() < end_s:
            with suppress(ConnectionLost, InferenceError):
                ready = sum(each.ready and not each.error for each in self._found.read_status().replicas)
                if ready >= wanted:
                    break
            time.sleep(POLL_S)
        return Promise("all replicas are there again", ready >= wanted, f"{ready} of {wanted}")
