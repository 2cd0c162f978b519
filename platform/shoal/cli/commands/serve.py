"""`shoal serve`: endpoints of registered and live models, from the first version to the last.

Parse, call, print. Endpoints are found in the run record and called over HTTP with the access token; `serve_deploy` has
`deploy` and `delete`, `serve_display` renders a status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import click
import msgspec
from rich.live import Live

from shoal.cli.commands.serve_deploy import delete, deploy, find_remote_endpoint, list_jobs_by_endpoint
from shoal.cli.display import serve_display
from shoal.cli.support.console import make_literal_console
from shoal.cli.support.endpoint_logs import EndpointLogs
from shoal.cli.support.jobs import follow_output
from shoal.cli.support.options import EndpointName, FiniteRange, ModelName, Percent, Positive, Seconds, Texts, ca_option
from shoal.cli.support.verbs import AsJson, CommandGroup
from shoal.client.discovery import FoundEndpoint, find_endpoint, list_endpoints
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.cluster.attach import find_cluster
from shoal.config import parse_overrides
from shoal.errors import ClusterError, ConfigError, ConnectionLost, InferenceError, RunError
from shoal.registry import split_ref
from shoal.runs.waits import WaitReporter
from shoal.serve.spec.model_options import ModelOptions

CALL_OPTIONS: dict[str, Any] = {"timeout_s": 5.0, "num_retries": 2}
INTERVAL_S = 1.0  # between two updates of a status
Reason = Annotated[str, "For the record."]


@click.group(cls=CommandGroup)
def serve() -> None:
    """Serve models: deploy, show, roll out, roll back, delete.

    A model is named NAME@3 or NAME@champion, as `shoal models` shows them.

    \b
    Examples:
      shoal serve deploy fashion@champion
      shoal serve status
      shoal serve canary fashion@4 --percent 10
      shoal serve delete
    """


for verb in (deploy, delete):
    serve.add_command(verb)


# -- looking ----------------------------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    """An endpoint and its status, or why there is none."""

    found: FoundEndpoint
    status: EndpointStatus
    problem: str = ""


def _show_status(shown: _Reading | list[_Reading] | None) -> object:
    if isinstance(shown, list):
        return (
            f"{found.name}: {problem}, at {found.url}" if problem else serve_display.format_summary(now, found.url)
            for found, now, problem in shown
        )
    draw = serve_display.render if make_literal_console().is_terminal else serve_display.format_plain_lines
    return shown and draw(shown.status, shown.found.url)


def _to_documents(shown: _Reading | list[_Reading]) -> object:
    if isinstance(shown, _Reading):
        return msgspec.to_builtins(shown.status)
    return [
        {"url": found.url, **({"error": problem} if problem else msgspec.to_builtins(now))}
        for found, now, problem in shown
    ]


@serve.verb(show=_show_status, to_json=_to_documents)
@ca_option
def status(
    endpoint: Annotated[str | None, "[NAME|URL]"] = None,
    *,
    follow: Annotated[bool, "Show it repeatedly, until Ctrl-C."] = False,
    once: Annotated[bool, "Show it once; the default without --follow."] = False,
    as_json: Annotated[AsJson, "Print the status document, once."] = False,
    interval_s: Annotated[
        float | None,
        FiniteRange(min=0.1),
        "--interval-s SECONDS",
        f"Between two updates; follows.  [default: {INTERVAL_S:g}]",
    ] = None,
) -> _Reading | list[_Reading] | None:
    """Show an endpoint: its versions, their share of the requests, rates, latencies, errors.

    A table on a terminal, and a line for each version elsewhere. --follow updates it until Ctrl-C. Without a name, of
    several endpoints it shows a line each: address, state, models, replicas, owner, lifetime. docs/glossary.md says
    what the words mean.

    \b
    Examples:
      shoal serve status
      shoal serve status shop --follow
      shoal serve status http://127.0.0.1:8000 --json
    """
    if follow and (once or as_json):
        raise ConfigError("follow", True, "contradicts --once and --json, which print once", "leave one of them out")
    several = list_endpoints() if endpoint is None and not (follow or interval_s is not None) else []
    if len(several) > 1:
        return [_Reading(each, *_poll_status(each.read_status, EndpointStatus(each.name))) for each in several]
    found = find_endpoint(endpoint)
    with found.connect(**CALL_OPTIONS) as client:
        now = client.status()
        if as_json or once or not (follow or interval_s is not None):
            return _Reading(found, now)
        _watch(found.url, now, client.status, interval_s or INTERVAL_S)
    return None


@serve.verb()
def logs(
    endpoint: Annotated[str | None, "[NAME]"] = None,
    *,
    address: Annotated[str | None, "The cluster: a dashboard URL.  [default: the one that is up]"] = None,
    follow: Annotated[bool, "Go on as lines come, until Ctrl-C."] = False,
) -> Iterator[str]:
    """Show what an endpoint's job, controller and replicas print, with the name of the process before each line.

    The controller prints each change: deploy, canary, promote, rollback, lost replicas, with version, caller and
    reason. A request on which a model failed is answered with a reference, which stands beside the reason here.
    Replicas of all hosts that are up are shown, also those that have ended.

    \b
    Examples:
      shoal serve logs
      shoal serve logs shop --follow
      shoal serve logs shop --address http://head.example:8265
    """
    if (cluster := find_cluster(address)) is None:
        raise ClusterError("no cluster is up here: --address names another one")
    name = endpoint or (find_endpoint().name if cluster.is_local else find_remote_endpoint(cluster, None)[0])
    job = list_jobs_by_endpoint(cluster).get(name)
    reader, num_lines = EndpointLogs(cluster, name, job.submission_id if job else ""), 0
    try:
        for process, line in follow_output(reader.read_new_lines, lambda: not follow, INTERVAL_S):
            yield f"{process} | {line}"
            num_lines += 1
    except KeyboardInterrupt:
        return
    if not num_lines:
        known = ", ".join({each.name for each in list_endpoints()} | list_jobs_by_endpoint(cluster).keys())
        raise RunError(f"endpoint {name} has printed nothing; of the endpoints: {known or 'none is up'}")


def _watch(url: str, now: EndpointStatus, ask: Callable[[], EndpointStatus], interval_s: float) -> None:
    """Show it until Ctrl-C, waiting for an unavailable endpoint."""
    console, trouble = make_literal_console(soft_wrap=False), ""
    try:
        if not console.is_terminal:
            while True:
                for line in [trouble] if trouble else serve_display.format_plain_lines(now, url):
                    console.print(f"{time.strftime('%H:%M:%S')} {line}")
                time.sleep(interval_s)
                now, trouble = _poll_status(ask, now)
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                at = time.strftime("%H:%M:%S", time.localtime(now.time))
                note = f"this is how it was at {at}: {trouble}" if trouble else ""
                live.update(serve_display.render(now, url, note), refresh=True)
                time.sleep(interval_s)
                now, trouble = _poll_status(ask, now)
    except KeyboardInterrupt:
        return


def _poll_status(ask: Callable[[], EndpointStatus], before: EndpointStatus) -> tuple[EndpointStatus, str]:
    """The present status, or the previous one and the reason why there is no newer."""
    try:
        return ask(), ""
    except (ConnectionLost, InferenceError) as error:
        return before, str(error)


# -- rolling out ------------------------------------------------------------------------------------------------------


def _roll_out(action: str, model: str, endpoint: str | None, **options: Any) -> str:
    """Change which versions of a model answer; the endpoint resolves an alias, or the word for none at all."""
    name, word = split_ref(model)
    with WaitReporter(f"{action} of {name}"), find_endpoint(endpoint, name).connect(**CALL_OPTIONS) as client:
        return _format_model(client.rollout(action, name, version=word or None, **options))


@serve.verb()
@ca_option
def canary(
    model: ModelName, *, percent: Annotated[Percent, "Of its requests."] = 10.0, endpoint: EndpointName = None
) -> str:
    """Send a part of a model's requests to a version, alongside the stable one.

    Every replica loads it before its first request. It is rolled back automatically when it fails more often, or is
    slower, than the model's guard allows. Clients that send a track or a sticky key stay on their side.

    A model that follows the weights of a run stays at the answering version, and its candidate is always the run's
    newest, until it is promoted or rolled back.

    \b
    Examples:
      shoal serve canary fashion@4
      shoal serve canary fashion@candidate --percent 50
      shoal serve canary fashion@4 --percent 0        only for clients that ask for track "candidate"
      shoal serve canary fashion --percent 20         another share for the present candidate
      shoal serve canary cartpole                     the run's newest weights
    """
    return _roll_out("canary", model, endpoint, percent=percent)


@serve.verb()
@ca_option
def promote(model: ModelName, *, endpoint: EndpointName = None) -> str:
    """Let the candidate, or this version, answer all requests of a model.

    No request fails, and none is answered by a mixture: every replica loads the version before the first uses it. A
    model that follows the weights of a run, and was rolled back or has a canary, follows them again.

    \b
    Examples:
      shoal serve promote fashion
      shoal serve promote fashion@4
      shoal serve promote cartpole                    the run's newest weights, and all later ones
    """
    return _roll_out("promote", model, endpoint)


@serve.verb("set")
@ca_option
def set_options(
    model: Annotated[str, "NAME"],
    overrides: Annotated[Texts, "A.B=C..."],
    *,
    reason: Reason = "",
    timeout_s: Annotated[Seconds, "How long to wait for every replica."] = 120.0,
    endpoint: EndpointName = None,
) -> str:
    """Change options of a model that is served (docs/serving-models.md explains them).

    Every replica loads its version once more, with the new options, while the present one answers. Then all of them
    switch, or none if one cannot. No request fails.

    \b
    Examples:
      shoal serve set fashion deadline_s=0.1
      shoal serve set fashion max_batch_size=16 precision=bf16 --reason "latency"
      shoal serve set fashion guard.max_latency_ratio=3
    """
    options = parse_overrides(ModelOptions, overrides)
    return _roll_out("set", _parse_name(model), endpoint, options=options, reason=reason or None, timeout_s=timeout_s)


@serve.verb()
@ca_option
def rollback(
    model: Annotated[str, "NAME"],
    *,
    to: Annotated[Positive | None, "--to VERSION", "A retained version of a live model."] = None,
    rejected: Annotated[Positive | None, "--from VERSION", "The version to leave.  [default: the present one]"] = None,
    reason: Reason = "",
    endpoint: EndpointName = None,
) -> Iterator[str]:
    """End a canary or a shadow; without one, return to the previous version, or the alias's previous version.

    A model that follows the weights of a run returns to the version before the answering one, or to that of --to
    (`status` shows the retained ones), and stays there until it is promoted. Its canary ends like any other.

    Nothing changes if the version to leave is not the answering one.

    \b
    Examples:
      shoal serve rollback fashion
      shoal serve rollback fashion --from 4
      shoal serve rollback fashion --reason "complaints about shoes"
      shoal serve rollback cartpole --to 412
    """
    name = _parse_name(model)
    with find_endpoint(endpoint, name).connect(**CALL_OPTIONS) as client:
        models = {model.name: model for model in client.status().models}
        before = models.get(name, ModelStatus(name))
        if not to:  # None for a model that chooses by itself, or an unknown one
            pinned = before.pinned if before.newest_percent is None else 0
            rejected = rejected or before.candidate or before.stable or pinned or None
        now = client.rollout("rollback", name, version=to, from_version=rejected, reason=reason or None)
    yield _format_model(now)
    if before.candidate and now.stable != before.stable:
        yield f"{now.source} had come to mean version {now.stable}, which is followed now"


@serve.verb()
@ca_option
def shadow(
    model: ModelName, *, percent: Annotated[Percent, "Of its requests."] = 100.0, endpoint: EndpointName = None
) -> str:
    """Send requests to a version as well, and count how often its outputs differ; clients never get its answers.

    \b
    Examples:
      shoal serve shadow fashion@4
      shoal serve shadow fashion@4 --percent 20
      shoal serve shadow fashion@4 --percent 0        ends it
      shoal serve shadow cartpole                     the run's newest weights, alongside the answering ones
    """
    return _roll_out("shadow", model, endpoint, percent=percent)


def _parse_name(ref: str) -> str:
    name, word = split_ref(ref)
    if word:
        raise ConfigError("model", ref, "names a version, where the whole model is meant", f"write {name}")
    return name


def _format_model(model: ModelStatus) -> str:
    return f"{model.name}: {serve_display.format_shares(model)}"
