"""Where a population stands between two rounds, and what its record has of a round.

Called by the trainers of populations: of a Task's members, and of learners. Its only tensors are the best member's.
Legend: K members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.libs.population.evolution import Decisions

FRESH = -1  # in a line of descent: new weights, of no other member


@dataclass
class PopulationState:
    """What a run consists of between two rounds, apart from the members' numbers.

    round:     rounds that are over
    values:    of the space, for each member, in the next round
    ancestors: of each member, [round, source] of each copy in its line of descent, oldest first
    rounds:    the details of each round's event, as the record has them
    best:      the best member of any round: {round, member, score, hyper_parameters, ancestors, weights}; {} at first
    seconds:   of all rounds, over all attempts
    """

    round: int
    values: list[dict[str, Any]]
    ancestors: list[list[list[int]]]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def describe_round(self, scores: Sequence[float], step: int) -> dict[str, Any]:
        """The details of its event, but for the decisions."""
        paths = list(self.values[0])
        return {
            "round": self.round,
            "step": step,
            "scores": [score if math.isfinite(score) else None for score in scores],
            "hyper_parameters": {path: [values[path] for values in self.values] for path in paths},
            "ancestors": [list(map(list, each)) for each in self.ancestors],
        }

    def find_new_best(self, scores: Sequence[float], *, is_higher_better: bool) -> int | None:
        """The best member of the round, if it is better than all before: a restart may leave every later one worse."""
        member = rank_members(scores, is_higher_better)[0]
        score = scores[member]
        if not math.isfinite(score):
            return None
        before = self.best.get("score")
        if before is not None and not (score > before if is_higher_better else score < before):
            return None
        return member

    def set_best(self, member: int, score: float, weights: Mapping[str, Any]) -> None:
        """Remember the best member of any round."""
        self.best = {
            "round": self.round,
            "member": member,
            "score": score,
            "hyper_parameters": dict(self.values[member]),
            "ancestors": [list(each) for each in self.ancestors[member]],
            "weights": dict(weights),
        }

    def apply_descent(self, decisions: Decisions) -> None:
        """The ancestors of members that copy others, or begin with new weights."""
        before = [list(each) for each in self.ancestors]
        for loser, winner in decisions.copies:
            self.ancestors[loser] = [*before[winner], [self.round, winner]]
        for member in decisions.fresh:
            self.ancestors[member] = [*before[member], [self.round, FRESH]]


def rank_members(scores: Sequence[float], is_higher_better: bool) -> list[int]:
    """Members, best first; those whose score is not finite last."""
    sign = -1.0 if is_higher_better else 1.0
    return sorted(range(len(scores)), key=lambda k: sign * scores[k] if math.isfinite(scores[k]) else math.inf)


def describe_decisions(decisions: Decisions) -> dict[str, Any]:
    """For the record."""
    found: dict[str, Any] = {
        "copies": [list(pair) for pair in decisions.copies],
        "fresh": list(decisions.fresh),
        "retired": list(decisions.retired),
        "stopped": list(decisions.stopped),
    }
    if decisions.restart is not None:
        found["restart"] = {"every": decisions.restart.rounds, "best": decisions.restart.best}
    return found
