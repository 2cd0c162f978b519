"""Sides of a comparison that take turns on one device, in one process, and the clock that waits for the device.

Called by every section. Owns the section's setting: device, sizes, and the time within which it ends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

MIN_ROUNDS = 3
Turn = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """How a section measures.

    rounds: turns of each side, fewer where the time is over
    ends_s: of time.monotonic(), after which no further round begins
    """

    device: torch.device
    rounds: int
    ends_s: float

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are the smallest that run all of the code: on a CPU nothing is measured."""
        return self.device.type == "cpu"

    def choose(self, full: int, tiny: int) -> int:
        """A size."""
        return tiny if self.is_tiny else full

    def until(self, share: float) -> Setting:
        """A part of the section: it has this share of the time that remains."""
        now_s = time.monotonic()
        return Setting(self.device, self.rounds, now_s + share * max(0.0, self.ends_s - now_s))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(work: Turn, device: torch.device, times: int = 1) -> float:
    """Milliseconds of one of so many calls, until the device has done them all."""
    synchronize(device)
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began_s) / times


def take_turns(
    sides: Mapping[str, Turn], setting: Setting, times: int | Mapping[str, int] = 1
) -> dict[str, list[float]]:
    """Milliseconds of a call of each side, in rounds, the order changing; after one round that warms up.

    times: calls of a turn, or of each side's
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(setting.rounds + 1):
        if number > MIN_ROUNDS and time.monotonic() > setting.ends_s:
            break
        for name in list(sides)[:: -1 if number % 2 else 1]:
            taken_ms = time_ms(sides[name], setting.device, times if isinstance(times, int) else times[name])
            if number:
                found[name].append(taken_ms)
    return found


def describe_ratios(ours: Sequence[float], peer: Sequence[float]) -> str:
    """The ratios of neighbouring turns, whose median a slow drift of the clock does not change."""
    ratios = [mine / other for mine, other in zip(ours, peer, strict=False)]
    return f"median of the ratios {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
