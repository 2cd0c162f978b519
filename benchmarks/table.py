"""The tables of README.md (seven rows) and docs/measured.md (everything), made from benchmarks/results.

python -m benchmarks.table --write    # renew them, each between the two marks in its file
python -m benchmarks.table --check    # one line a row; exits 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.all import NAMES
from benchmarks.children import ROOT
from benchmarks.result import Row, describe, number, read

TIMES = "\N{MULTIPLICATION SIGN}"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def table(rows: Sequence[Row]) -> str:
    """Markdown: rows of the same name differ in their peer only, and share a line."""
    lines = ["| measured | Shoal | peers | bar | |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.name, row.unit), []).append(row)
    for (name, unit), same in groups.items():
        peers = "; ".join(f"{row.peer_name} {number(row.peer)}{_ratio(row)}" for row in same if row.peer is not None)
        bars = "; ".join(_bar(row, len(same) > 1) for row in same if row.bar is not None)
        verdicts = [row.met for row in same if row.met is not None]
        verdict = "" if not verdicts else "met" if all(verdicts) else "**missed**"
        lines.append(f"| {name} | {number(same[0].ours)} {unit} | {peers or '-'} | {bars or '-'} | {verdict} |")
    return "\n".join(lines)


# The rows of README.md, each the one by which its part is known.
HEADLINES = (
    "CartPole-v1 solved",
    "step time, DDP, 2 workers, perceptron",
    "stall of a checkpoint, 200 MB of state",
    "1 MB of weights, published until applied by all 16 actors (Ray)",
    "small model, JSON, throughput, 64 connections",
    "simulated model, p99, 400 requests/s",
    "100 version swaps under 500 requests/s: failed requests",
)


def headlines(results: Mapping[str, Sequence[Row]]) -> str:
    """A table of HEADLINES, and how many rows have a bar and miss it."""
    rows = [row for name in _in_order(results) for row in results[name]]
    shown = [row for headline in HEADLINES for row in rows if row.name == headline]
    met = {row.name: True for row in rows if row.met is not None}
    for row in rows:
        if row.met is False:
            met[row.name] = False
    missed = sum(not each for each in met.values())
    link = "[all measurements](docs/measured.md)"
    return f"{table(shown)}\n\nMedians; {TIMES} is ours over the peer's. {len(met)} bars, {missed} missed: {link}."


def in_full(results: Mapping[str, Sequence[Row]]) -> str:
    """A section for each file: its table, its notes, and the command, machine and commit of its measurement."""
    parts: list[str] = []
    for name in _in_order(results):
        rows = results[name]
        parts += [f"## {name.replace('_', ' ')}", "", table(rows), "", *_notes(rows), *_origin(rows), ""]
    return "\n".join(parts).rstrip()


def _in_order(results: Mapping[str, Sequence[Row]]) -> list[str]:
    """As `benchmarks.all` runs them; then others."""
    order = [name.replace(".", "_") for name in NAMES]
    return sorted(results, key=lambda name: (order.index(name) if name in order else len(order), name))


def _ratio(row: Row) -> str:
    """Empty for a peer without a result."""
    return "" if row.ratio is None else f" ({number(row.ratio)}{TIMES})"


def _bar(row: Row, several: bool) -> str:
    sign = "≥" if row.better == "higher" else "≤"
    if row.bar_kind == "value":
        return f"{sign} {number(row.bar)} {row.unit}"
    return f"{sign} {number(row.bar)}{TIMES} {row.peer_name if several else ''}".strip()


def _notes(rows: Sequence[Row]) -> list[str]:
    names: dict[str, dict[str, None]] = {}  # of the rows with a note
    for row in rows:
        if row.note:
            names.setdefault(row.note, {})[row.name] = None
    return [*(f"- {'; '.join(each)}: {note}" for note, each in names.items()), ""] if names else []


def _origin(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    revisions = sorted({row.commit["revision"][:9] + ("+changes" if row.commit["dirty"] else "") for row in rows})
    machine = first.machine
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    where = f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return [f"`{first.command}`; {where}; commit {', '.join(revisions)}; {min(row.date for row in rows)[:10]}."]


def renew(path: Path, content: str) -> bool:
    """Replace what is between the marks of `path`; False when it does not have them."""
    text = path.read_text() if path.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return False
    path.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="renew the tables in README.md and docs/measured.md")
    what.add_argument("--check", action="store_true", help="print every row with its verdict; exit 1 on a missed bar")
    chosen = parser.parse_args()
    results = read()
    if not results:
        print("there are no results yet: `make bench` makes them", file=sys.stderr)
        return 1
    if chosen.check:
        rows = [row for name in _in_order(results) for row in results[name]]
        for row in rows:
            print(describe(row))
        return int(any(row.met is False for row in rows))
    pages = {"README.md": headlines(results), "docs/measured.md": in_full(results)}
    without = [page for page, content in pages.items() if not renew(ROOT / page, content)]
    if without:
        print(f"no lines {BEGIN} and {END} in {', '.join(without)}", file=sys.stderr)
    return int(bool(without))


if __name__ == "__main__":
    sys.exit(main())
