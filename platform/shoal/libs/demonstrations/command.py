"""`shoal demonstrations`: what people and scripts have shown to a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import numpy as np

from shoal.errors import ConfigError
from shoal.extend.runs import Run, format_number, load
from shoal.libs.demonstrations.files import FOLDER, SUFFIX, Demonstration, DemonstrationFiles, open_shared
from shoal.plugins.find import find_extension
from shoal.store import open_store

MAX_NUMBERS = 16  # of an observation, in a film


@click.command()
@click.argument("run", default="latest")
@click.option("--film", metavar="NAME", help="Show the steps of one, as text, or in --out film.webp.")
@click.option("--out", type=click.Path(path_type=Path), help="Copy all to a folder, for demonstrations=FOLDER.")
@click.option("--drop", metavar="NAME", multiple=True, help="Delete one, or all of a behaviour.")
def demonstrations(run: str, film: str | None, out: Path | None, drop: tuple[str, ...]) -> None:
    """What people and scripts have shown to a RUN (the newest when left out).

    \b
    Examples:
      shoal demonstrations
      shoal demonstrations latest --film human-1f0c9ad2-000003
      shoal demonstrations latest --film human-1f0c9ad2-000003 --out film.webp
      shoal demonstrations latest --out shown/
      shoal demonstrations latest --drop human-1f0c9ad2-000003 --drop script
    """
    record = load(run)
    files = _open(record)
    found = files.read_sound(files.list_names())
    if drop:
        dropped = {name for name, each in found.items() if name in drop or each.info.behaviour in drop}
        unknown = set(drop) - dropped - {found[name].info.behaviour for name in dropped}
        if unknown:
            problem = f"is no demonstration of {record.id}, and no behaviour"
            raise ConfigError("drop", ", ".join(sorted(unknown)), problem, "see `shoal demonstrations`")
        files.delete(dropped)
        click.echo(f"dropped {len(dropped)} of {len(found)}")
    elif film is not None:
        if film not in found:
            raise ConfigError("film", film, f"is no demonstration of {record.id}", "see `shoal demonstrations`")
        if out is None:
            click.echo("\n".join(_film(found[film])))
        else:
            _draw(found[film], out)
    elif out is not None:
        target = open_store(out)
        for name, each in found.items():
            target.write(name + SUFFIX, each.to_bytes())
        click.echo(f"{len(found)} demonstrations in {out}: shoal run ... demonstrations={out}")
    else:
        _list(record, found)


def _open(run: Run) -> DemonstrationFiles:
    """Those of a run, or of all of its policies."""
    policies = sorted(path.parent.name for path in run.folder.glob(f"*/{FOLDER}"))
    names = [run.id, *(f"{run.id}/{policy}" for policy in policies)]
    folders = [path for path in (run.folder / FOLDER, *sorted(run.folder.glob(f"*/{FOLDER}"))) if path.is_dir()]
    shared = [store for name in names if (store := open_shared(name)) is not None]
    return DemonstrationFiles([*map(open_store, folders), *shared])


def _list(run: Run, found: Mapping[str, Demonstration]) -> None:
    if not found:
        return click.echo(f"nobody has shown anything to {run.id}: docs/games/demonstrations.md says how")
    click.echo(f"{'behaviour':<16}{'episodes':>10}{'segments':>10}{'steps':>10}{'mean return':>14}")
    for behaviour in sorted({each.info.behaviour for each in found.values()}):
        infos = [each.info for each in found.values() if each.info.behaviour == behaviour]
        returns = [each.episode_return for each in infos if each.episode_return is not None]
        mean = format_number(float(np.mean(returns))) if returns else "-"
        steps = sum(each.num_steps for each in infos)
        click.echo(f"{behaviour:<16}{len(returns):>10,}{len(infos):>10,}{steps:>10,}{mean:>14}")
    click.echo(f"\n{'name':<36}{'steps':>8}{'return':>12}  actor")
    for name, (info, _) in found.items():
        shown = "goes on" if info.episode_return is None else format_number(info.episode_return)
        click.echo(f"{name:<36}{info.num_steps:>8,}{shown:>12}  {info.actor_id}")


def _draw(demonstration: Demonstration, out: Path) -> None:
    """As a film, by the library that draws those of policies. Raises ConfigError, MissingExtra."""
    try:
        draw = find_extension("draw", "shoal.films", {})
    except ValueError as error:
        raise ConfigError("out", str(out), str(error), "install the library films of Shoal") from None
    info, segment = demonstration
    ended = "terminated" if info.terminated else "truncated" if info.truncated else ""
    shown = {"observations": segment.observations, "actions": segment.actions, "rewards": segment.rewards}
    count = draw(out, title=f"{demonstration.name} · {info.behaviour}", outcome=ended, **shown)
    click.echo(f"{out}: {count} pictures")


def _film(demonstration: Demonstration) -> Iterator[str]:
    """A line for each step."""
    info, segment = demonstration
    yield f"{demonstration.name}: {info.num_steps} steps of {info.behaviour}"
    yield f"{'step':>6}{'action':>12}{'reward':>10}  observation"
    with np.printoptions(
        precision=3, suppress=True, threshold=MAX_NUMBERS, edgeitems=MAX_NUMBERS // 2, linewidth=10**6
    ):
        for step, row in enumerate(segment.observations):
            text = str(row.ravel())
            if step == info.num_steps:
                how = "terminated" if info.terminated else "truncated" if info.truncated else "goes on"
                yield f"{how:>6}{'':>{28 - max(6, len(how))}}  {text}"
            else:
                action = str(np.asarray(segment.actions[step]).tolist())
                yield f"{step:>6}{action:>12}{segment.rewards[step]:>10.4g}  {text}"
