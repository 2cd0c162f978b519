"""The members of a population of learners: each a loop in this process, with actors as processes of its own.

A member's learner pauses between two rounds. Then another's weights and optimizer state are copied into it, in memory,
and its algorithm gets other numbers; the learner and its actors go on without a restart. Called by `run`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.extend.flows import LocalRun
from shoal.extend.rl import RLSpec, make_algorithm
from shoal.libs.population.loop.spec import RLPopulationSpec
from shoal.wire import ExperienceSpec

LearnerState = dict[str, Any]  # of an algorithm: `model`, `optimizer`


class LoopMember(LocalRun):
    """One learner with its gateway and its actors. Its arguments are those of a LocalRun."""

    def __init__(
        self,
        number: int,
        spec: RLSpec,
        experience: ExperienceSpec,
        folder: Path,
        num_actors: int,
    ) -> None:
        seed = 1000 * number + spec.learner.seed
        super().__init__(f"member {number}", spec, experience, folder, num_actors, seed, is_paused=True)
        self.number = number
        self._round_end, self._min_episodes = 0, 1
        self.is_stopped = False  # for good
        self.has_failed = False  # in this round: its weights are not finite

    def begin_round(self, num_steps: int, min_episodes: int) -> None:
        """Go on for so many environment steps and until so many episodes have ended. A stopped member does not."""
        if self.is_stopped:
            return
        if self.actors.describe_dead():  # an environment has refused the actions of weights that were not finite
            self.actors.end()
            self.start_actors()
        self.loop.gateway.reset_returns()
        self._round_end, self._min_episodes = self.loop.gateway.stats()["steps"] + num_steps, min_episodes
        self.has_failed = False
        self.loop.learner.resume()

    def poll(self) -> bool:
        """Whether the member's round is over; its learner pauses from then on.

        Raises RunError when its learner or one of its actors has failed.
        """
        if self.is_stopped or self.has_failed:
            return True
        self.loop.require_learner()
        if not is_finite(self.loop.learner.model.state_dict()):
            self.has_failed = True
            self.loop.learner.pause()
            return True
        self.require_actors()
        stats = self.loop.gateway.stats()
        if stats["steps"] < self._round_end or stats["episodes_in_window"] < self._min_episodes:
            return False
        self.loop.learner.pause()
        return True

    def get_score(self) -> float:
        """The mean return of the last episodes of the round, 100 at most; NaN where the member has failed or ended."""
        is_scored = not (self.is_stopped or self.has_failed) and is_finite(self.loop.learner.model.state_dict())
        return float(self.loop.gateway.stats()["mean_return"]) if is_scored else math.nan

    # -- between two rounds -----------------------------------------------------------------------------------------

    def copy_state(self) -> LearnerState:
        """A copy of the weights and the optimizer's state."""
        return copy.deepcopy(self.loop.learner.algorithm.state_dict())

    def make_new_state(self) -> LearnerState:
        """New weights, from torch's generator, and an empty optimizer state."""
        return make_algorithm(self.spec, self.experience).state_dict()

    def replace_state(self, state: LearnerState) -> None:
        """Go on with this state, published at once; the learning rate stays this member's own."""
        self.loop.learner.algorithm.load_state_dict(state)
        self.loop.learner.try_publish()

    def configure(self, spec: RLSpec) -> None:
        """Go on with the algorithm's numbers of `spec`."""
        self.spec = spec
        self.loop.learner.algorithm.configure(spec.algorithm)


class LoopMembers:
    """The members of a run, as its rounds change them. All learners pause meanwhile."""

    def __init__(self, spec: RLPopulationSpec, members: Sequence[LoopMember]) -> None:
        self._spec, self._members = spec, members

    def exploit(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy each winner's state, as it was before, to its loser."""
        pairs = list(pairs)
        states = {winner: self._members[winner].copy_state() for _, winner in pairs}
        for loser, winner in pairs:
            self._members[loser].replace_state(states[winner])

    def retire(self, member: int) -> None:
        """Let it learn no more: the learner stays paused, and its actors wait for it."""
        self._members[member].is_stopped = True

    def set_hyper_parameters(self, member: int, values: Mapping[str, Any]) -> None:
        """Go on with these values of the space."""
        self._members[member].configure(self._spec.make_member_spec(member, values))

    def member_state_dict(self, member: int) -> dict[str, Tensor]:
        """A copy of the weights, for observations as they are."""
        snapshot = self._members[member].loop.learner.snapshot()
        return {name: torch.tensor(each) for name, each in snapshot.tensors().items()}


def is_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether no number of them is NaN or infinite."""
    return all(bool(each.isfinite().all()) for each in tensors.values() if each.is_floating_point())
