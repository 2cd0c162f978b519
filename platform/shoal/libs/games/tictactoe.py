"""Tic-tac-toe against an opponent that plays at random: a board game with action masks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


class TicTacToe(gymnasium.Env):  # type: ignore[misc]
    """A win gives 1, a draw 0, a loss -1. Chance decides who begins. A field that is taken ends the game as a loss.

    Observes, as PettingZoo's classic games do, `observation`, uint8 [18], 1 where a field is one's own, then 1 where it
    is the opponent's; and `action_mask`, int8 [9], the free fields.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            {
                "observation": gymnasium.spaces.Box(0, 1, (18,), np.uint8),
                "action_mask": gymnasium.spaces.Box(0, 1, (9,), np.int8),
            }
        )
        self.action_space = gymnasium.spaces.Discrete(9)
        self._fields = np.zeros((2, 9), np.uint8)  # one's own, the opponent's

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._fields[:] = 0
        if self.np_random.random() < 0.5:
            self._answer()
        return self._observe(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        if self._fields[:, action].any():
            return self._observe(), -1.0, True, False, {}
        self._fields[0, action] = 1
        reward = float(self._has_won(0))
        if not reward and not self._is_full():
            self._answer()
            reward = -float(self._has_won(1))
        return self._observe(), reward, bool(reward) or self._is_full(), False, {}

    def _answer(self) -> None:
        self._fields[1, self.np_random.choice(np.flatnonzero(~self._fields.any(0)))] = 1

    def _has_won(self, player: int) -> bool:
        return bool(self._fields[player][LINES].all(1).any())

    def _is_full(self) -> bool:
        return bool(self._fields.any(0).all())

    def _observe(self) -> dict[str, np.ndarray]:
        is_free = np.logical_not(self._fields.any(0))
        return {"observation": self._fields.ravel().copy(), "action_mask": np.asarray(is_free, np.int8)}
