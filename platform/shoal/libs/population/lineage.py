"""Whom each member of a population copied, when, and with which hyper-parameters; from the events of its run.

A flow records one event `round` after each round, so that a killed run has a round in full or not at all:

| detail                        | of each round                                                             |
| ----------------------------- | ------------------------------------------------------------------------- |
| `round`                       | its number, from 1                                                        |
| `hyper_parameters`            | {path: [K]}: with which each member was trained in it                     |
| `scores`                      | [K]: after it; None where they are no numbers                             |
| `copies`                      | [[member, source], ...]: members that became copies of their source       |
| `fresh`, `retired`, `stopped` | members that began with new weights; that had no number; that ended       |

The report draws it. Plain data: no arrays, no files. Legend: K members.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

ROUND = "round"


@dataclass(frozen=True)
class Stretch:
    """Rounds begin + 1, ..., end, in which a member was trained from one origin with the same hyper-parameters.

    source: the member whose weights after round `begin` it began with: itself if it went on; None for new weights
    """

    member: int
    begin: int
    end: int
    values: Mapping[str, Any]
    source: int | None


@dataclass(frozen=True)
class Lineage:
    """The rounds of a population, in order, with the details of their events."""

    rounds: Sequence[Mapping[str, Any]]

    @classmethod
    def from_events(cls, events: Iterable[tuple[str, Mapping[str, Any]]]) -> Self:
        """Read (kind, details) of a record, oldest first; other kinds are passed over.

        A round that a resumed run records again replaces what was recorded of it and of later rounds.
        """
        rounds: dict[int, Mapping[str, Any]] = {}
        for kind, details in events:
            if kind == ROUND and "hyper_parameters" in details:
                number = details["round"]
                rounds = {each: value for each, value in rounds.items() if each < number} | {number: details}
        return cls(list(rounds.values()))

    @property
    def num_rounds(self) -> int:
        """The number of the last one."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def num_members(self) -> int:
        """K."""
        return len(self.rounds[-1]["scores"]) if self.rounds else 0

    @property
    def paths(self) -> list[str]:
        """The hyper-parameters."""
        return list(self.rounds[-1]["hyper_parameters"]) if self.rounds else []

    def list_copies(self) -> list[tuple[int, int, int]]:
        """(round, member, source) of every copy, in order."""
        return [(each["round"], member, source) for each in self.rounds for member, source in each.get("copies", ())]

    def list_present(self) -> list[int]:
        """The members that were trained in the last round."""
        stopped = {member for each in self.rounds[:-1] for member in each.get("stopped", ())}
        return [member for member in range(self.num_members) if member not in stopped]

    def list_stretches(self) -> list[Stretch]:
        """All of them, by member and then by time."""
        return [stretch for each in self._stretches for stretch in each]

    def trace_ancestry(self, member: int, round_number: int | None = None) -> list[Stretch]:
        """The stretches whose training a member has in its weights after a round (None: the last one), oldest first.

        They have no gaps, and are the schedule of hyper-parameters that the member is the result of.
        """
        end = self.num_rounds if round_number is None else round_number
        stretches: list[Stretch] = []
        present: int | None = member
        while present is not None and end > 0:
            stretch = next(each for each in self._stretches[present] if each.begin < end <= each.end)
            stretches.append(Stretch(present, stretch.begin, end, stretch.values, stretch.source))
            present, end = stretch.source, stretch.begin
        return stretches[::-1]

    @cached_property
    def _stretches(self) -> list[list[Stretch]]:
        return [self._follow(member) for member in range(self.num_members)]

    def _follow(self, member: int) -> list[Stretch]:
        stretches: list[Stretch] = []
        source: int | None = None  # of the next stretch
        begin, is_new = 0, True
        for details in self.rounds:
            values = {path: column[member] for path, column in details["hyper_parameters"].items()}
            number = details["round"]
            if is_new or values != stretches[-1].values:
                stretches.append(Stretch(member, begin, number, values, source))
            else:
                last = stretches[-1]
                stretches[-1] = Stretch(member, last.begin, number, last.values, last.source)
            if member in details.get("stopped", ()):
                break
            source = dict(details.get("copies", ())).get(member, member)
            begin = number
            is_new = False
            if source != member or member in details.get("fresh", ()):
                is_new = True
                source = None if member in details.get("fresh", ()) else source
        return stretches


def rank_members(scores: Sequence[float | None], is_higher_better: bool) -> list[int]:
    """Members, best first; those without a finite score last."""
    sign = -1.0 if is_higher_better else 1.0
    keys = [math.inf if score is None or not math.isfinite(score) else sign * score for score in scores]
    return sorted(range(len(keys)), key=keys.__getitem__)
