"""The README's table, made from benchmarks/results, and the list of bars that are missed.

python -m benchmarks.table --write    # renew the table between the two marks in README.md
python -m benchmarks.table --check    # one line a row; exits 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.children import ROOT
from benchmarks.result import Row, describe, number, read

TIMES = "\N{MULTIPLICATION SIGN}"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def table(rows: Sequence[Row]) -> str:
    """Markdown: rows of the same name differ in their peer only, and share a line."""
    lines = ["| measured | Shoal | peers | bar | |", "|---|---|---|---|---|"]
    for (name, unit), group in groupby(rows, key=lambda row: (row.name, row.unit)):
        same = list(group)
        peers = "; ".join(f"{row.peer_name} {number(row.peer)} ({_ratio(row)})" for row in same if row.peer is not None)
        bars = "; ".join(_bar(row, len(same) > 1) for row in same if row.bar is not None)
        verdicts = [row.met for row in same if row.met is not None]
        verdict = "" if not verdicts else "met" if all(verdicts) else "**missed**"
        lines.append(f"| {name} | {number(same[0].ours)} {unit} | {peers or '-'} | {bars or '-'} | {verdict} |")
    return "\n".join([*lines, "", *_notes(rows), *_origin(rows)])


def _ratio(row: Row) -> str:
    return f"{number(row.ratio)}{TIMES}"


def _bar(row: Row, several: bool) -> str:
    sign = "≥" if row.better == "higher" else "≤"
    if row.bar_kind == "value":
        return f"{sign} {number(row.bar)} {row.unit}"
    return f"{sign} {number(row.bar)}{TIMES} {row.peer_name if several else ''}".strip()


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = dict.fromkeys(f"{row.name}: {row.note}" for row in rows if row.note)
    return [*(f"- {note}" for note in notes), ""] if notes else []


def _origin(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    revisions = sorted({row.commit["revision"][:9] + ("+changes" if row.commit["dirty"] else "") for row in rows})
    machine = first.machine
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return [
        f"Medians; {TIMES} is ours over the peer's. {where}; commit {', '.join(revisions)};"
        f" {min(row.date for row in rows)[:10]}; every run, version and command is in `benchmarks/results`."
    ]


def renew(path: Path, rows: Sequence[Row]) -> bool:
    """Replace what is between the marks of `path`; False when it does not have them."""
    text = path.read_text() if path.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return False
    path.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="renew the table in README.md")
    what.add_argument("--check", action="store_true", help="say which bars are missed")
    chosen = parser.parse_args()
    rows = read()
    if not rows:
        print("there are no results yet: `make bench` makes them", file=sys.stderr)
        return 1
    if chosen.check:
        for row in rows:
            print(describe(row))
        return int(any(row.met is False for row in rows))
    if not renew(ROOT / "README.md", rows):
        print(f"README.md has no lines {BEGIN} and {END}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
