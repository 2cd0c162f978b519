"""`shoal serve deploy` and `delete`: a job on a running cluster keeps the endpoint up.

Parse, call, print. The job is named after its run, so that the run record leads to the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import click

import shoal.runs
from shoal.cli.display.first_request import suggest_curl_command, suggest_predict_command, suggest_text_commands
from shoal.cli.display.serve_display import describe_following, format_shares
from shoal.cli.support.jobs import describe_failure, end_on_interrupt, job_environment
from shoal.cli.support.options import Seconds, Texts, ca_option
from shoal.cli.support.verbs import verb
from shoal.client.discovery import (
    GRPC_KIND,
    INFERENCE_KIND,
    STATUS_TIMEOUT_S,
    FoundEndpoint,
    find_endpoint,
    list_endpoints,
)
from shoal.cluster.attach import find_cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobHandle, JobInfo, JobStatus, list_jobs, new_submission_id, submit
from shoal.config import format_override, last_override, merge, parse_overrides
from shoal.errors import ClusterError, ConfigError, ConnectionLost, InferenceError, RunError, WeightsError
from shoal.flows.serving_spec import (
    READY,
    ServingSpec,
    check,
    check_address,
    describe_other_packages,
    read_serve_port,
    spec_from_overrides,
)
from shoal.network_address import is_loopback
from shoal.recipes import find_recipe
from shoal.registry import Registry, split_ref
from shoal.registry.verification import MAX_BYTES, find_load_error
from shoal.runs.event_messages import describe_wait
from shoal.runs.record.opening import make_run_id
from shoal.runs.record.provenance import find_owner, format_masked_command, make_command_variable, split_secrets
from shoal.serve.spec.endpoint import DETACHED, describe_taken_name
from shoal.serve.spec.reach import EVERY_NODE
from shoal.serve.spec.scale import MAX_REPLICAS

POLL_S = 0.25
ENDPOINT, LIFETIME = "shoal.endpoint", "shoal.lifetime"  # of the metadata of a job that keeps an endpoint up
MODULE, END_MODULE = "shoal.flows.serving", "shoal.flows.serving_end"
ClusterAddress = Annotated[str | None, "The cluster.  [default: $RAY_ADDRESS, else the one that `shoal up` started]"]


@verb(work="starting the endpoint")
def deploy(
    arguments: Annotated[Texts, "NAME[@VERSION]|FILE.yaml... [A.B=C]..."] = (),
    *,
    name: Annotated[str | None, "The endpoint's name.  [default: that of its first model]"] = None,
    port: Annotated[int | None, click.IntRange(0, 65535), "The port.  [default: a free port]"] = None,
    replicas: Annotated[
        int | None, click.IntRange(1, MAX_REPLICAS), "Processes, each with every model.  [default: 1]"
    ] = None,
    allow_origin: Annotated[Texts, "--allow-origin ORIGIN", "Web pages that may call it, repeated; * is all."] = (),
    into: Annotated[str | None, "--into ENDPOINT", "Add the models to a running endpoint."] = None,
    follow: Annotated[Literal["switch", "canary"] | None, "How to follow an alias that has moved."] = None,
    address: ClusterAddress = None,
    timeout_s: Annotated[Seconds, "How long to wait for the endpoint."] = 120.0,
) -> Iterator[str]:
    """Serve registered models on a running cluster; returns when they answer.

    A cluster has any number of endpoints, each with a name of its own: the first has the root of their address, each
    later one the path /NAME. An endpoint stays until `shoal serve delete`, or until the cluster goes down. It follows
    an alias: promote another version, and the endpoint switches to it. With --follow canary a tenth of the requests try
    it first, and the guard judges. NAME@latest follows every new version; NAME alone is the newest of now, and stays.
    Words A.B=C set fields of the endpoint (all in docs/reference/fields.md); a YAML file holds the full spec. A remote
    cluster takes models from its own registry, and the current folder is uploaded.

    \b
    Examples:
      shoal serve deploy fashion@champion
      shoal serve deploy fashion@latest --follow canary
      shoal serve deploy fashion tabular@2 --name shop --replicas 2 endpoint.model.deadline_s=0.1
      shoal serve deploy fashion endpoint.models.fashion.precision=bf16
      shoal serve deploy lenet@3 --into shop endpoint.model.deadline_s=0.1
      shoal serve deploy shop.yaml
      shoal serve deploy fashion --port 8000 --address http://head.example:8265
    """
    origins = json.dumps(allow_origin) if allow_origin else None
    arguments += () if follow is None else (f"endpoint.model.follow={follow}",)
    if into is not None:
        own = {"name": name, "port": port, "replicas": replicas, "allow-origin": origins, "address": address}
        yield from _deploy_into(into, arguments, own, timeout_s)
        return
    fields = _parse_fields(arguments) + ([] if name is None else [format_override("endpoint.name", name)])
    options = {"endpoint.port": port, "endpoint.num_replicas": replicas, "endpoint.allow_origins": origins}
    fields += [f"{field}={value}" for field, value in options.items() if value is not None]
    spec = spec_from_overrides(fields)
    _warn(spec.endpoint.drain_warning)
    cluster = find_cluster(address)
    others = []
    command = format_masked_command(["shoal", *sys.argv[1:]])
    run_id = make_run_id()
    if cluster is not None and not cluster.is_local:
        if not spec.models:
            raise ConfigError("models", [], "there is nothing to serve", "name a model of the cluster's registry")
        present = list_jobs_by_endpoint(cluster).get(spec.name)
        if present is not None and not present.status.is_over:  # a detached endpoint may be gone: the job checks that
            raise describe_taken_name(spec.name, "")
        fields = [*map(_make_file_relative, fields), format_override("endpoint.name", spec.name)]
        python, folder = "python", Path.cwd()
        env = {"SHOAL_RUN_ID": run_id, **make_command_variable(command)}
    else:
        others = list_endpoints()
        cluster = _check_local(cluster, spec, others)
        python, folder = sys.executable, None
        env = job_environment(run_id, command)
    shown, secrets = split_secrets(fields)
    metadata = {ENDPOINT: spec.name, LIFETIME: spec.endpoint.lifetime}
    with end_on_interrupt(lambda: JobHandle(cluster, run_id).stop_quietly()):
        words = [python, "-m", MODULE, *shown]
        job = submit(cluster, words, env=env | secrets, working_dir=folder, submission_id=run_id, metadata=metadata)
        if cluster.is_local:
            ready = _wait_until_ready(job, lambda: _read_record(run_id), timeout_s)
            yield from _describe_next_steps(spec, ready, bool(others))
        else:
            ready = _wait_until_ready(job, lambda: _read_job_log(job), timeout_s)
            yield from _describe_next_steps_elsewhere(spec, ready, cluster)


def _check_local(cluster: ClusterHandle | None, spec: ServingSpec, others: Sequence[FoundEndpoint]) -> ClusterHandle:
    """Check the spec here, where the user can still correct it. Raises ConfigError, ClusterError without a cluster."""
    check(spec)
    _warn(*describe_other_packages(spec))
    cluster = _require_cluster(cluster)
    # Raise WeightsError for weights on this disk that a replica would refuse, before it starts.
    for model in spec.models:
        version = Registry().get(model)
        is_small = version.manifest.size_bytes <= MAX_BYTES and version.store.locate("") is not None
        if is_small and version.manifest.model.format == "module" and spec.endpoint.options(version.name).finite:
            suspect = version.snapshot().find_not_finite()
            if problem := find_load_error(version, suspect, with_code=False):
                raise WeightsError(f"{version.ref} cannot be served: {problem}")
    jobs = {info.submission_id for info in list_jobs(cluster) if not info.status.is_over}
    for each in others:
        if each.name == spec.name and each.run_id in jobs:
            raise describe_taken_name(spec.name, _read_owner(each))
    if not others:  # else it may share their address; the job checks it too
        check_address(spec)
    return cluster


def _describe_next_steps(spec: ServingSpec, ready: _Addresses, has_others: bool) -> Iterator[str]:
    metadata = f" (metadata application={spec.name})" if urlsplit(ready.url).path else ""
    grpc = f", gRPC at {ready.grpc}{metadata}" if ready.grpc else ""
    yield f"endpoint {spec.name} is ready at {ready.url}{grpc}"
    meant = read_serve_port(Path(spec.file)) if spec.file and not spec.endpoint.port else None
    if meant is not None:
        theirs = f"the http_options of {spec.file} are for Ray's own `serve deploy`"
        yield f"({theirs}; --port {meant} is the same here)"
    for model in spec.models:
        version = Registry().get(model)
        yield f"{version.name}: {describe_following(model, version.version)}"
    yield "what next:"
    which = f" --endpoint {spec.name}" if has_others else ""
    first = Registry().get(spec.models[0])
    ask = f"{suggest_predict_command(first)}{which}"
    curl = suggest_curl_command(first, spec.endpoint.options(first.name), ready.url)
    with (
        suppress(InferenceError, ConnectionLost),  # it writes no text
        FoundEndpoint(spec.name, ready.url).connect(timeout_s=STATUS_TIMEOUT_S, num_retries=0) as client,
    ):
        ask, curl = suggest_text_commands(first.name, spec.name, ready.url, client.has_chat(first.name))
    yield f"  {ask}{ready.ca_option}"
    yield f"  shoal serve status {spec.name}{ready.ca_option}"
    yield f"  shoal serve delete {spec.name}"
    yield f"  {curl}"


def _describe_next_steps_elsewhere(spec: ServingSpec, ready: _Addresses, cluster: ClusterHandle) -> Iterator[str]:
    if is_loopback(spec.endpoint.host):
        ports = [urlsplit(each).port for each in (ready.url, f"//{ready.grpc}") if each != "//"]
        tunnels = " ".join(f"-L {port}:127.0.0.1:{port}" for port in ports)
        head = f"the loopback of the head of {cluster.dashboard_url}"
        yield f"endpoint {spec.name} is ready at {ready.url}, on {head}"
        yield "what next:"
        yield f"  ssh -N {tunnels} HEAD &"
    else:
        others = ", and at this port of each node with a replica" if spec.endpoint.ingress == EVERY_NODE else ""
        yield f"endpoint {spec.name} is ready at {ready.url}, on the head of {cluster.dashboard_url}{others}"
        yield "what next:"
    key = " --key TOKEN ...   ($SHOAL_HOME/token of the head)"
    yield f"  shoal predict {spec.name} --endpoint {ready.url}{ready.ca_option}{key}"
    yield f"  shoal serve delete {spec.name} --address {cluster.dashboard_url}"


def _warn(*warnings: str) -> None:
    for each in filter(None, warnings):
        click.secho(f"warning: {each}", fg="yellow", err=True)


@verb(work="waiting for pending requests")
@ca_option
def delete(
    endpoint: Annotated[str | None, "[NAME]"] = None,
    *,
    model: Annotated[str | None, "--model NAME", "Only this model of the endpoint; the others stay."] = None,
    address: ClusterAddress = None,
    timeout_s: Annotated[Seconds, "How long to wait for pending requests."] = 60.0,
) -> str:
    """End an endpoint, or one model of it, when its pending requests are answered.

    \b
    Examples:
      shoal serve delete
      shoal serve delete shop
      shoal serve delete shop --model tabular
      shoal serve delete shop --address http://head.example:8265
    """
    if model and address:
        remedy = "leave --address out, and give the endpoint's own address for NAME"
        raise ConfigError("address", address, "is a cluster's, and a model is taken from an endpoint", remedy)
    cluster = None if model else find_cluster(address)
    if cluster is not None and not cluster.is_local:
        name, info = find_remote_endpoint(cluster, endpoint)
        if info.status.is_over:  # it has detached the endpoint
            return _end_detached(cluster, ["python", "-m", END_MODULE], name, {}, timeout_s)
        JobHandle(cluster, info.submission_id).stop(timeout_s)
        return f"endpoint {name} is gone"
    target = find_endpoint(endpoint)
    if model:
        with target.connect() as client:
            client.rollout("delete", model, timeout_s=timeout_s)
        return f"{model} is served no longer"
    if endpoint is None and (owner := _read_owner(target)) not in ("", find_owner()):
        remedy = f"to end it, name it: `shoal serve delete {target.name}`"
        raise ConfigError("endpoint", target.name, f"is of {owner}", remedy)
    if target.is_detached:
        env = job_environment(make_run_id(), format_masked_command(["shoal", *sys.argv[1:]]))
        program = [sys.executable, "-m", END_MODULE]
        return _end_detached(_require_cluster(cluster), program, target.name, env, timeout_s)
    if not target.run_id:
        remedy = "give its name, on the machine where it was deployed"
        raise ConfigError("endpoint", target.url, "is an address, and endpoints are ended by name", remedy)
    job = JobHandle(_require_cluster(cluster), target.run_id)
    try:
        job.stop(timeout_s)
    except RunError:
        run = shoal.runs.load(target.run_id)
        remedy = f"end that with Ctrl-C, or `ray job stop`: process {run.pid} on {run.host}"
        problem = f"endpoint {target.name} was not deployed by `shoal serve deploy` but by {run.job!r}"
        raise RunError(f"{problem}: {remedy}") from None
    return f"endpoint {target.name} is gone"


def _read_owner(found: FoundEndpoint) -> str:
    """The owner of an endpoint; "" where it does not answer."""
    try:
        return found.read_status().owner
    except (ConnectionLost, InferenceError):
        return ""


def _end_detached(
    cluster: ClusterHandle, program: Sequence[str], name: str, env: Mapping[str, str], timeout_s: float
) -> str:
    """End a detached endpoint by a job. Raises RunError with the job's error, ClusterError when it takes too long."""
    job = submit(cluster, [*program, f"name={name}"], env=env, submission_id=new_submission_id())
    if job.wait(timeout_s) is JobStatus.STOPPED:
        raise RunError(f"the job that ends endpoint {name} was stopped by another")
    return f"endpoint {name} is gone"


