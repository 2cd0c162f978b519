"""The sections of a report on a population: its members, who descends from whom, and the schedules that were found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.extend.runs import (
    ReportPanels,
    Run,
    Section,
    build_ranked_table,
    find_logarithmic,
    format_number,
    format_value,
    to_svg,
)
from shoal.libs.population import plots
from shoal.libs.population.lineage import ROUND, Lineage, Stretch, rank_members

if TYPE_CHECKING:
    from pandas import DataFrame

POPULATION = "population"  # the event that begins a population
MAX_PATHS = 12


def build_sections(run: Run) -> list[Section]:
    """Of the run as it stands; none before the first score."""
    events = run.list_events(POPULATION, ROUND)
    lineage = Lineage.from_events(events)
    settings = [details for kind, details in events if kind == POPULATION]
    if not settings or not lineage.num_rounds:
        return []
    metric, is_higher_better = settings[-1]["metric"], settings[-1]["is_higher_better"]
    best = find_best(lineage, is_higher_better)
    if best is None:
        return []
    member, number = best
    traced = lineage.trace_ancestry(member, number)
    stretches, ancestry = _to_frame(lineage.list_stretches()), _to_frame(traced)
    lines = [stretch for each in lineage.list_present() for stretch in lineage.trace_ancestry(each)]
    survivors = _to_frame(list({(each.member, each.begin, each.end): each for each in lines}.values()))
    copies, paths = len(lineage.list_copies()), lineage.paths[:MAX_PATHS]
    line = f"in blue the ancestors of member {member} after round {number}, the best"
    genealogy = plots.draw_genealogy(stretches, survivors, ancestry)
    schedules = plots.draw_schedules(stretches, ancestry, paths, find_logarithmic(run.spec))
    return [
        Section("Members", f"{metric}; {line}; dashed the median", [_draw_members(lineage, traced, metric)]),
        Section(
            "Genealogy",
            f"{copies:,} copies in {lineage.num_rounds:,} rounds; {line}; dark what survives",
            [to_svg(genealogy)],
        ),
        Section("Schedules that were found", line, [to_svg(schedules)]),
        _build_member_table(lineage, metric, is_higher_better),
    ]


def find_best(lineage: Lineage, higher_is_better: bool) -> tuple[int, int] | None:
    """(member, round) of the best score of all rounds, the earliest of equal ones; None without a score."""
    sign = 1.0 if higher_is_better else -1.0
    scored = [
        (-sign * score, details["round"], member)
        for details in lineage.rounds
        for member, score in enumerate(details["scores"])
        if score is not None
    ]
    if not scored:
        return None
    _, number, member = min(scored)
    return member, number


def _draw_members(lineage: Lineage, ancestry: Sequence[Stretch], metric: str) -> str:
    import pandas

    numbers = [details["round"] for details in lineage.rounds]
    scores = pandas.DataFrame([details["scores"] for details in lineage.rounds], index=numbers, dtype=float)
    best = {
        details["round"]: details["scores"][stretch.member]
        for stretch in ancestry
        for details in lineage.rounds
        if stretch.begin < details["round"] <= stretch.end
    }
    return to_svg(plots.draw_member_metric(scores, pandas.Series(best, dtype=float), metric))


def _build_member_table(lineage: Lineage, metric: str, higher_is_better: bool) -> Section:
    """Members by their newest score, with their newest hyper-parameters."""
    last, copies = lineage.rounds[-1], lineage.list_copies()
    scores = [math.nan if score is None else score for score in last["scores"]]
    rows = []
    for member in rank_members(last["scores"], higher_is_better):
        values = [format_value(last["hyper_parameters"][path][member]) for path in lineage.paths]
        num_copied = sum(each == member for _, _, each in copies)
        rows.append([str(member), format_number(scores[member]), *values, str(num_copied)])
    header = ["member", metric, *lineage.paths, "copied"]
    return build_ranked_table("Members after the last round", "copied: how often by others", header, rows)


def _to_frame(stretches: Sequence[Stretch]) -> DataFrame:
    import pandas

    return pandas.DataFrame(
        [
            {"member": each.member, "begin": each.begin, "end": each.end, "source": each.source, **each.values}
            for each in stretches
        ]
    )


PANELS = ReportPanels(hidden=("member/",), sections=build_sections)
