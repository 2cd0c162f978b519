"""The tables of README.md and docs/measured.md are what benchmarks/results says, and each line is read by itself."""

from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import population
from benchmarks.gpu.turns import Setting
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


def test_a_section_runs_in_tiny_sizes() -> None:
    rows = list(population.measure(Setting(torch.device("cpu"), 1, 0.0)))
    assert [row.peer_name for row in rows[:2]] == ["loop of modules", "torch.func script"]
    assert all(row.ours > 0 for row in rows)


def test_a_section_that_fails_leaves_its_error_and_loses_no_other(tmp_path: Path) -> None:
    outcome = benchmark.run_section("absent", "cpu", 1, 60.0, tmp_path)
    assert outcome.rows == []
    assert "No module named 'benchmarks.gpu.absent'" in outcome.error


def test_without_a_gpu_it_says_why_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"there is no CUDA device here (torch {torch.__version__}" in benchmark.find_problem("cuda")
