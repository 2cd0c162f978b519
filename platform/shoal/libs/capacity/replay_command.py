"""`shoal serve simulate --trace`: what `endpoint.scale` would have cost on recorded arrivals. Parse, call, print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column

from shoal.batching.latency_model import ForwardTime
from shoal.cli.support.console import make_table, print_json
from shoal.config import Spec
from shoal.errors import DataError
from shoal.libs.capacity.trace_replay import ReplayedTrace, read_trace, replay_fixed, replay_policy
from shoal.serve.scaling.policy import ScalePolicy
from shoal.serve.spec.endpoint import DEFAULT_OBJECTIVE_S
from shoal.serve.spec.scale import ScaleSpec

DEFAULT_MAX = 4
DEFAULT_START_S = 6.0  # a replica of a small model on a processor (benchmarks/serving/autoscaling.py)
MAX_PERIODS_S = 10_000_000.0  # four months


def replay_trace(
    path: Path,
    measured: Sequence[tuple[int, float]],
    max_batch: int,
    replicas: int | None,
    deadline_s: float | None,
    scale_overrides: Iterable[str],
    start_s: float | None,
    as_json: bool,
) -> None:
    """Print the replay of a trace with `scale` and with fixed numbers of replicas: the given one, or 1 to its maximum.

    Raises ConfigError for a `scale` or a trace that does not fit.
    """
    overrides = [f"scale.{each}" for each in scale_overrides]
    spec = _Scaled(scale=ScaleSpec(max=replicas or DEFAULT_MAX)).override(overrides).scale
    objective_s = spec.objective_s or deadline_s or DEFAULT_OBJECTIVE_S
    arrivals_s = read_trace(path)
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    if span_s > MAX_PERIODS_S:
        problem = f"spans {span_s / 86400:,.0f} days, and a simulation at most {MAX_PERIODS_S / 86400:,.0f}"
        raise DataError("trace", str(path), problem, "give a part of it; times are in seconds")
    seconds = ForwardTime(measured).tabulate(max_batch)
    policy = ScalePolicy(spec, objective_s)
    scaled = replay_policy(
        arrivals_s,
        policy,
        seconds,
        objective_s,
        start_s=DEFAULT_START_S if start_s is None else start_s,
        initial=spec.min,
    )
    fixed_numbers = range(1, spec.max + 1) if replicas is None else (replicas,)
    found = {"scale": scaled} | {
        str(number): replay_fixed(arrivals_s, number, seconds, objective_s) for number in fixed_numbers
    }
    if as_json:
        print_json({"objective_s": objective_s, "requests": len(arrivals_s), "span_s": span_s,
                    "replays": {name: _to_json(each) for name, each in found.items()}})  # fmt: skip
        return
    headings = ("replicas", "replica-hours", f"within {objective_s:g} s", "p50", "p99", "rejected")
    rows = (
        (
            f"{spec.min} to {spec.max}, by load" if name == "scale" else name,
            f"{each.replica_s / 3600:,.2f}",
            f"{each.within:.2%}",
            *("-" if math.isnan(at) else f"{at * 1000:.4g} ms" for at in (each.p50_s, each.p99_s)),
            f"{each.rejected / each.requests:.1%}",
        )
        for name, each in found.items()
    )
    Console(highlight=False).print(make_table(*(Column(each, justify="right") for each in headings), rows=rows))
    click.echo(f"{len(arrivals_s):,} requests in {span_s / 3600:,.1f} hours; parsing and sending take more time")


def _to_json(found: ReplayedTrace) -> dict[str, object]:
    values = asdict(found)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


class _Scaled(Spec):
    scale: ScaleSpec
