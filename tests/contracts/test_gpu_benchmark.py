"""The benchmark of a GPU, whose sections run in tiny sizes on a CPU, and what it says where it cannot measure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import population
from benchmarks.gpu.turns import Setting


def test_a_section_runs_in_tiny_sizes() -> None:
    rows = list(population.measure(Setting(torch.device("cpu"), 1, 0.0)))
    assert [row.peer_name for row in rows[:2]] == ["loop of modules", "torch.func script"]
    assert all(row.ours > 0 for row in rows)


def test_a_section_that_fails_leaves_its_error_and_loses_no_other(tmp_path: Path) -> None:
    outcome = benchmark.run_section("absent", "cpu", 1, 60.0, tmp_path)
    assert outcome.rows == []
    assert "No module named 'benchmarks.gpu.absent'" in outcome.error


def test_a_section_that_hangs_is_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    outcome = benchmark.run_section("trees", "cpu", 1, 0.0, tmp_path)
    assert "said nothing" in outcome.error
    assert time.monotonic() - began_s < 60.0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "NEEDED", ("torch", "no_such_package"))
    assert "lacks no_such_package: install" in benchmark.find_problem("cpu")
    monkeypatch.setattr(benchmark, "OF_SECTIONS", {"trees": ("no_such_package",)})
    assert benchmark.run_section("trees", "cpu", 1, 60.0, tmp_path).error == "no_such_package is not installed"


def test_without_a_gpu_it_says_why_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"there is no CUDA device here (torch {torch.__version__}" in benchmark.find_problem("cuda")
