"""`shoal serve simulate --trace`: the cost of `scale` on a trace, beside fixed numbers; what cannot be is refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shoal.cli import cli
from shoal.errors import ShoalError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    rows = [f"2026-01-05 08:{minute:02d}:00,{3000 if 5 <= minute < 8 else 300}" for minute in range(12)]
    (path := tmp_path / "trace.csv").write_text("\n".join(["time,count", *rows]))
    return path


def simulate(*words: object) -> Result:
    given = ["serve", "simulate", "--latency", "1:0.03,8:0.24", "--max-batch", "8", *map(str, words)]
    return CliRunner().invoke(cli, given)


def test_a_trace_costs_less_with_scale_and_keeps_its_objective(trace: Path) -> None:
    result = simulate("--trace", trace, "--scale", "max=3", "--scale", "objective_s=1", "--json")
    found = json.loads(result.output)
    replays = found["replays"]
    assert list(replays) == ["scale", "1", "2", "3"]
    assert (found["requests"], found["objective_s"]) == (11700, 1.0)
    assert replays["1"]["within"] < 0.5 < 0.9 < replays["scale"]["within"]
    assert replays["2"]["replica_s"] == pytest.approx(2 * 720, abs=5) == 2 * replays["1"]["replica_s"]
    assert replays["1"]["replica_s"] < replays["scale"]["replica_s"] < replays["2"]["replica_s"]
    shown = simulate("--trace", trace, "--scale", "max=3", "--replicas", "2", "--start-s", "20").output
    assert "1 to 3, by load" in shown
    assert "replica-hours" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "max=3"], "needs a trace. give --trace"),
        (["--trace", "TRACE", "--rate", "3"], "a trace has its own rates"),
        (["--trace", "TRACE", "--scale", "most=3"], "scale.most = 3: no such field"),
        (["--trace", "TRACE", "--scale", "budget=3/week"], "a budget is replica-hours"),
        (["--trace", "absent.csv"], "trace = 'absent.csv': cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(trace: Path, words: list[str], message: str) -> None:
    error = simulate(*(trace if word == "TRACE" else word for word in words)).exception
    assert isinstance(error, ShoalError)
    assert message in str(error)
