"""`shoal serve`: endpoints of registered and live models, from the first version to the last.

Parse, call, print. Endpoints are found in the run record and called over HTTP with the access token; `serve_deploy` has
`deploy` and `delete`, `serve_display` renders a status.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.live import Live

from shoal.cli.commands.serve_deploy import delete, deploy, find_remote_endpoint, list_jobs_by_endpoint
from shoal.cli.display import serve_display
from shoal.cli.support.console import ExtensibleCommandGroup, make_literal_console, print_json
from shoal.cli.support.endpoint_logs import EndpointLogs
from shoal.cli.support.options import PERCENT, SECONDS, FiniteRange, ca_option, endpoint_option
from shoal.client import Client
from shoal.client.discovery import FoundEndpoint, find_endpoint, list_endpoints, token_for
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.cluster.attach import find_cluster
from shoal.config import parse_overrides
from shoal.errors import ClusterError, ConfigError, ConnectionLost, InferenceError, RunError
from shoal.registry import split_ref
from shoal.serve.spec.model_options import ModelOptions

STATUS_TIMEOUT_S = 5.0
INTERVAL_S = 1.0  # between two updates of a status
NUM_RETRIES = 2


@click.group(cls=ExtensibleCommandGroup)
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


@contextmanager
def connect_client(endpoint: str | None, model: str = "") -> Iterator[tuple[FoundEndpoint, Client]]:
    """The requested endpoint, or the one that serves the model, and a client for it."""
    target = find_endpoint(endpoint, model)
    with Client(target.url, token=token_for(target.url), timeout_s=STATUS_TIMEOUT_S, num_retries=NUM_RETRIES) as client:
        yield target, client


# -- looking ----------------------------------------------------------------------------------------------------------


@serve.command()
@click.argument("endpoint", required=False, metavar="[NAME|URL]")
@ca_option
@click.option("--follow", is_flag=True, help="Show it repeatedly, until Ctrl-C.")
@click.option("--once", is_flag=True, help="Show it once; the default without --follow.")
@click.option("--json", "as_json", is_flag=True, help="Print the status document, once.")
@click.option(
    "--interval-s",
    type=FiniteRange(min=0.1),
    metavar="SECONDS",
    help=f"Between two updates; follows.  [default: {INTERVAL_S:g}]",
)
def status(endpoint: str | None, follow: bool, once: bool, as_json: bool, interval_s: float | None) -> None:
    """Show an endpoint: its versions, their share of the requests, rates, latencies, errors.

    A table on a terminal, and a line for each version elsewhere. --follow updates it until Ctrl-C. Without a name, of
    several endpoints it shows a line each: address, state, models, replicas, owner, lifetime.

    \b
    Examples:
      shoal serve status
      shoal serve status shop --follow
      shoal serve status http://127.0.0.1:8000 --json
    """
    if follow and (once or as_json):
        raise ConfigError("follow", True, "contradicts --once and --json, which print once", "leave one of them out")
    console = make_literal_console(soft_wrap=not sys.stdout.isatty())
    several = list_endpoints() if endpoint is None and not (follow or interval_s is not None) else []
    if len(several) > 1:
        _print_all(console, several, as_json)
        return
    with connect_client(endpoint) as (found, client):
        now = client.status()
        if as_json:
            print_json(msgspec.to_builtins(now))
        elif not once and (follow or interval_s is not None):
            _watch(console, found.url, now, client.status, interval_s or INTERVAL_S)
        elif console.is_terminal:
            console.print(serve_display.render(now, found.url))
        else:
            console.print("\n".join(serve_display.format_plain_lines(now, found.url)))


@serve.command()
@click.argument("endpoint", required=False, metavar="[NAME]")
@click.option("--address", help="The cluster: a dashboard URL.  [default: the one that is up]")
@click.option("--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
def logs(endpoint: str | None, address: str | None, follow: bool) -> None:
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
        while True:
            for process, line in reader.read_new_lines(is_over=not follow):
                click.echo(f"{process} | {line}")
                num_lines += 1
            if not follow:
                break
            time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return
    if not num_lines:
        known = ", ".join({each.name for each in list_endpoints()} | list_jobs_by_endpoint(cluster).keys())
        raise RunError(f"endpoint {name} has printed nothing; of the endpoints: {known or 'none is up'}")


def _print_all(console: Console, endpoints: Sequence[FoundEndpoint], as_json: bool) -> None:
    """Print each endpoint's document, or a line for it; one that does not answer has its error there."""
    documents: list[dict[str, object]] = []
    for found in endpoints:
        with Client(found.url, token=token_for(found.url), timeout_s=STATUS_TIMEOUT_S, num_retries=0) as client:
            now, trouble = _poll_status(client.status, EndpointStatus(found.name))
        documents.append({"url": found.url, **(msgspec.to_builtins(now) if not trouble else {"error": trouble})})
        if not as_json:
            line = serve_display.format_summary(now, found.url)
            console.print(f"{found.name}: {trouble}, at {found.url}" if trouble else line)
    if as_json:
        print_json(documents)


