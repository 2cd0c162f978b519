"""`shoal chaos`: run a job under faults that a seed draws, say whether its promises held, and replay what was found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from shoal.atomic_file import make_folder, replace_synced
from shoal.errors import ConfigError, RunError
from shoal.extend.cli import CommandGroup, NotNegative, Positive, Texts, render_table
from shoal.extend.runs import Panel, RunKind, print_line
from shoal.home import home
from shoal.libs.chaos.campaign import Campaign, CampaignResult
from shoal.libs.chaos.plan import KINDS, LOOP, TRAINING, Fault, draw_faults, shrink

MENUS = {RunKind.LOOP: LOOP, RunKind.TRAINING: TRAINING}


@click.group(cls=CommandGroup)
def chaos() -> None:
    """Break a run on purpose, and see whether it keeps its promises.

    \b
    Examples:
      shoal chaos run actor_learner --actors 2 max_wall_s=180 --seed 7 --faults 10
      shoal chaos replay ~/.shoal/chaos/20261130-221500-7.json
    """


def _show(shown: Mapping[str, Any]) -> Iterator[object]:
    struck = []
    for each in shown["strikes"]:
        seconds = each["at"] - shown["began_at"]
        struck.append([str(Fault(**each["fault"])), f"{each['count']:,}", f"{seconds:.1f}", str(each["pid"] or "-")])
    yield render_table(Panel(title="faults", header=("fault", "count", "after s", "process"), rows=struck))
    if shown["missed"]:
        yield f"{len(shown['missed'])} faults never came: the run ended before their events"
    kept = [
        ["kept" if each["is_satisfied"] else "BROKEN", each["name"], each["evidence"]] for each in shown["promises"]
    ]
    yield render_table(Panel(title="promises", header=("", "promise", "evidence"), rows=kept))
    broken = [each["name"] for each in shown["promises"] if not each["is_satisfied"]]
    if broken:
        raise RunError(f"{len(broken)} of its promises were broken: again by `shoal chaos replay {shown['file']}`")


@chaos.verb(show=_show, context_settings={"ignore_unknown_options": True})
def run(
    overrides: Annotated[tuple[str, ...], "JOB [WORD]..."],
    *,
    seed: Annotated[NotNegative, "Of the faults: the same seed draws the same ones."] = 0,
    faults: Annotated[Positive, "How many."] = 10,
    kind: Annotated[Texts, "--kind KIND", "kill, pause, fill_disk or fill_memory; may be repeated; default: all."] = (),
    target: Annotated[Texts, "--target ROLE", "Strike these processes alone; may be repeated."] = (),
    shorten: Annotated[NotNegative, "--shorten N", "After a violation: up to N further runs for fewer faults."] = 0,
) -> dict[str, Any]:
    """Run JOB as `shoal run` does, under faults tied to its counts, and check its promises.

    Kills and pauses strike when so many segments were received, versions published, steps made or checkpoints saved.

    \b
    Examples:
      shoal chaos run actor_learner --actors 2 max_wall_s=180 --seed 7 --faults 10
      shoal chaos run train task=my_task.py:MyTask parallel=ddp workers=2 --target rank --faults 3
    """

    def draw(run_kind: RunKind) -> list[Fault]:
        if run_kind not in MENUS:
            raise ConfigError(
                "job", run_kind.value, "has no faults yet", f"runs of the kinds {', '.join(MENUS)} have some"
            )
        return draw_faults(seed, faults, MENUS[run_kind], target, kind or KINDS)

    return _strike(overrides, draw, seed, shorten)


@chaos.verb(show=_show)
def replay(
    file: Path,
    *,
    shorten: Annotated[NotNegative, "--shorten N", "After a violation: up to N further runs for fewer faults."] = 0,
) -> dict[str, Any]:
    """Run what a campaign's FILE has: the same command under the same faults.

    \b
    Examples:
      shoal chaos replay ~/.shoal/chaos/20261130-221500-7.json --shorten 10
    """
    try:
        known = msgspec.json.decode(file.read_bytes())
        listed = [Fault(**each) for each in known["faults"]]
        overrides, seed = known["run"], known["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} has no campaign: {error}") from None
    return _strike(overrides, lambda _: listed, seed, shorten)


def _strike(overrides: Sequence[str], draw: Any, seed: int, shorten: int) -> dict[str, Any]:
    folder = home() / "chaos"
    make_folder(folder)

    def try_faults(draw: Any) -> CampaignResult:
        campaign = Campaign(overrides, draw, folder, print_line)
        result = campaign.run()
        result.promises.append(campaign.find_leftovers())
        return result

    result = try_faults(draw)
    struck = [*(each.fault for each in result.strikes), *result.missed]
    if shorten and not result.is_clean:
        broken = {each.name for each in result.promises if not each.is_satisfied}
        left = iter(range(shorten))

        def is_violated(fewer: Sequence[Fault]) -> bool:
            if next(left, None) is None:
                return False
            print_line(f"again with {len(fewer)} of the faults")
            found = try_faults(lambda _: fewer).promises
            return any(each.name in broken and not each.is_satisfied for each in found)

        struck = shrink([each.fault for each in result.strikes], is_violated)
        print_line(f"{len(struck)} faults still break it: {'; '.join(map(str, struck))}")
    file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}.json"
    described = {"run": overrides, "seed": seed, "file": str(file), "faults": [asdict(each) for each in struck]}
    described |= asdict(result)
    replace_synced(file, msgspec.json.format(msgspec.json.encode(described)))
    return described
