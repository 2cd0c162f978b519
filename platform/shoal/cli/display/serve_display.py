"""The display of an endpoint: one picture on a terminal, plain lines elsewhere.

Reads only the endpoint's status document. Called by `shoal serve`; `render` and `format_plain_lines` are pure functions
of the document.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column
from rich.text import Text

from shoal.cli.support.console import make_number_column, make_table
from shoal.client.endpoint_status import (
    EndpointStatus,
    ModelStatus,
    ReplicaStatus,
    ResidencyStatus,
    RolloutEvent,
    VersionStatus,
)
from shoal.cost.cost_table import format_quantity
from shoal.runs.formatting import format_duration, format_number, format_size

NUM_EVENTS = 4
NUM_COLUMNS = 6  # of a table, with values that training has not seen
LIVE = "live"  # the phase of a model that follows the weights of a run
_TRACKS = {"stable": "green", "candidate": "yellow", "shadow": "magenta"}
_NUMBERS: dict[str, Callable[[VersionStatus], str]] = {  # of a version; the table has 80 columns with its margins
    "share": lambda version: _format_share(version.share),
    "req/s": lambda version: format_number(version.requests_per_s),
    "p50": lambda version: _format_seconds(version.p50_s),
    "p99": lambda version: _format_seconds(version.p99_s),
    "errors": lambda version: (
        f"{version.errors / version.requests:.2%}" if version.errors and version.requests else f"{version.errors}"
    ),
    "differ": lambda version: (
        f"{version.disagreed / version.compared:.2%}" if version.compared and version.track != "stable" else "-"
    ),
}


def render(status: EndpointStatus, url: str, note: str = "") -> RenderableType:
    """The picture for a terminal; `note` reports a problem with it, such as its age."""
    replicas = Text.assemble(("replicas  ", "dim"), _format_ready_count(status))
    replicas.append(f", generation {status.generation}", "dim")
    for each in _find_unhealthy(status):
        replicas.append(f"\n          {each.id} {_format_replica_state(each, status.generation)}", "yellow")
    parts: list[RenderableType] = [
        _render_versions(status),
        *(_render_model(model) for model in status.models),
        replicas,
        *(
            Text(f"certificate  {text}", "yellow" if number else "dim")
            for number, text in enumerate(_describe_certificate(status))
        ),
    ]
    parts += [_render_event(event, status.time) for event in status.events[-NUM_EVENTS:]]
    if note:
        parts.append(Text(note, style="red"))
    state = ("asleep", "blue") if status.asleep else ("ready", "green") if status.ready else ("not ready", "yellow")
    up = f"  up {format_duration(status.time - status.started_at)}" if status.started_at else ""
    where = (f"  {_format_address(status, url)}{up}", "dim")
    title = Text.assemble((status.endpoint, "bold"), "  ", state, where)
    window = Text(f"rates and times: the last {status.window_s:g} s", "dim") if status.window_s else None
    return Panel(Group(*parts), title=title, title_align="left", subtitle=window, border_style="cyan", padding=(0, 1))


def format_plain_lines(status: EndpointStatus, url: str) -> list[str]:
    """List lines for a log: one for the endpoint, for each version of each model, and for each unusual state."""
    at = f"{_format_state(status)} at {_format_address(status, url)}"
    lines = [f"{status.endpoint}: {at}, replicas {_format_ready_count(status)}"]
    for model in status.models:
        for version in model.versions:
            numbers = {
                **{name.replace("req/", "requests/"): each(version) for name, each in _NUMBERS.items()},
                "batch": _format_batch(model),
                "queue": f"{model.queued_rows}/{model.max_queued_rows}",
                "refused": f"{model.refused}",
            }
            facts = ", ".join([f"{name} {number}" for name, number in numbers.items()] + _format_following(model))
            lines.append(f"{model.name}@{version.version} {version.track or 'loaded'}: {facts}")
            if drift := _format_drift(version):
                lines.append(f"{model.name}@{version.version}: gaps, and what training has not seen: {drift}")
        if model.requests:
            lines.append(f"{model.name}: {_format_totals(model)}")
        if model.residency is not None:
            lines.append(f"{model.name}: {_format_residency(model.residency)}")
        if model.metrics:
            lines.append(f"{model.name}: {_format_metrics(model)}")
        if (not model.versions and model.residency is None) or model.state != "READY" or model.reason:
            lines.append(f"{model.name}: {_format_model_state(model)}")
        if model.last_failure:
            lines.append(f"{model.name}: a request failed: {model.last_failure}")
    lines += [f"certificate: {text}" for text in _describe_certificate(status)]
    if lost := next((each for each in reversed(status.events) if each.kind == "replica_lost"), None):
        lines.append(f"a replica was lost at {time.strftime('%H:%M:%S', time.localtime(lost.time))}: {lost.reason}")
    lines += [
        f"replica {each.id}: {_format_replica_state(each, status.generation)}" for each in _find_unhealthy(status)
    ]
    return lines


def _format_model_state(model: ModelStatus) -> str:
    return "; ".join(filter(None, (model.state.lower(), model.reason)))


def format_summary(status: EndpointStatus, url: str) -> str:
    """One line, for a list of several endpoints."""
    models = ", ".join(
        f"{each.name}@{each.stable}" if each.stable else each.name for each in status.models if each.name
    )
    parts = [f"{status.endpoint}: {_format_state(status)} at {_format_address(status, url)}"]
    parts += [f"models {models or 'none'}", f"replicas {_format_ready_count(status)}"]
    parts += [f"up {format_duration(status.time - status.started_at)}"] if status.started_at else []
    parts += [f"of {status.owner}"] if status.owner else []
    return ", ".join([*parts, *([status.lifetime] if status.lifetime == "detached" else [])])


def _format_state(status: EndpointStatus) -> str:
    return "asleep" if status.asleep else "ready" if status.ready else "not ready"


def _describe_certificate(status: EndpointStatus) -> list[str]:
    """How long the certificate of the ingress is valid, and why its replacement is not used."""
    if status.certificate is None:
        return []
    validity = (
        f"{status.certificate.days_remaining:.0f} days left" if status.certificate.days_remaining > 0 else "has expired"
    )
    problem = status.certificate.problem
    return [validity, f"the replacement is not used: {problem}"] if problem else [validity]


def _format_address(status: EndpointStatus, url: str) -> str:
    return f"{url}, gRPC at {status.grpc}" if status.grpc else url


def format_shares(model: ModelStatus) -> str:
    """Which versions answer, in one line: `90% by 3 (stable), 10% by 4 (candidate)`."""
    parts = [
        f"{'shadowed' if each.track == 'shadow' else _format_share(each.share)} by {each.version} ({each.track})"
        for each in sorted(model.versions, key=_sort_key)
        if each.track
    ]
    parts += _format_following(model) if model.phase == LIVE else []
    return ", ".join(parts) or _format_model_state(model)


def _render_versions(status: EndpointStatus) -> RenderableType:
    words = (Column(name, no_wrap=True) for name in ("model", "version"))
    table = make_table(*words, *map(make_number_column, _NUMBERS))
    for model in status.models:
        if not model.versions:
            is_cold = model.state == "READY" and model.residency is not None
            state = Text("cold", "blue") if is_cold else Text(model.state.lower(), "yellow")
            table.add_row(Text(model.name, "bold"), state)
        for index, version in enumerate(sorted(model.versions, key=_sort_key)):
            track = Text.assemble(f"{version.version} ", (version.track or "loaded", _TRACKS.get(version.track, "dim")))
            numbers = {name: Text(each(version)) for name, each in _NUMBERS.items()}
            if version.errors:
                numbers["errors"].style = "red"
            table.add_row(Text(model.name, "bold") if index == 0 else "", track, *numbers.values())
    return table


def _sort_key(version: VersionStatus) -> tuple[int, int]:
    tracks = [*_TRACKS, ""]
    return (tracks.index(version.track) if version.track in tracks else len(tracks), -version.version)


def _render_model(model: ModelStatus) -> RenderableType:
    """The facts that the versions of a model share."""
    facts = [_format_totals(model)] if model.requests else []
    facts += [f"queue {model.queued_rows}/{model.max_queued_rows}", f"refused {model.refused:,}"]
    facts += [f"batches of {_format_batch(model)}"] if model.batch_rows is not None else []
    if model.latency:
        (first, first_s), (last, last_s) = model.latency[0], model.latency[-1]
        forward = f"a forward of {first} takes {_format_seconds(first_s)}"
        facts.append(forward if first == last else f"{forward}, of {last} {_format_seconds(last_s)}")
    facts += _format_following(model)
    facts += [] if model.residency is None else [_format_residency(model.residency)]
    text = Text.assemble((f"{model.name}  ", "dim bold"), (", ".join(facts), "dim"))
    if model.metrics:
        text.append(f"\n{model.name}  {_format_metrics(model)}", "dim")
    for version in model.versions:
        if drift := _format_drift(version):
            text.append(f"\n{model.name}@{version.version}  gaps, and what training has not seen: {drift}", "dim")
    problems = [model.reason, f"a request failed: {model.last_failure}" if model.last_failure else ""]
    for problem in filter(None, problems):
        text.append(f"\n{model.name}  {problem}", "yellow")
    return text


def _format_totals(model: ModelStatus) -> str:
    """What it has answered: `1,200 requests, 3 errors, 4,800 rows since the deployment`."""
    return f"{model.requests:,} requests, {model.errors:,} errors, {model.rows:,} rows since the deployment"


def _format_residency(residency: ResidencyStatus) -> str:
    """Where a model is that is loaded on demand: `resident on 1 replica (12.0 MiB), 3 loads of 0.21 s, 2 evictions`."""
    replicas = f"{residency.replicas} replica{'s' if residency.replicas > 1 else ''}"
    where = f"resident on {replicas} ({format_size(residency.resident_bytes)})" if residency.replicas else "cold"
    each = "" if residency.load_s is None else f" of {residency.load_s:.2f} s"
    waiting = f", {residency.waiting} requests wait" if residency.waiting else ""
    return f"{where}, {residency.loads} loads{each}, {residency.evictions} evictions{waiting}"


def _format_metrics(model: ModelStatus) -> str:
    """What libraries count: `tokens written 133/s, time between two tokens of an answer 7 ms (p99 23 ms)`."""
    facts = []
    for metric in model.metrics.values():
        times = f"{_format_seconds(metric.p50_s)} (p99 {_format_seconds(metric.p99_s)})"
        facts.append(f"{metric.help.lower()} {times if metric.per_s is None else f'{format_number(metric.per_s)}/s'}")
    return ", ".join(facts)


def _format_drift(version: VersionStatus) -> str:
    """The columns with most values that training has not seen: `plan 12 unknown, age 3 beyond`."""
    counts = [(count, f"{name} {count:,} {what}") for name, sorts in version.columns.items()
              for what, count in sorts.items()]  # fmt: skip
    return ", ".join(text for _, text in sorted(counts, reverse=True)[:NUM_COLUMNS])


def _format_following(model: ModelStatus) -> list[str]:
    if model.pinned:
        beside = "" if model.newest_percent is None else ", beside its newest"
        return [f"pinned at version {model.pinned} of {model.source}{beside}"]
    if model.phase == LIVE:
        return [f"follows {model.source}"]
    return [describe_following(model.source, model.stable)] if model.source and model.stable else []


def describe_following(source: str, version: int) -> str:
    """What a registered model does when an alias moves or another version is registered; `source`: as deployed."""
    word = source.partition("@")[2]
    if word and not word.isdigit():
        return f"follows {source}, now version {version}" + (", the newest" if word == "latest" else "")
    return f"stays at version {version}"


def _format_ready_count(status: EndpointStatus) -> str:
    hosts = {each.host for each in status.replicas if each.host}
    on = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    wanted = max(len(status.replicas), status.num_replicas)
    if status.asleep:
        return "none until the next request"
    more = f"; {status.wanted}" if status.wanted else ""
    return f"{sum(each.ready for each in status.replicas)} of {wanted} ready{on}{more}"


def _find_unhealthy(status: EndpointStatus) -> list[ReplicaStatus]:
    return [each for each in status.replicas if each.error or not each.ready or each.generation < status.generation]


def _format_replica_state(replica: ReplicaStatus, generation: int) -> str:
    state = "ready" if replica.ready else "not ready"
    behind = f", at generation {replica.generation}" if replica.generation < generation else ""
    return f"{state}{behind}{': ' + replica.error if replica.error else ''}"


def _render_event(event: RolloutEvent, now_s: float) -> RenderableType:
    about = f"{event.model}@{event.version}" if event.version is not None else event.model
    text = Text.assemble((time.strftime("%H:%M:%S  ", time.localtime(event.time)), "dim"), (event.kind, "bold"))
    text.append(f" {about}")
    text.append(f"  {event.reason}" if event.reason else "")
    text.append(f"  by {event.by}" if event.by else "", "dim")
    return text


def _format_share(share: float) -> str:
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.01 else f"{share:.1%}"


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_quantity(seconds, "seconds")


def _format_batch(model: ModelStatus) -> str:
    return "-" if model.batch_rows is None else f"{model.batch_rows:.1f}/{model.max_batch_rows}"