def _watch(
    console: Console, url: str, now: EndpointStatus, ask: Callable[[], EndpointStatus], interval_s: float
) -> None:
    """Show it until Ctrl-C, waiting for an unavailable endpoint."""
    trouble = ""
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


@serve.command()
@click.argument("model", metavar="NAME[@VERSION]")
@click.option("--percent", type=PERCENT, default=10.0, show_default=True, help="Of its requests.")
@endpoint_option
@ca_option
def canary(model: str, percent: float, endpoint: str | None) -> None:
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
    name, version = _parse_candidate(model)
    with connect_client(endpoint, name) as (_, client):
        _print_shares(client.rollout("canary", name, version=version, percent=percent))


@serve.command()
@click.argument("model", metavar="NAME[@VERSION]")
@endpoint_option
@ca_option
def promote(model: str, endpoint: str | None) -> None:
    """Let the candidate, or this version, answer all requests of a model.

    No request fails, and none is answered by a mixture: every replica loads the version before the first uses it. A
    model that follows the weights of a run, and was rolled back or has a canary, follows them again.

    \b
    Examples:
      shoal serve promote fashion
      shoal serve promote fashion@4
      shoal serve promote cartpole                    the run's newest weights, and all later ones
    """
    name, version = _parse_candidate(model)
    with connect_client(endpoint, name) as (_, client):
        _print_shares(client.rollout("promote", name, version=version))


@serve.command("set")
@click.argument("model", metavar="NAME")
@click.argument("overrides", nargs=-1, required=True, metavar="A.B=C...")
@click.option("--reason", default="", help="For the record.")
@click.option("--timeout-s", type=SECONDS, default=120.0, show_default=True, help="How long to wait for every replica.")
@endpoint_option
@ca_option
def set_options(model: str, overrides: tuple[str, ...], reason: str, timeout_s: float, endpoint: str | None) -> None:
    """Change options of a model that is served (docs/serving-models.md explains them).

    Every replica loads its version once more, with the new options, while the present one answers. Then all of them
    switch, or none if one cannot. No request fails.

    \b
    Examples:
      shoal serve set fashion deadline_s=0.1
      shoal serve set fashion max_batch_size=16 precision=bf16 --reason "latency"
      shoal serve set fashion guard.max_latency_ratio=3
    """
    name, options = _parse_name(model), parse_overrides(ModelOptions, overrides)
    with connect_client(endpoint, name) as (_, client):
        _print_shares(client.rollout("set", name, options=options, reason=reason or None, timeout_s=timeout_s))


@serve.command()
@click.argument("model", metavar="NAME")
@click.option("--to", type=click.IntRange(min=1), metavar="VERSION", help="A retained version of a live model.")
@click.option(
    "--from",
    "rejected",
    type=click.IntRange(min=1),
    metavar="VERSION",
    help="The version to leave.  [default: the present one]",
)
@click.option("--reason", default="", help="For the record.")
@endpoint_option
@ca_option
def rollback(model: str, to: int | None, rejected: int | None, reason: str, endpoint: str | None) -> None:
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
    with connect_client(endpoint, name) as (_, client):
        models = {model.name: model for model in client.status().models}
        before = models.get(name, ModelStatus(name))
        if not to:  # None for a model that chooses by itself, or an unknown one
            pinned = before.pinned if before.newest_percent is None else 0
            rejected = rejected or before.candidate or before.stable or pinned or None
        now = client.rollout("rollback", name, version=to, from_version=rejected, reason=reason or None)
        _print_shares(now)
        if before.candidate and now.stable != before.stable:
            click.echo(f"{now.source} had come to mean version {now.stable}, which is followed now")


@serve.command()
@click.argument("model", metavar="NAME[@VERSION]")
@click.option("--percent", type=PERCENT, default=100.0, show_default=True, help="Of its requests.")
@endpoint_option
@ca_option
def shadow(model: str, percent: float, endpoint: str | None) -> None:
    """Send requests to a version as well, and count how often its outputs differ; clients never get its answers.

    \b
    Examples:
      shoal serve shadow fashion@4
      shoal serve shadow fashion@4 --percent 20
      shoal serve shadow fashion@4 --percent 0        ends it
      shoal serve shadow cartpole                     the run's newest weights, alongside the answering ones
    """
    name, version = _parse_candidate(model)
    with connect_client(endpoint, name) as (_, client):
        _print_shares(client.rollout("shadow", name, version=version, percent=percent))


def _parse_candidate(ref: str) -> tuple[str, str | None]:
    """Name, and number or alias, of a version; the endpoint resolves the alias, or none at all."""
    name, word = split_ref(ref)
    return name, word or None


def _parse_name(ref: str) -> str:
    name, word = split_ref(ref)
    if word:
        raise ConfigError("model", ref, "names a version, where the whole model is meant", f"write {name}")
    return name


def _print_shares(model: ModelStatus) -> None:
    click.echo(f"{model.name}: {serve_display.format_shares(model)}")
