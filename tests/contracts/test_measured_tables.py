"""The tables of README.md and docs/measured.md are what benchmarks/results says, and each line is read by itself."""

from __future__ import annotations

from benchmarks.result import read
from benchmarks.table import BEGIN, END, HEADLINES, headlines, in_full

from shoal_program import ROOT


def shown(page: str) -> str:
    return (ROOT / page).read_text().partition(BEGIN)[2].partition(END)[0].strip()


def test_the_tables_are_those_of_the_results() -> None:
    results = read()
    assert shown("README.md") == headlines(results)
    assert shown("docs/measured.md") == in_full(results)


def test_every_headline_is_measured() -> None:
    rows = {row.name for rows in read().values() for row in rows}
    assert set(HEADLINES) <= rows
    assert len(HEADLINES) == 7


def test_no_line_needs_the_line_before_or_has_a_ratio_to_nothing() -> None:
    for page in ("README.md", "docs/measured.md"):
        assert "| the same" not in shown(page)
        assert f"(-{chr(0xD7)})" not in shown(page)
