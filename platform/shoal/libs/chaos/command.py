"""`shoal chaos`: run a job under faults that a seed draws, say whether its promises held, and replay what was found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from shoal.atomic_file import make_folder, replace_synced
from shoal.client.discovery import find_endpoint
from shoal.errors import ConfigError, RunError
from shoal.extend.cli import CommandGroup, NotNegative, Positive, Texts, render_table
from shoal.extend.cluster import find_cluster, find_cluster_processes
from shoal.extend.registry import Registry
from shoal.extend.runs import Panel, Run, RunKind, load, print_line
from shoal.home import home
from shoal.libs.chaos.campaign import Campaign, CampaignResult, EndpointCampaign
from shoal.libs.chaos.plan import LOOP, SERVING, TRAINING, Fault, draw_faults, require_known, shrink
from shoal.libs.chaos.promises import check_metric

MENUS = {RunKind.LOOP: LOOP, RunKind.TRAINING: TRAINING}


@click.group(cls=CommandGroup)
def chaos() -> None:
    """Break a run on purpose, and see whether it keeps its promises.

    \b
    Examples:
      shoal chaos run actor_learner --actors 2 max_wall_s=180 --seed 7 --faults 10
      shoal chaos endpoint digits --seed 7 --faults 10
      shoal chaos replay ~/.shoal/chaos/20261130-221500-7.json
    """


def _show(shown: Mapping[str, Any]) -> Iterator[object]:
    struck = []
    for each in shown["strikes"]:
        seconds = each["at"] - shown["began_at"]
        struck.append([str(Fault(**each["fault"])), f"{each['count']:,}", f"{seconds:.1f}", each["victim"] or "-"])
    yield render_table(Panel(title="faults", header=("fault", "count", "after s", "of"), rows=struck))
    if shown["missed"]:
        yield f"{len(shown['missed'])} faults never came: the run ended before their events"
    kept = [
        ["kept" if each["is_satisfied"] else "BROKEN", each["name"], each["evidence"]] for each in shown["promises"]
    ]
    yield render_table(Panel(title="promises", header=("", "promise", "evidence"), rows=kept))
    broken = [each["name"] for each in shown["promises"] if not each["is_satisfied"]]
    if broken:
        raise RunError(f"{len(broken)} of its promises were broken: again by `shoal chaos replay {shown['file']}`")


Kinds = Annotated[Texts, "--kind KIND", "One of docs/operations/chaos.md; may be repeated; default: all."]
Targets = Annotated[Texts, "--target ROLE", "Strike these alone; may be repeated."]
Seed = Annotated[NotNegative, "Of the faults: the same seed draws the same ones."]


@chaos.verb(show=_show, context_settings={"ignore_unknown_options": True})
def run(
    overrides: Annotated[tuple[str, ...], "JOB [WORD]..."],
    *,
    seed: Seed = 0,
    faults: Annotated[Positive, "How many."] = 10,
    kind: Kinds = (),
    target: Targets = (),
    equal: Annotated[Texts, "--equal METRIC", "Its values are an undisturbed run's, to the bit; may be repeated."] = (),
    shorten: Annotated[NotNegative, "--shorten N", "After a violation: up to N further runs for fewer faults."] = 0,
) -> dict[str, Any]:
    """Run JOB as `shoal run` does, under faults tied to its counts, and check its promises.

    Faults strike when so many segments were received, versions published, steps made or checkpoints saved. Without
    --kind and --target they are drawn from all, also those of links and, where SHOAL_STORE is set, of the store.

    \b
    Examples:
      shoal chaos run actor_learner --actors 2 max_wall_s=180 --seed 7 --faults 10
      shoal chaos run train task=my_task.py:MyTask parallel=ddp workers=2 --target rank --equal train/loss
    """

    def draw(run_kind: RunKind, links: Sequence[str]) -> list[Fault]:
        if run_kind not in MENUS:
            raise ConfigError(
                "job", run_kind.value, "has no faults yet", f"runs of the kinds {', '.join(MENUS)} have some"
            )
        return draw_faults(seed, faults, MENUS[run_kind], links, target, kind)

    require_known(kind, target)  # before a cluster starts
    return _try_run({"run": overrides, "seed": seed, "equal": equal}, draw, shorten)


@chaos.verb(show=_show)
def endpoint(
    name: Annotated[str | None, "[NAME]"] = None,
    *,
    seed: Seed = 0,
    faults: Annotated[Positive, "How many."] = 10,
    kind: Kinds = (),
    target: Targets = (),
) -> dict[str, Any]:
    """Strike an endpoint of this machine's cluster, while callers ask all its models, and check its promises.

    Faults strike when so many requests were answered. The endpoint serves its users meanwhile: do not do this to one
    whose users you would not tell.

    \b
    Examples:
      shoal chaos endpoint
      shoal chaos endpoint shop --target replica --kind kill --faults 20
    """
    drawn = draw_faults(seed, faults, SERVING, targets=target, kinds=kind)
    return _try_endpoint({"endpoint": name, "seed": seed}, drawn)


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
        about = {"equal": ()} | {each: known[each] for each in ("run", "equal", "endpoint", "seed") if each in known}
        is_run = "endpoint" not in about and bool(known["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} has no campaign: {error}") from None
    if not is_run:
        return _try_endpoint(about, listed)
    return _try_run(about, lambda *_: listed, shorten)


def _try_endpoint(about: dict[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    if ":" in (about["endpoint"] or ""):
        raise ConfigError("name", about["endpoint"], "is an address, and may be of another cluster", "give a name")
    cluster = find_cluster()
    if cluster is None or cluster.cluster_id is None or cluster.temp_dir is None:
        raise RunError("no cluster is up on this machine: `shoal up` starts one")
    campaign = EndpointCampaign(
        find_endpoint(about["endpoint"]),
        faults,
        partial(find_cluster_processes, cluster.cluster_id, cluster.temp_dir),
        lambda model: [each.version for each in Registry().list(model)],
        print_line,
    )
    result = campaign.run()
    return _save(about, result, [each.fault for each in result.strikes])


def _try_run(about: dict[str, Any], draw: Any, shorten: int) -> dict[str, Any]:
    def start(draw: Any) -> CampaignResult:
        campaign = Campaign(about["run"], draw, _find_folder(), print_line)
        result = campaign.run()
        result.promises.append(campaign.find_leftovers())
        return result

    @cache
    def find_undisturbed() -> Run:
        return load(start(lambda *_: []).run_id)

    def compare(result: CampaignResult) -> None:
        """Add the promises of metrics."""
        run = load(result.run_id)
        result.promises += [check_metric(run, find_undisturbed(), metric) for metric in about["equal"]]

    result = start(draw)
    struck = [*(each.fault for each in result.strikes), *result.missed]
    described = _save(about, result, struck)  # further runs may fail
    compare(result)
    if shorten and not result.is_clean:
        broken = {each.name for each in result.promises if not each.is_satisfied}
        left = iter(range(shorten))

        def is_violated(fewer: Sequence[Fault]) -> bool:
            if next(left, None) is None:
                return False
            print_line(f"again with {len(fewer)} of the faults")
            again = start(lambda *_: fewer)
            compare(again)
            return any(each.name in broken and not each.is_satisfied for each in again.promises)

        struck = shrink(all_struck := [each.fault for each in result.strikes], is_violated)
        seen = "still break it" if len(struck) < len(all_struck) else "break it: no fewer were seen to"
        print_line(f"{len(struck)} faults {seen}: {'; '.join(map(str, struck))}")
    return _save(about, result, struck, described["file"])


def _save(about: dict[str, Any], result: CampaignResult, faults: Sequence[Fault], file: str = "") -> dict[str, Any]:
    path = Path(file) if file else _find_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{about['seed']}.json"
    described = {**about, "file": str(path), "faults": [asdict(each) for each in faults], **asdict(result)}
    replace_synced(path, msgspec.json.format(msgspec.json.encode(described)))
    return described


def _find_folder() -> Path:
    folder = home() / "chaos"
    make_folder(folder)
    return folder
