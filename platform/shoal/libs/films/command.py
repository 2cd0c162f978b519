"""`shoal play`: plays episodes of a game by registered policies, and takes their films."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import numpy as np

from shoal.client.discovery import find_endpoint
from shoal.errors import ConfigError, needs_extra
from shoal.extend.cli import Positive, Texts, verb
from shoal.extend.registry import LocalModel, Registry, find_version, split_ref
from shoal.extend.rl import AgentsEpisode, is_parallel, open_environment, translate_environment_errors
from shoal.extend.runs import format_number, format_size
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


MAX_LINES = 20


@verb(work="playing")
def play(
    model: Annotated[str, "MODEL[@VERSION]"],
    *,
    env: Annotated[str, "The game, as an actor takes it.  [default: the one that the policy learnt in]"] = "",
    episodes: Positive = 3,
    record: Annotated[Path | None, "--record FILM", "Write film.webp or film.mp4."] = None,
    endpoint: Annotated[
        str | None, "--endpoint NAME|URL", "Ask an endpoint for each action.  [default: play here]"
    ] = None,
    action: Annotated[Literal["best", "sampled"] | None, "[default: as the version was registered]"] = None,
    agents: Annotated[Texts, "--agent AGENT=MODEL", "Who plays another agent of the game; repeated."] = (),
    seed: Annotated[int, "Of the first episode; the others follow."] = 0,
    max_steps: Annotated[Positive, "Of an episode."] = 10_000,
    ignore: Annotated[Texts, "--ignore NAME", "A part of a Dict that the policy does not observe."] = (),
) -> Iterator[str]:
    """Play a registered policy, print its returns, and film it.

    A film shows the game, and beneath it the value, the rewards and the probability of each choice. Of a game that
    draws no pictures it is a chart of what was observed.

    \b
    Examples:
      shoal play cartpole
      shoal play cartpole@1 --record film.webp
      shoal play cartpole --endpoint cartpole --episodes 10 --action sampled
      shoal play tag-hunters --env shoal.libs.games.tag:Tag --agent prey=tag-prey --record film.webp
    """
    with needs_extra("films"):
        from shoal.libs.films import film_file
        from shoal.libs.films.episode import MAX_FRAMES, MAX_PICTURES, MIN_FRAMES
    if record is not None:
        film_file.require_format(record)
    others = dict(_split_agent(each) for each in agents)
    env = env or _find_environment(model)
    num_films = min(episodes, MAX_PICTURES // MIN_FRAMES) if record is not None else 0
    max_frames = min(MAX_FRAMES, MAX_PICTURES // num_films) if num_films else 0
    note = lambda text: click.echo(text, err=True)  # noqa: E731
    with (
        _open_players([model, *others.values()], endpoint, action, seed) as players,
        open_environment(env, ignore, draws=record is not None) as environment,
    ):
        game = PlayedGame(env, environment, players[0], dict(zip(others, players[1:], strict=True)), max_steps, note)
        played = []
        for number in range(episodes):
            played.append(game.play(number, seed + number, max_frames if number < num_films else 0))
            if number < MAX_LINES:
                yield _describe_episode(number, played[-1])
    for agent, (mean, spread) in summarize(played).items():
        whose = f" of {agent}" if agent is not None else ""
        yield f"mean return{whose} {format_number(mean)} ± {format_number(spread)} over {episodes} episodes"
    lengths = [each.num_steps for each in played]
    yield f"{players[0].name} in {env}: {sum(lengths) / episodes:,.4g} steps, {min(lengths)} to {max(lengths)}"
    if record is not None:
        films = [each.film for each in played if each.film is not None]
        if not films:
            raise ConfigError("record", str(record), "no agent of this policy has acted", "see --agent")
        count = film_file.write_film(record, films)
        yield f"{record}: {count} pictures of {len(films)} episodes, {format_size(record.stat().st_size)}"


def _describe_episode(number: int, played: Played) -> str:
    returns = [
        format_number(value) if agent is None else f"{agent} {format_number(value)}"
        for agent, value in played.returns.items()
    ]
    outcome = played.outcome or "not ended"
    return f"episode {number + 1}: return {', '.join(returns)} in {played.num_steps:,} steps, {outcome}"


def _split_agent(text: str) -> tuple[str, str]:
    agent, _, model = text.partition("=")
    if not agent or not model:
        raise ConfigError("agent", text, "is not AGENT=MODEL", "as in --agent prey=tag-prey")
    return agent, model


def _find_environment(model: str) -> str:
    env = find_version(model).manifest.data.get("environment", "")
    if not env or str(env).startswith("{"):
        problem = "does not say in which game it has learnt" if not env else "has learnt from games that joined"
        raise ConfigError("env", "", f"{model} {problem}", "name one that can be played here: --env MODULE:FUNCTION")
    return str(env)


@contextmanager
def _open_players(models: list[str], endpoint: str | None, action: Any, seed: int) -> Iterator[list[Any]]:
    from shoal.libs.films.players import EndpointPlayer, LocalPlayer

    if endpoint is None:
        yield [LocalPlayer(LocalModel(find_version(each), seed=seed), action) for each in models]
        return
    target = find_endpoint(endpoint)
    with target.connect() as client:
        players = []
        for each in models:
            name, text = split_ref(each)
            version = None if not text else int(text) if text.isdigit() else Registry().get(each).version
            players.append(EndpointPlayer(client, name, version, action))
        yield players
