"""The benchmark of a GPU, whose sections run in tiny sizes on a CPU, and what it says where it cannot measure."""

from __future__ import annotations

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


def test_without_a_gpu_it_says_why_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"there is no CUDA device here (torch {torch.__version__}" in benchmark.find_problem("cuda")
