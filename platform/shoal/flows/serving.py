"""Serve registered models, each by its version or alias, until stopped.

    python -m shoal.flows.serving models=fashion@champion,tabular@2 endpoint.num_replicas=2

Called by `shoal serve deploy`, and by the files of `serve_apps/`, in a process connected to a Ray cluster. It owns the
endpoint's run record: its addresses, and every change of the served versions. The controller decides what is served.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

import shoal.runs
from shoal.client.discovery import GRPC_KIND, INFERENCE_KIND
from shoal.cluster.capacity import WaitLog, require_cpus
from shoal.cluster.job_main import expected_run_id, job_main
from shoal.errors import ClusterError, RunError, needs_extra
from shoal.flows.serving_spec import READY, ServingSpec, check, require_importable, spec_from_overrides
from shoal.home import load_access_token
from shoal.registry import Registry
from shoal.runs import RunRecorder
from shoal.runs.event_messages import format_warning
from shoal.runs.waits import print_line
from shoal.serve.spec.model_source import model_from_ref

if TYPE_CHECKING:
    from shoal.serve.on_ray.deployment import DeployedEndpoint

JOB = "serve"
WATCH_S = 1.0


def serve_models(spec: ServingSpec, job: str) -> None:
    """Serve until interrupted; leave a detached endpoint once it is up.

    Raises ClusterError, ConfigError, RegistryError, RunError.
    """
    with open_endpoint(spec, job) as (endpoint, recorder):
        versions = [(model, Registry().get(model)) for model in spec.models]
        for ref, now in versions:
            print(f"serving {ref} (now {now.ref}) at {endpoint.url}/v2/models/{now.name}")
        if endpoint.grpc:
            print(f"serving gRPC at {endpoint.grpc}")
        print_line(READY + json.dumps({"url": endpoint.url, "grpc": endpoint.grpc}))  # read by a remote deploy
        if not endpoint.is_detached:
            _record_until(threading.Event(), endpoint, recorder)


@contextmanager
def record_endpoint(spec: ServingSpec) -> Iterator[DeployedEndpoint]:
    """An endpoint whose changes a thread of this process records. Raises as `serve_models`."""
    stop = threading.Event()
    with open_endpoint(spec, JOB) as (endpoint, recorder):
        thread = threading.Thread(target=_record_until, args=(stop, endpoint, recorder), daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            stop.set()
            thread.join()


@contextmanager
def open_endpoint(spec: ServingSpec, job: str) -> Iterator[tuple[DeployedEndpoint, RunRecorder]]:
    """The endpoint of the spec and its run record, once every model answers. Raises as `serve_models`."""
    with needs_extra("serve"):  # Serve takes a second to load, which `--check` must not wait for
        from shoal.serve.on_ray.deployment import deploy

    check(spec)
    require_importable(spec)
    served = [model_from_ref(model) for model in spec.models]
    endpoint_spec = spec.endpoint.model_copy(update={"name": spec.name, "token": SecretStr(load_access_token())})
    num_replicas = max(1, endpoint_spec.least_replicas)
    bundles = [{"CPU": endpoint_spec.num_cpus}] * num_replicas * endpoint_spec.num_workers
    fields = f"endpoint.num_cpus{', endpoint.num_workers' * (endpoint_spec.num_workers > 1)} or endpoint.num_replicas"
    require_cpus(len(bundles) * endpoint_spec.num_cpus, fields, bundles)
    record = spec.update({"endpoint": {"name": spec.name}}).to_record()
    with shoal.runs.create(job, record, expected_run_id(), kind=shoal.runs.RunKind.SERVING) as recorder:
        endpoint = deploy(endpoint_spec, served, record=partial(_record_wait, recorder))
        stays = False
        try:
            for model in endpoint.status()["models"]:
                if model["state"] != "READY":
                    reason = model["reason"] or model["state"].lower()
                    raise ClusterError(f"{model['name']} cannot be served: {reason}")
            _record_endpoints(endpoint, recorder, "ready")
            stays = endpoint.is_detached
            yield endpoint, recorder
        finally:
            try:
                _record_endpoints(endpoint, recorder, "detached" if stays else "closed")
            finally:
                if not stays:
                    endpoint.close()


def list_addresses(endpoint: DeployedEndpoint) -> dict[str, tuple[str, str]]:
    """The addresses for the record: name -> kind, address. The last one marks the endpoint as ready."""
    grpc = {f"{endpoint.name}/grpc": (GRPC_KIND, endpoint.grpc)} if endpoint.grpc else {}
    return {**grpc, endpoint.name: (INFERENCE_KIND, endpoint.url)}


def _record_endpoints(endpoint: DeployedEndpoint, recorder: RunRecorder, state: str) -> None:
    for name, (kind, address) in list_addresses(endpoint).items():
        recorder.record_endpoint(name, kind, address, state)


def _record_wait(recorder: RunRecorder, kind: str, **details: Any) -> None:
    with suppress(RunError):  # retried later: the endpoint stays up
        recorder.record_event(kind, **details)
    print_line(format_warning(kind, details) or "every replica has a place")


def _record_until(stop: threading.Event, endpoint: DeployedEndpoint, recorder: RunRecorder) -> None:
    log = WaitLog(partial(_record_wait, recorder))
    while not stop.wait(WATCH_S):
        record_changes(endpoint, recorder)
        log.report(endpoint.describe_wanted())


def record_changes(endpoint: DeployedEndpoint, recorder: RunRecorder) -> None:
    """Record every change of the served versions since the last call.

    The recorder retries failed writes later, and the endpoint stays up.
    """
    for event in endpoint.take_events():
        details = {"version": event.version, "previous": event.previous, "by": event.by, "reason": event.reason}
        with suppress(RunError):
            recorder.record_event(
                event.kind, model=event.model, **{name: value for name, value in details.items() if value}
            )


if __name__ == "__main__":
    job_main(spec_from_overrides, serve_models, job=JOB, check=check)
