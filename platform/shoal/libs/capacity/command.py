"""`shoal serve simulate`: the latency of a model under a load, computed from its forward times.

Parse, call, print. The forward times are measured by a live endpoint, or given.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import click
from rich.table import Column, Table

from shoal.batching.latency_model import ForwardTime
from shoal.client import ModelStatus
from shoal.client.discovery import find_endpoint
from shoal.errors import ConfigError
from shoal.extend.cli import (
    PRINTED,
    EndpointName,
    FiniteRange,
    Printed,
    Seconds,
    ca_option,
    make_table,
    verb,
)
from shoal.extend.serve import MAX_REPLICAS
from shoal.libs.capacity.simulation import LoadResult, simulate

DEFAULT_MAX_BATCH = 64  # that of ModelOptions
MAX_REQUESTS = 20_000_000  # half a minute of simulation, and a gigabyte
LOADS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95)  # of the capacity, without --rate


@verb("simulate", **PRINTED, work="simulating")
@ca_option
def simulate_verb(
    model: Annotated[str | None, "[NAME]"] = None,
    *,
    latency: Annotated[str | None, "--latency ROWS:SECONDS,...", "Forward times, instead of a live model's."] = None,
    rates: Annotated[tuple[float, ...], "--rate", FiniteRange(min=0, min_open=True), "Requests/s."] = (),
    deadline_s: Annotated[Seconds | None, "--deadline", "Of each request, seconds."] = None,
    max_batch: Annotated[
        int | None, click.IntRange(1, 1_000_000), "Rows of a forward at most.  [default: the model's, or 64]"
    ] = None,
    replicas: Annotated[
        int | None, click.IntRange(1, MAX_REPLICAS), "Replicas.  [default: the endpoint's, or 1]"
    ] = None,
    requests: Annotated[int, click.IntRange(100, MAX_REQUESTS), "To simulate."] = 20_000,
    endpoint: EndpointName = None,
) -> Printed:
    """Show the latency of requests at a rate, computed from the model's forward times.

    The batcher's own scheduler runs on a simulated clock with Poisson arrivals of one row each; parsing and network
    are not included. Without --rate: from a quarter of the model's capacity to nearly all of it.

    \b
    Examples:
      shoal serve simulate fashion --rate 500 --rate 2000
      shoal serve simulate fashion --rate 5000 --deadline 0.05 --replicas 2
      shoal serve simulate --latency 1:0.0205,32:0.036 --max-batch 32 --rate 200 --deadline 0.1
    """
    if (model is None) == (latency is None):
        raise ConfigError("model", model, "one of a model and --latency is needed", "name one of both")
    if latency is not None:
        points = _parse_latency(latency)
        most = max_batch or DEFAULT_MAX_BATCH
        count = replicas or 1
    else:
        status, num_replicas = _fetch_model_status(str(model), endpoint)
        points, most = status.latency, max_batch or status.max_batch_rows
        count, deadline_s = replicas or num_replicas, deadline_s or status.deadline_s
    capacity_per_s = ForwardTime(points).capacity_per_s(most) * count
    loads = [
        (rate, simulate(points, rate / count, max_batch_rows=most, deadline_s=deadline_s, num_requests=requests))
        for rate in rates or tuple(capacity_per_s * share for share in LOADS)
    ]
    rows = [  # of all replicas together
        asdict(load) | {"requests_per_s": rate, "goodput_per_s": load.goodput_per_s * count} for rate, load in loads
    ]
    plural = "replicas" if count > 1 else "replica"
    capacity = f"forwards of {count} {plural} take {capacity_per_s:,.0f} requests/s, in batches of up to {most}"
    lines: list[object] = [
        _make_table(loads, count, deadline_s),
        f"{capacity}; what parsing and sending take comes on top",
    ]
    if (largest := max(rows for rows, _ in points)) < most:
        lines.append(f"forwards were measured up to {largest} rows: what larger batches take is a guess")
    return Printed(lines, {"capacity_per_s": capacity_per_s, "replicas": count, "loads": rows})


def _parse_latency(latency: str) -> list[tuple[int, float]]:
    """`1:0.02,32:0.036`."""
    try:
        pairs = [point.split(":") for point in latency.split(",")]
        points = [(int(rows), float(seconds)) for rows, seconds in pairs]
    except ValueError:
        raise ConfigError("latency", latency, "is not ROWS:SECONDS,...", "for example 1:0.0205,32:0.036") from None
    if any(rows < 1 or not 0 < seconds < math.inf for rows, seconds in points):
        raise ConfigError("latency", latency, "rows and seconds must be above zero, and finite")
    if len(dict(points)) < len(points):
        raise ConfigError("latency", latency, "has a number of rows twice", "give each once")
    return points


def _fetch_model_status(model: str, endpoint: str | None) -> tuple[ModelStatus, int]:
    """The model's status and the number of replicas. Raises ConfigError for a model without measurements."""
    address = find_endpoint(endpoint, model)
    status = address.read_status()
    models = {each.name: each for each in status.models}
    if model not in models:
        raise ConfigError("model", model, f"is not served by {address.name}", f"models: {', '.join(models)}")
    if not models[model].latency:
        remedy = f"send it requests (shoal predict {model} ...), or say --latency"
        raise ConfigError("model", model, "has no measured forward yet", remedy)
    return models[model], max(1, len(status.replicas))


def _make_table(loads: list[tuple[float, LoadResult]], replicas: int, deadline_s: float | None) -> Table:
    in_time = "answered/s" if deadline_s is None else f"within {deadline_s:g} s"
    headings = ("requests/s", "p50", "p90", "p99", in_time, "refused", "busy", "batch")
    rows = (
        (
            f"{rate:,.0f}",
            *("-" if math.isnan(each) else f"{each * 1000:.4g} ms" for each in (load.p50_s, load.p90_s, load.p99_s)),
            f"{load.goodput_per_s * replicas:,.0f}",
            f"{load.refused / load.requests:.1%}",
            f"{load.utilisation:.0%}",
            "-" if math.isnan(load.mean_batch_rows) else f"{load.mean_batch_rows:.1f}",
        )
        for rate, load in loads
    )
    return make_table(*(Column(heading, justify="right") for heading in headings), rows=rows)
