"""Tag: two hunters chase a prey on a grid with walls around it. For learning with a policy for each kind of agent."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium
import numpy as np

from shoal.libs.games.chase import MOVES, PREY, Chase, Observations

SIZE = 6
REST_EVERY = 4  # at each such step the prey cannot move, so that it can be caught
HUNTERS = ("left", "right")


class Tag(Chase):
    """Two hunters and a prey on a grid of 6 x 6. PettingZoo's parallel API by its methods.

    The prey is caught when a hunter is on its field after a step, or has changed places with it: the hunters get 1, the
    prey -1, and the episode ends. Until then each step costs a hunter 0.05 and gives the prey as much; after MAX_STEPS
    the episode is truncated. All stay, or move up, down, left or right, at the same time. A hunter observes float32
    [6]: its own place, and how far down and to the right the prey and the other hunter are, in parts of the grid. The
    prey observes float32 [7]: its own place, the hunters' offsets, and 1 where it rests in this step.
    """

    possible_agents = (*HUNTERS, PREY)

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1, 1, (7 if agent == PREY else 6,), np.float32)

    def _set_positions(self) -> None:
        """On fields of their own."""
        fields = self._random.choice(SIZE * SIZE, len(self.agents), replace=False)
        self._positions = {
            agent: np.array(divmod(int(each), SIZE)) for agent, each in zip(self.agents, fields, strict=True)
        }

    def _move(self, actions: Mapping[str, int]) -> bool:
        """All at once."""
        before = dict(self._positions)
        for agent, action in actions.items():
            if not (agent == PREY and self._rests):
                self._positions[agent] = np.clip(before[agent] + MOVES[int(action)], 0, SIZE - 1)
        prey, former = self._positions[PREY], before[PREY]
        return any(  # on one field, or passed each other
            bool((self._positions[hunter] == prey).all())
            or bool((self._positions[hunter] == former).all() and (prey == before[hunter]).all())
            for hunter in HUNTERS
        )

    @property
    def _rests(self) -> bool:
        return self._steps % REST_EVERY == REST_EVERY - 1

    def _observe(self) -> Observations:
        seen = {"left": (PREY, "right"), "right": (PREY, "left"), PREY: HUNTERS}
        observations = {}
        for agent, others in seen.items():
            own = self._positions[agent]
            offsets = [self._positions[other] - own for other in others]
            rows = np.concatenate([own, *offsets]) / (SIZE - 1)
            observations[agent] = np.append(rows, self._rests if agent == PREY else []).astype(np.float32)
        return observations
