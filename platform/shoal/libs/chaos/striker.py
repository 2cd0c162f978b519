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
        self._remedies: list[tuple[float, Callable[[], None]]] = []  # what ends by itself, and when

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
        for each in [each for each in self._remedies if everything or time.monotonic() >= each[0]]:
            self._remedies.remove(each)
            with suppress(psutil.Error):  # it has ended meanwhile
                each[1]()

    def _strike_link(self, fault: Fault) -> str:
        link = self._links[fault.target]
        link.inject(fault.kind)
        self._remedies.append((time.monotonic() + fault.seconds, partial(link.inject, "")))
        return f"port {link.port}"

    def _strike_process(self, fault: Fault) -> str:
        pattern = re.compile(ROLES[fault.target])
        victims = sorted((each for each in self._find_processes() if pattern.search(describe(each))), key=_get_age)
        if len(victims) <= (fault.target == "actor"):  # nobody brings the last actor back
            return ""
        victim = victims[int(fault.choice * len(victims))]
        with suppress(psutil.Error):  # it has just ended
            inject(victim, fault.kind)
            if fault.seconds:
                self._remedies.append((time.monotonic() + fault.seconds, partial(remedy, victim, fault.kind)))
        return f"process {victim.pid}"


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


def describe(process: psutil.Process) -> str:
    """Its command line; "" once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _get_age(process: psutil.Process) -> Any:
    return process.create_time(), process.pid