def _deploy_into(
    endpoint: str, arguments: Sequence[str], options: Mapping[str, object], timeout_s: float
) -> Iterator[str]:
    """Serve each model at once, in addition to the present ones; a model that is served already gets this version."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, value, "is of an endpoint that is deployed anew", f"leave --{option} out")
    models = [each for each in arguments if "=" not in each]
    if not models:
        raise ConfigError("into", endpoint, "needs a model", "name it before the fields")
    options_by_model = _parse_model_options(models, arguments)
    target = find_endpoint(endpoint)
    with target.connect() as client:
        for model, changed in options_by_model.items():
            served = client.rollout("deploy", model, options=changed or None, timeout_s=timeout_s)
            yield f"{served.name}: {format_shares(served)}, {describe_following(served.source, served.stable)}"


def _parse_model_options(models: Sequence[str], arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options that overrides set for each model. Raises ConfigError for fields of the endpoint itself."""
    fields = parse_overrides(ServingSpec, [each for each in arguments if "=" in each])
    endpoint = fields.pop("endpoint", {})
    names = [split_ref(model)[0] for model in models]
    own: dict[str, Any] = endpoint.get("models", {})
    for field in [*fields, *(f"endpoint.{name}" for name in endpoint if name not in ("model", "models"))]:
        remedy = "an endpoint that is up takes endpoint.model.A and endpoint.models.NAME.A"
        raise ConfigError("into", field, "is a field of an endpoint that is deployed anew", remedy)
    for name in own:
        if name not in names:
            raise ConfigError("into", f"endpoint.models.{name}", "is not among the models", f"name {name}, too")
    everybodys = endpoint.get("model", {})
    return {model: merge(everybodys, own.get(name, {})) for model, name in zip(models, names, strict=True)}


