"""Strikes processes and links with faults, ends those that last, and notes what was struck."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from shoal.libs.chaos.link import FaultyLink
from shoal.libs.chaos.plan import ROLES, Fault

LIMITS = {"fill_disk": psutil.RLIMIT_FSIZE, "fill_memory": psutil.RLIMIT_AS}


@dataclass
class Strike:
    """A fault that has struck.

    count:  of its clock, as it was then
    at:     Unix time
    victim: the process or the link; "": there was none
    saved:  the step of the newest checkpoint; -1: there was none
    """

    fault: Fault
    count: int
    at: float
    victim: str
    saved: int


class Striker:
    """faults: to come; find_processes: those that may be struck; links: by their roles; tell: takes a line"""

    def __init__(
        self,
        find_processes: Callable[[], Sequence[psutil.Process]],
        links: Mapping[str, FaultyLink],
        tell: Callable[[str], None],
    ) -> None:
        self.faults: list[Fault] = []
        self.strikes: list[Strike] = []
        self._find_processes = find_processes
        self._links = links
        self._tell = tell
        self._remedies: dict[object, tuple[float, Callable[[], object]]] = {}  # by victim: when, and what ends it

    @property
    def is_over(self) -> bool:
        """Whether each fault has struck, and has ended."""
        return not self.faults and not self._remedies

    def follow(self, counts: Mapping[str, int], saved: int = -1) -> None:
        """Strike what is due, and end what has lasted."""
        self.remedy()
        for fault in [each for each in self.faults if counts[each.clock] >= each.at]:
            self.faults.remove(fault)
            victim = self._strike_link(fault) if fault.target in self._links else self._strike_process(fault)
            self.strikes.append(Strike(fault, counts[fault.clock], time.time(), victim, saved))
            self._tell(f"{fault}: {f'{victim}, at {counts[fault.clock]:,}' if victim else 'there is none now'}")

    def remedy(self, everything: bool = False) -> None:
        """End the faults that have lasted."""
        for victim, (end_s, undo) in [*self._remedies.items()]:
            if everything or time.monotonic() >= end_s:
                del self._remedies[victim]
                with suppress(psutil.Error):  # it has ended meanwhile
                    undo()

    def _strike_link(self, fault: Fault) -> str:
        link = self._links[fault.target]
        link.inject(fault.kind)
        self._end_later(fault, link, partial(link.inject, ""))
        return f"port {link.port}"

    def _strike_process(self, fault: Fault) -> str:
        pattern = re.compile(ROLES[fault.target])
        victims = sorted((each for each in self._find_processes() if pattern.search(describe(each))), key=_get_age)
        if len(victims) <= (fault.target == "actor"):  # nobody brings the last actor back
            return ""
        victim = victims[int(fault.choice * len(victims))]
        key = victim.pid, fault.kind
        with suppress(psutil.Error):  # it has just ended
            undo = self._remedies[key][1] if key in self._remedies else inject(victim, fault.kind)
            self._end_later(fault, key, undo)
        return f"process {victim.pid}"

    def _end_later(self, fault: Fault, victim: object, undo: Callable[[], object]) -> None:
        """One that comes while another of the same victim lasts prolongs it."""
        if fault.seconds:
            end_s, _ = self._remedies.get(victim, (0.0, None))
            self._remedies[victim] = max(end_s, time.monotonic() + fault.seconds), undo


def inject(process: psutil.Process, kind: str) -> Callable[[], object]:
    """Begin a fault; returns what ends it. A full disk is one on which no file of the process grows."""
    match kind:
        case "kill":
            process.kill()
        case "pause":
            process.suspend()
        case "fill_disk" | "fill_memory":
            before = process.rlimit(LIMITS[kind])
            most = 0 if kind == "fill_disk" else process.memory_info().vms
            process.rlimit(LIMITS[kind], (most, before[1]))
            return partial(process.rlimit, LIMITS[kind], before)
    return process.resume


def describe(process: psutil.Process) -> str:
    """Its command line; "" once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _get_age(process: psutil.Process) -> Any:
    return process.create_time(), process.pid
