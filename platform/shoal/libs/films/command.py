"""`shoal play`: see how a registered policy plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import ConfigError, needs_extra
from shoal.extend.registry import LocalModel, Registry, find_version, split_ref
from shoal.extend.rl import open_environment
from shoal.extend.runs import format_number, format_size

MAX_LINES = 20


@click.command()
@click.argument("model", metavar="MODEL[@VERSION]")
@click.option("--env", default="", help="The game, as an actor takes it.  [default: the one that the policy learnt in]")
@click.option("--episodes", default=3, show_default=True, type=click.IntRange(1))
@click.option("--record", type=click.Path(path_type=Path), metavar="FILM", help="Write film.webp or film.mp4.")
@click.option("--endpoint", metavar="NAME|URL", help="Ask an endpoint for each action.  [default: play here]")
@click.option("--action", type=click.Choice(["best", "sampled"]), help="[default: as the version was registered]")
@click.option(
    "--agent", "agents", multiple=True, metavar="AGENT=MODEL", help="Who plays another agent of the game; repeated."
)
@click.option("--seed", default=0, show_default=True, help="Of the first episode; the others follow.")
@click.option("--max-steps", default=10_000, show_default=True, type=click.IntRange(1), help="Of an episode.")
@click.option("--ignore", multiple=True, metavar="NAME", help="A part of a Dict that the policy does not observe.")
def play(
    model: str,
    env: str,
    episodes: int,
    record: Path | None,
    endpoint: str | None,
    action: Any,
    agents: tuple[str, ...],
    seed: int,
    max_steps: int,
    ignore: tuple[str, ...],
) -> None:
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
        from shoal.libs.films.play import PlayedGame, summarize
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
                _print_episode(number, played[-1])
    for agent, (mean, spread) in summarize(played).items():
        whose = f" of {agent}" if agent is not None else ""
        click.echo(f"mean return{whose} {format_number(mean)} ± {format_number(spread)} over {episodes} episodes")
    lengths = [each.num_steps for each in played]
    click.echo(f"{players[0].name} in {env}: {sum(lengths) / episodes:,.4g} steps, {min(lengths)} to {max(lengths)}")
    if record is not None:
        films = [each.film for each in played if each.film is not None]
        if not films:
            raise ConfigError("record", str(record), "no agent of this policy has acted", "see --agent")
        count = film_file.write_film(record, films)
        click.echo(f"{record}: {count} pictures of {len(films)} episodes, {format_size(record.stat().st_size)}")


def _print_episode(number: int, played: Any) -> None:
    returns = [
        format_number(value) if agent is None else f"{agent} {format_number(value)}"
        for agent, value in played.returns.items()
    ]
    outcome = played.outcome or "not ended"
    click.echo(f"episode {number + 1}: return {', '.join(returns)} in {played.num_steps:,} steps, {outcome}")


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
    with Client(target.url, token=token_for(target.url)) as client:
        players = []
        for each in models:
            name, text = split_ref(each)
            version = None if not text else int(text) if text.isdigit() else Registry().get(each).version
            players.append(EndpointPlayer(client, name, version, action))
        yield players
