"""A remote actor of several policies whose gateways do not change to another run at the same moment."""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.actor.remote import run_remote_actor
from shoal.errors import ConfigError, RunChanged
from shoal.wire import ExperienceSpec
from shoal.wire.messages import ActionMessage


class ChangingClient:
    """A connection whose gateway is one of another run after some actions: the next call says so, or `connect`."""

    finished, behaviour, settings_version = False, "", 0

    def __init__(self, agent: str, change_after: int, next_run: str = "run-2") -> None:
        self.spec: ExperienceSpec = msgspec.structs.replace(EXPERIENCE, agents=(agent,))
        self.agent, self.run_id, self.num_connects = agent, f"run-1.{agent}", 0
        self._next_run_id, self._left = f"{next_run}.{agent}", change_after

    def ask(self, *message: Any) -> None: ...

    def wait_for_action(self, episode: int, step: int) -> ActionMessage:
        self._left -= 1
        if self._left <= 0 and self.run_id != self._next_run_id:
            self.run_id = self._next_run_id
            raise RunChanged("another run")
        return ActionMessage(episode, step, action=0)

    def connect(self) -> None:
        self.run_id, self.num_connects = self._next_run_id, self.num_connects + 1


class Turns:
    """Two agents, of which one acts at a time."""

    possible_agents = ("a", "b")
    _num_steps = 0

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (4,))

    def action_space(self, agent: str) -> gymnasium.spaces.Discrete:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"a": np.zeros(4, np.float32)}, {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._num_steps += 1
        agent = self.possible_agents[self._num_steps % 2]
        return {agent: np.zeros(4, np.float32)}, {agent: 0.0}, {}, {}, {}


def test_an_actor_follows_all_gateways_to_the_next_run() -> None:
    clients = [ChangingClient("a", 3), ChangingClient("b", 100)]
    runs: list[str] = []
    played = run_remote_actor(
        Turns(),  # type: ignore[arg-type]
        clients,  # type: ignore[arg-type]
        max_steps=50,
        on_run=lambda spec: runs.extend(spec.agents),
    )
    assert played == 50
    assert [client.run_id for client in clients] == ["run-2.a", "run-2.b"]
    assert runs == ["a", "b"] * 2
    assert [client.num_connects for client in clients] == [1, 1]


def test_gateways_that_stay_those_of_different_runs_are_refused() -> None:
    clients = [ChangingClient("a", 3), ChangingClient("b", 100, "run-3")]
    with pytest.raises(ConfigError, match="are of different runs"):
        run_remote_actor(Turns(), clients, max_steps=50)  # type: ignore[arg-type]
