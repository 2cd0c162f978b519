"""`shoal demonstrations` and `shoal episodes`: what was shown to a run, and what it has recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
import numpy as np

from shoal.errors import ConfigError
from shoal.extend.cli import Texts, verb
from shoal.extend.runs import Run, format_number, load
from shoal.libs.demonstrations.files import (
    EPISODES,
    FOLDER,
    SUFFIX,
    Demonstration,
    DemonstrationFiles,
    Info,
    open_shared,
)
from shoal.plugins.find import find_in_library
from shoal.store import open_store
from shoal.wire.action_masks import MASKS

MAX_NUMBERS = 16  # of an observation, in a film


class _Kind(NamedTuple):
    """folder: of a run; nouns: what one of its files is, and several; empty: the line without any"""

    folder: str
    noun: str
    nouns: str
    empty: str


_SHOWN = _Kind(
    FOLDER, "demonstration", "demonstrations", "nobody has shown anything to {}: docs/games/demonstrations.md"
)
_RECORDED = _Kind(EPISODES, "episode", "episodes", "{} has recorded no episodes: gateway.record=1% does")


def _run(
    kind: _Kind,
    run: str,
    film: str | None,
    export: str | None,
    out: Path | None,
    above: float | None,
    drop: tuple[str, ...],
) -> Iterator[str]:
    record = load(run)
    files = _open(record, kind.folder)
    found = files.read_sound()
    if above is not None:
        returns = {name: each.info.episode_return for name, each in found.items()}
        highest = max((total for total in returns.values() if total is not None), default=None)
        found = {name: each for name, each in found.items() if (total := returns[name]) is not None and total > above}
        if returns and not found:
            most = "none is complete" if highest is None else f"the highest return is {format_number(highest)}"
            raise ConfigError("above", above, f"no {kind.noun} of {record.id} returns more", most)
    for option, name in (("film", film), ("export", export)):
        if name is not None and name not in found:
            raise ConfigError(option, name, f"is no {kind.noun} of {record.id}", f"see `shoal {kind.nouns}`")
    if drop:
        dropped = {name for name, each in found.items() if name in drop or _format_behaviour(each.info) in drop}
        unknown = set(drop) - dropped - {_format_behaviour(found[name].info) for name in dropped}
        if unknown:
            problem = f"is no {kind.noun} of {record.id}, and no behaviour"
            raise ConfigError("drop", ", ".join(sorted(unknown)), problem, f"see `shoal {kind.nouns}`")
        files.delete(dropped)
        yield f"dropped {len(dropped)} of {len(found)}"
    elif film is not None:
        yield from _film(film, found[film]) if out is None else [_draw(film, found[film], out)]
    elif export is not None:
        text = json.dumps(export_episode(export, found[export]))
        if out is None:
            yield text
        else:
            out.write_text(text)
    elif out is not None:
        target = open_store(out)
        for name, each in found.items():
            target.write(name + SUFFIX, each.to_bytes())
        yield f"{len(found)} {kind.nouns} in {out}: shoal run ... demonstrations={out}"
    elif found:
        yield from _list(found)
    else:
        yield kind.empty.format(record.id)


def _make_verb(kind: _Kind, text: str) -> click.Command:
    """`shoal demonstrations` and `shoal episodes` take the same."""

    @verb(kind.nouns, help=text)
    def command(
        run: str = "latest",
        *,
        film: Annotated[str | None, "--film NAME", "Show the steps of one, as text, or in --out film.webp."] = None,
        export: Annotated[
            str | None, "--export NAME", "Print one as JSON, or write it to --out, for clients of games."
        ] = None,
        out: Annotated[Path | None, "Copy all to a folder, for demonstrations=FOLDER."] = None,
        above: Annotated[float | None, "--above RETURN", "Only complete episodes of a higher return."] = None,
        drop: Annotated[Texts, "--drop NAME", "Delete one, or all of a behaviour."] = (),
    ) -> Iterator[str]:
        return _run(kind, run, film, export, out, above, drop)

    return command


demonstrations = _make_verb(
    _SHOWN,
    """What people and scripts have shown to a RUN (the newest when left out).

    \b
    Examples:
      shoal demonstrations
      shoal demonstrations latest --film human-1f0c9ad2-000003
      shoal demonstrations latest --film human-1f0c9ad2-000003 --out film.webp
      shoal demonstrations latest --out shown/
      shoal demonstrations latest --drop human-1f0c9ad2-000003 --drop script
    """,
)
episodes = _make_verb(
    _RECORDED,
    """The episodes that a RUN (the newest when left out) has recorded, with gateway.record=1%.

    \b
    Examples:
      shoal episodes
      shoal episodes latest --film policy-1f0c9ad2-000412
      shoal episodes latest --export policy-1f0c9ad2-000412 > episode.json
      shoal episodes latest --above 4 --out good/
      shoal episodes latest --drop policy-1f0c9ad2-000412
    """,
)


def export_episode(name: str, demonstration: Demonstration) -> dict[str, Any]:
    """An episode for the clients of games: one map of JSON, its tensors flat in each step."""
    info, segment = demonstration
    return {
        "kind": "episode",
        "format": 1,
        "name": name,
        "actor_id": info.actor_id,
        "behaviour": info.behaviour,
        "return": info.episode_return,
        "terminated": info.terminated,
        "truncated": info.truncated,
        "success": info.success,
        "settings_version": info.settings,
        "settings": info.values or {},
        "spec": {"observation": _describe(segment.observations), "action": _describe(segment.actions)},
        "observations": _flatten(segment.observations),
        "actions": _flatten(segment.actions) if segment.actions.ndim > 1 else segment.actions.tolist(),
        "rewards": segment.rewards.tolist(),
        "versions": segment.versions.tolist(),
        **({"masks": _flatten(masks.view(np.uint8))} if (masks := segment.extras.get(MASKS)) is not None else {}),
    }


def _describe(rows: np.ndarray) -> dict[str, Any]:
    return {"dtype": rows.dtype.name, "shape": rows.shape[1:]}


def _flatten(rows: np.ndarray) -> list[Any]:
    result: list[Any] = rows.reshape(len(rows), -1).tolist()
    return result


def _format_behaviour(info: Info) -> str:
    return info.behaviour or "policy"


def _open(run: Run, folder: str) -> DemonstrationFiles:
    """Those of a run, or of all of its policies."""
    policies = sorted(path.parent.name for path in run.folder.glob(f"*/{folder}"))
    names = [run.id, *(f"{run.id}/{policy}" for policy in policies)]
    folders = [path for path in (run.folder / folder, *sorted(run.folder.glob(f"*/{folder}"))) if path.is_dir()]
    shared = [store for name in names if (store := open_shared(name, folder)) is not None]
    return DemonstrationFiles([*map(open_store, folders), *shared])


def _list(found: Mapping[str, Demonstration]) -> Iterator[str]:
    yield f"{'behaviour':<16}{'episodes':>10}{'segments':>10}{'steps':>10}{'mean return':>14}"
    for behaviour in sorted({_format_behaviour(each.info) for each in found.values()}):
        infos = [each.info for each in found.values() if _format_behaviour(each.info) == behaviour]
        returns = [each.episode_return for each in infos if each.episode_return is not None]
        mean = format_number(float(np.mean(returns))) if returns else "-"
        steps = sum(each.num_steps for each in infos)
        yield f"{behaviour:<16}{len(returns):>10,}{len(infos):>10,}{steps:>10,}{mean:>14}"
    yield f"\n{'name':<36}{'steps':>8}{'return':>12}  actor"
    for name, (info, _) in found.items():
        shown = "goes on" if info.episode_return is None else format_number(info.episode_return)
        yield f"{name:<36}{info.num_steps:>8,}{shown:>12}  {info.actor_id}"
    if skipped := max(info.skipped for info, _ in found.values()):
        yield f"\nleft out, of those drawn: at least {skipped:,}, not whole or too many for the disk"


def _draw(name: str, demonstration: Demonstration, out: Path) -> str:
    """As a film, by the library that draws those of policies. Raises ConfigError, MissingExtra."""
    draw = find_in_library("draw", "shoal.films", "films", "out", str(out))
    info, segment = demonstration
    outcome = "terminated" if info.terminated else "truncated" if info.truncated else ""
    shown = {"observations": segment.observations, "actions": segment.actions, "rewards": segment.rewards}
    count = draw(out, title=f"{name} · {_format_behaviour(info)}", outcome=outcome, **shown)
    return f"{out}: {count} pictures"


def _film(name: str, demonstration: Demonstration) -> Iterator[str]:
    """A line for each step."""
    info, segment = demonstration
    yield f"{name}: {info.num_steps} steps of {_format_behaviour(info)}"
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
