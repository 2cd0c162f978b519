"""Plays episodes of a game by registered policies, and takes their films."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.extend.rl import AgentsEpisode, is_parallel, translate_environment_errors
from shoal.libs.films.episode import FilmedEpisode, Recording, open_camera
from shoal.libs.films.players import Player, describe_outputs


@dataclass
class Played:
    """One episode. returns: by agent; None is the agent of a game that has one"""

    returns: dict[Any, float]
    num_steps: int
    outcome: str
    film: FilmedEpisode | None = None


@dataclass
class PlayedGame:
    """A game, and who plays it.

    players:   by agent; the agent None, of a game that has one, and others have `first`
    max_steps: of an episode
    """

    env: str
    environment: Any
    first: Player
    players: Mapping[Any, Player] = field(default_factory=dict)
    max_steps: int = 10_000
    note: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        agents = list(self.environment.possible_agents) if is_parallel(self.environment) else [None]
        if unknown := set(self.players) - set(agents):
            known = ", ".join(map(str, agents)) if agents != [None] else "none: the game has one agent"
            raise ConfigError("agent", str(sorted(unknown)[0]), f"is no agent of {self.env}", f"there are {known}")
        self._shown = next((each for each in agents if each not in self.players), agents[0])  # in the film
        space = self.environment.action_space
        self._sizes = [int(each) for each in getattr(space(self._shown) if callable(space) else space, "nvec", ())]

    def play(self, number: int, seed: int | None, max_frames: int = 0) -> Played:
        """An episode. max_frames: of its film; 0: none. Raises ConfigError for the game's errors, and as players do."""
        with translate_environment_errors(self.env):
            episode = AgentsEpisode(self.environment, seed)
        for player in {id(each): each for each in (self.first, *self.players.values())}.values():
            player.reset()
        recording = self._begin_recording(number, max_frames) if max_frames else None
        returns = dict[Any, float]()
        outcome = ""
        num_steps = 0
        while episode.observations and num_steps < self.max_steps:
            chosen = {
                agent: self._find_player(agent).act(observation, episode.get_mask(agent), agent)
                for agent, observation in episode.observations.items()
            }
            is_filmed = recording is not None and not recording.is_full
            if recording is not None and is_filmed:
                recording.take(num_steps)
                if self._shown in chosen:
                    action, outputs = chosen[self._shown]
                    shown = describe_outputs(outputs, self._sizes)
                    recording.add(num_steps, episode.observations[self._shown], action, shown)
            with translate_environment_errors(self.env):
                episode.step({agent: action for agent, (action, _) in chosen.items()})
            num_steps += 1
            for agent, reward in episode.rewards.items():
                returns[agent] = returns.get(agent, 0.0) + reward
            if recording is not None and is_filmed:
                recording.reward(episode.rewards.get(self._shown, 0.0))
            if self._shown in episode.outcomes:
                outcome = "truncated" if episode.outcomes[self._shown][1] else "terminated"
        film = None
        if recording is not None:
            recording.take(num_steps, is_last=not recording.is_full)
            words = [self._find_player(self._shown).name, f"episode {number + 1}", self._shown]
            said = "" if recording.is_full else outcome  # not of what comes after
            film = recording.finish(" · ".join(map(str, filter(None, words))), said, max_frames)
        return Played(returns, num_steps, outcome, film)

    def _find_player(self, agent: Any) -> Player:
        return self.players.get(agent, self.first)

    def _begin_recording(self, number: int, max_frames: int) -> Recording:
        camera, why = open_camera(self.environment, max_frames)
        if why and number == 0:
            self.note(f"{self.env}: {why}: a chart is drawn")
        return Recording(camera)


def summarize(played: list[Played]) -> dict[Any, tuple[float, float]]:
    """The mean and the standard deviation of the returns, by agent."""
    agents = dict.fromkeys(agent for each in played for agent in each.returns)
    found = {agent: [each.returns[agent] for each in played if agent in each.returns] for agent in agents}
    return {agent: (float(np.mean(values)), float(np.std(values))) for agent, values in found.items()}
