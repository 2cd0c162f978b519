"""Traces of requests: read, replayed on simulated replicas that the policy scales, and `shoal serve simulate`."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shoal.batching.latency_model import ForwardTime
from shoal.cli import cli
from shoal.errors import DataError, ShoalError
from shoal.libs.capacity.simulation import poisson
from shoal.libs.capacity.trace_replay import ReplayedTrace, read_trace, replay_fixed, replay_policy
from shoal.serve.scaling.policy import ScalePolicy
from shoal.serve.spec.scale import ScaleSpec

SECONDS = ForwardTime([(1, 0.0205), (32, 0.036)]).tabulate(32)  # carries 889 requests/s
MONDAY_S = datetime(2026, 1, 5, tzinfo=UTC).timestamp()


def bursts(rates: list[float], span_s: float = 120.0) -> np.ndarray:
    return np.concatenate(
        [number * span_s + np.array(poisson(rate, int(rate * span_s), number)) for number, rate in enumerate(rates)]
    )


def play(arrivals: np.ndarray, start_s: float = 6.0, **scale: Any) -> ReplayedTrace:
    initial = scale.get("min", 1)
    return replay_policy(arrivals, ScalePolicy(ScaleSpec(**scale), 0.5), SECONDS, 0.5, start_s=start_s, initial=initial)


def test_a_trace_is_served_for_less_than_the_most_replicas() -> None:
    arrivals = np.sort(bursts([100, 600, 1100, 100]))
    found, most, least = play(arrivals, max=3), replay_fixed(arrivals, 3, SECONDS, 0.5), replay_fixed(
        arrivals, 1, SECONDS, 0.5
    )  # fmt: skip
    assert found.within > 0.99 > least.within
    assert found.replica_s < 0.75 * most.replica_s
    assert [replicas for _, replicas in found.planned][-1] == 1
    assert found.requests == most.requests == len(arrivals)


def test_a_cold_start_costs_its_time_and_loses_nothing() -> None:
    found = play(np.array([0.0, 0.5, 400.0, 401.0]), start_s=7.0, max=2, min=0, idle_s=60.0)
    assert found.rejected == 0
    assert 7.0 < found.p99_s < 10.0
    assert found.within == 0.0
    assert found.replica_s < 160.0
    assert play(np.array([0.0, 0.2]), start_s=7.0, max=2, min=0).rejected == 0  # ends while the first starts


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_csv(text: str) -> Path:
        (path := tmp_path / "trace.csv").write_text(text)
        return path

    return write_csv


def test_a_trace_is_read_as_times_or_counts(write: Callable[[str], Path], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    assert read_trace(write("time\n3.5\n1.5\n")).tolist() == [1.5, 3.5]
    assert read_trace(write("time\n2026-01-05 00:00:01\n2026-01-05 00:00:00\n")).tolist() == [MONDAY_S, MONDAY_S + 1]
    counted = read_trace(write("time,count\n0,10\n120,0\n60,20\n"))
    assert len(counted) == 30
    assert (counted < 60).sum() == 10
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"time": [1.0, 2.0], "other": ["a", "b"]}), tmp_path / "trace.parquet")
    assert read_trace(tmp_path / "trace.parquet").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("when\n1\n2\n", "no column `time`, but when"),
        ("time\n", "no rows"),
        ("time\n1\nsoon\n", "row 0 has '1', which is no number"),
        ("time,count\n0,1\n60,\n", "`count` of row 1 is missing"),
        ("time,count\n0,1\n60,-2\n", "`count` of row 1 is -2"),
        ("time,count\n0,1.5\n60,2\n", "`count` of row 0 is 1.5"),
        ("time,count\n0,1\n0,2\n", "a minute twice"),
        ("time,count\n0,1\n30,2\n", "less than a minute apart"),
        ("time,count\n0,900000000\n60,2\n", "900,000,002 requests, and a simulation at most"),
        ("time\n5\n5\n", "fewer than two times"),
        ("", "cannot be read"),
        ("time\n1767571200000\n1767571201000\n", "after the year 9999"),
        ("time,time\n1,2\n2,3\n", "`time` more than once"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(write: Callable[[str], Path], text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_trace(write(text))


def test_a_trace_of_another_kind_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither \.csv nor \.parquet"):
        read_trace(tmp_path / "trace.txt")
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")


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