def _parse_fields(arguments: Sequence[str]) -> list[str]:
    """`A.B=C` words unchanged, a YAML file as `file=...`, models as a list."""
    models = [each for each in arguments if "=" not in each and not each.endswith((".yaml", ".yml"))]
    files = [each for each in arguments if "=" not in each and each.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        raise ConfigError("file", files[1], "is a second file", "an endpoint has one")
    paths = [file if Path(file).is_file() else find_recipe(file) or file for file in files]
    fields = [format_override("file", str(Path(file).resolve())) for file in paths]
    if models:
        fields.append(format_override("models", ",".join(models)))
    return fields + [each for each in arguments if "=" in each]


def _require_cluster(cluster: ClusterHandle | None) -> ClusterHandle:
    if cluster is None:
        raise ClusterError("no cluster is up, which an endpoint could live on: `shoal up` starts one")
    return cluster


@dataclass(frozen=True)
class _Addresses:
    """Those of an endpoint that is ready; `grpc` is host:port, or empty."""

    url: str
    grpc: str

    @property
    def ca_option(self) -> str:
        """What a suggested command needs where the system does not trust the certificate's authority."""
        return " --ca FILE" if self.url.startswith("https:") else ""


def _wait_until_ready(
    job: JobHandle, read: Callable[[], tuple[_Addresses | None, str]], timeout_s: float
) -> _Addresses:
    """Wait for the addresses. The time in which the job waits for nodes, which it limits itself, does not count.

    read: the addresses, and what the job waits for ("" when it starts the endpoint)

    Raises RunError with the job's own error when it has failed, ClusterError when it takes too long.
    """
    until_s, reported = time.monotonic() + timeout_s, ""
    while True:
        ready, waiting = read()
        if ready is not None:
            return ready
        if (outcome := job.poll_outcome()) is not None:
            raise RunError(describe_failure(job, "the job of the endpoint", outcome))
        if waiting:
            if waiting != reported:
                click.echo(waiting)
            until_s = time.monotonic() + timeout_s
        elif time.monotonic() > until_s:
            problem = f"the endpoint was not ready within {timeout_s:g} s"
            raise ClusterError(f"{problem}: give it more with --timeout-s")
        reported = waiting
        time.sleep(POLL_S)


def _read_record(run_id: str) -> tuple[_Addresses | None, str]:
    """The record of this machine."""
    try:
        run = shoal.runs.load(run_id)
    except RunError:
        return None, ""  # the job has not begun to record yet
    addresses = {each.kind: each.address for each in run.endpoints() if each.state in ("ready", DETACHED)}
    if INFERENCE_KIND in addresses:
        return _Addresses(addresses[INFERENCE_KIND], addresses.get(GRPC_KIND, "")), ""
    return None, describe_wait(run.last_events())


def _read_job_log(job: JobHandle) -> tuple[_Addresses | None, str]:
    """What the job says, where the record is another machine's."""
    lines = (job.try_read_logs() or "").splitlines()
    for line in lines:
        if line.startswith(READY):
            with suppress(ValueError, TypeError, KeyError):  # for a line of the model's own code
                fields = json.loads(line.removeprefix(READY))
                return _Addresses(fields["url"], fields["grpc"] or ""), ""
    last = lines[-1] if lines else ""
    return None, last if "waiting for nodes" in last else ""


def find_remote_endpoint(cluster: ClusterHandle, endpoint: str | None) -> tuple[str, JobInfo]:
    """The endpoint that `deploy` started there, by its name or the only one, with its job. Raises RunError with those
    that exist."""
    there = list_jobs_by_endpoint(cluster)
    if endpoint is None and len(there) == 1:
        endpoint = next(iter(there))
    if endpoint is None or endpoint not in there:
        known = f"there is {', '.join(there)}" if there else "`shoal serve deploy` has none there"
        raise RunError(f"there is no endpoint {endpoint or ''} on {cluster.dashboard_url}: {known}")
    return endpoint, there[endpoint]


def list_jobs_by_endpoint(cluster: ClusterHandle) -> dict[str, JobInfo]:
    """The jobs of `deploy` that keep an endpoint up, or have detached one; of one name the newest that goes on."""
    jobs: dict[str, JobInfo] = {}
    for info in list_jobs(cluster):
        name = info.metadata.get(ENDPOINT)
        is_detached = info.status is JobStatus.SUCCEEDED and info.metadata.get(LIFETIME) == DETACHED
        if name and (is_detached or not info.status.is_over) and (name not in jobs or jobs[name].status.is_over):
            jobs[name] = info
    return jobs


def _make_file_relative(field: str) -> str:
    """Make the file relative to the current folder, which is uploaded. Raises ConfigError for one outside."""
    if not (value := last_override([field], "file")):
        return field
    file, here = Path(value).resolve(), Path.cwd().resolve()
    if not file.is_relative_to(here):
        raise ConfigError("file", value, f"lies outside {here}", "deploy from the folder that holds the file")
    return format_override("file", str(file.relative_to(here)))
