"""The panels of a population: its members, who descends from whom, and the schedules that were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.extend.runs import (
    Cell,
    Line,
    Panel,
    Run,
    RunPanels,
    draw_panels,
    encode_picture,
    find_logarithmic,
    format_number,
    format_value,
    is_logarithmic,
    to_svg,
)
from shoal.libs.population.lineage import ROUND, Lineage, Stretch, rank_members

POPULATION = "population"  # the event that begins a population
MAX_PATHS = 12
MAX_LINES = 200  # of members in one panel
LINK_LENGTH = 0.5  # of a copy, in rounds
WIDTH_INCHES = 10.8  # across the page


def build_panels(run: Run) -> list[Panel]:
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
    line = f"in blue the ancestors of member {member} after round {number}, the best"
    logarithmic = find_logarithmic(run.spec)
    columns = {path: [details["hyper_parameters"][path] for details in lineage.rounds] for path in lineage.paths}
    scores = [details["scores"] for details in lineage.rounds]
    survivors = {
        (each.member, each.begin, each.end): each
        for one in lineage.list_present()
        for each in lineage.trace_ancestry(one)
    }
    genealogy = draw_genealogy(lineage.list_stretches(), list(survivors.values()), traced)
    copies = f"{len(lineage.list_copies()):,} copies in {lineage.num_rounds:,} rounds; {line}"
    return [
        Panel(title="members", note=f"{metric}; {line}", x="round", lines=draw_members(lineage, traced, scores)),
        Panel(title="genealogy", note=copies, pictures=[("", encode_picture(genealogy, "svg+xml"))]),
        *(
            Panel(
                title=f"schedule of {path}",
                note=line,
                x="round",
                scale="y" if is_logarithmic(np.ravel(values), path, logarithmic) else "",
                lines=draw_members(lineage, traced, values),
            )
            for path, values in list(columns.items())[:MAX_PATHS]
        ),
        build_member_table(lineage.rounds[-1], metric, is_higher_better),
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


def draw_members(lineage: Lineage, ancestry: Sequence[Stretch], values: Sequence[Sequence[Any]]) -> list[Line]:
    """A line for each member, and for the best one's ancestors. values: of each round and member"""
    rounds = [details["round"] for details in lineage.rounds]
    num_lines = min(lineage.num_members, MAX_LINES)
    members = [Line(f"{index}", rounds, [each[index] for each in values], "muted") for index in range(num_lines)]
    line = [
        next((each[stretch.member] for stretch in ancestry if stretch.begin < number <= stretch.end), None)
        for number, each in zip(rounds, values, strict=True)
    ]
    return [*members, Line("the best", rounds, line, "busy")]


def draw_genealogy(stretches: Sequence[Stretch], survivors: Sequence[Stretch], ancestry: Sequence[Stretch]) -> bytes:
    """An SVG of members over rounds.

    survivors: those whose training the last members have in their weights
    ancestry:  those of the best member
    """
    shown = (("", stretches, "muted"), ("survives", survivors, ""), ("the best", ancestry, "busy"))
    lines = [Line(label, *trace_descent(each), tone) for label, each, tone in shown]
    new = [each for each in stretches if each.source is None]
    dots = Line("new weights", [each.begin for each in new], [each.member for each in new], "points")
    panel = Panel(title="", x="round", lines=[*lines, dots])
    height = min(2.0 + 0.17 * (1 + max(each.member for each in stretches)), 8.0)
    return to_svg(draw_panels([panel], size_inches=(WIDTH_INCHES, height))).encode()


def trace_descent(stretches: Sequence[Stretch]) -> tuple[list[float], list[float | None]]:
    """A line of training at the member's height for each stretch, and a link to the member that was copied."""
    xs: list[float] = []
    ys: list[float | None] = []
    for each in stretches:
        is_copy = each.source not in (None, each.member)
        start = each.begin + (min(LINK_LENGTH, each.end - each.begin) if is_copy else 0.0)
        xs += [*[each.begin] * is_copy, start, each.end, each.end]
        ys += [*[each.source] * is_copy, each.member, each.member, None]
    return xs, ys


def build_member_table(last: Mapping[str, Any], metric: str, higher_is_better: bool) -> Panel:
    """Members by their newest score, with their newest hyper-parameters, and whom they copied last."""
    scores = last["scores"]
    values = last["hyper_parameters"]
    ancestors = last.get("ancestors", {})
    rows: list[list[Cell]] = []
    for member in rank_members(scores, higher_is_better):
        copied = [
            f"{source if source >= 0 else 'new weights'} in round {number}"
            for number, source in (ancestors[member][-2:] if ancestors else ())
        ]
        score: Cell = "-" if scores[member] is None else format_number(scores[member])
        cells = (format_value(each[member]) for each in values.values())
        origin = (", ".join(copied) or "first generation", "muted")
        rows.append([str(member), score if rows else (str(score), "best"), *cells, origin])
    header = ["member", metric, *(path.rpartition(".")[2].replace("_", " ") for path in values), "copied"]
    return Panel(title="members after the last round", header=header, rows=rows)


PANELS = RunPanels(
    hidden=("member/",), criteria=("population/",), folded=("population/member_steps",), panels=build_panels
)
