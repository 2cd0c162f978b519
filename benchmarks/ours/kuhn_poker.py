"""Kuhn poker (Kuhn 1950) as an environment of two agents that take turns, and the exact NashConv of a policy.

Three cards, an ante of one, one bet of one. `make` is for `env=benchmarks.ours.kuhn_poker:make`. Histories are words of
p (pass: check or fold) and b (bet or call).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

AGENTS = ("first", "second")
TURNS = {"": 0, "p": 1, "b": 1, "pb": 0}  # who acts after each history
ENDS = ("pp", "bp", "bb", "pbp", "pbb")
Deal = tuple[int, int]  # the cards of the first and of the second
Strategy = Mapping[tuple[int, str], Sequence[float]]  # (own card, history) -> probabilities of p and b


def observe(card: int, history: str) -> np.ndarray:
    """float32 [7]: the card and the history, one-hot; all zeros for the history of an end."""
    seen = np.zeros(7, np.float32)
    seen[card] = 1.0
    if history in TURNS:
        seen[3 + list(TURNS).index(history)] = 1.0
    return seen


def pay(deal: Deal, history: str) -> int:
    """What the first player wins."""
    if history == "bp":
        return 1
    if history == "pbp":
        return -1
    stake = 2 if history.endswith("bb") else 1
    return stake if deal[0] > deal[1] else -stake


class KuhnPoker:
    """PettingZoo's parallel API by its methods; only the agent whose turn it is has an observation."""

    possible_agents = AGENTS

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._deal: Deal = (0, 1)
        self._history = ""

    def observation_space(self, agent: str) -> Box:
        return Box(0.0, 1.0, (7,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        first, second, _ = self._random.permutation(3).tolist()
        self._deal, self._history = (first, second), ""
        return {"first": observe(first, "")}, {}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        (action,) = actions.values()
        self._history += "pb"[action]
        if self._history in TURNS:
            turn = TURNS[self._history]
            return {AGENTS[turn]: observe(self._deal[turn], self._history)}, {}, {}, {}, {}
        won = float(pay(self._deal, self._history))
        last = {agent: observe(card, self._history) for agent, card in zip(AGENTS, self._deal, strict=True)}
        return last, {"first": won, "second": -won}, dict.fromkeys(AGENTS, True), {}, {}

    def close(self) -> None: ...


def make() -> KuhnPoker:
    """The environment."""
    return KuhnPoker()


def average(strategies: Sequence[Strategy]) -> Strategy:
    """The strategy that is as good as drawing one of these for each game: at each point the mean, weighted by how
    likely the player's own actions lead there (Kuhn's theorem)."""
    mixed = {}
    for card in range(3):
        for history in TURNS:
            # The player's own earlier action: only the first has one, before "pb".
            reach = np.array([each[card, ""][0] if history == "pb" else 1.0 for each in strategies])
            rows = np.array([each[card, history] for each in strategies])
            weights = reach / reach.sum() if reach.sum() else np.full(len(rows), 1 / len(rows))
            mixed[card, history] = tuple((weights @ rows).tolist())
    return mixed


def best_value(strategy: Strategy, player: int) -> float:
    """What a best response earns as `player` (0: first) against this strategy, in expectation over the deals."""
    return sum(_respond(strategy, player, card, "", dict.fromkeys(_deals(player, card), 1 / 6)) for card in range(3))


def _deals(player: int, card: int) -> list[Deal]:
    return [deal for deal in permutations(range(3), 2) if deal[player] == card]


def _respond(strategy: Strategy, player: int, card: int, history: str, weights: dict[Deal, float]) -> float:
    """weights: of each deal that is possible for a player with this card, by chance and the other's actions so far."""
    if history in ENDS:
        return sum(weight * pay(deal, history) * (1 if player == 0 else -1) for deal, weight in weights.items())
    if TURNS[history] == player:
        return max(_respond(strategy, player, card, history + action, weights) for action in "pb")
    value = 0.0
    for index, action in enumerate("pb"):
        follow = {deal: weight * strategy[deal[1 - player], history][index] for deal, weight in weights.items()}
        value += _respond(strategy, player, card, history + action, follow)
    return value


def nash_conv(strategy: Strategy) -> float:
    """The sum of what each player could gain by a best response (1711.00832): 0 for an equilibrium; the value of the
    game cancels out. Uniform play has 11/12."""
    return best_value(strategy, 0) + best_value(strategy, 1)
