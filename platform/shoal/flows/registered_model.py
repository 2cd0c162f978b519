"""Serve what the registry holds: an endpoint for `name@alias`, until it is stopped.

Called by `serve_apps/registered_model.py`, in a process that is connected to a Ray cluster. The weights follow the
alias; the module and its signature are those of the version that the reference means at the start.
"""

from __future__ import annotations

import threading

from pydantic import SecretStr

import shoal.runs
from shoal.cluster.driver import expected_run_id
from shoal.config import Spec
from shoal.home import access_token
from shoal.registry import Registry, RegistrySource
from shoal.rl.ray_rl import require_room
from shoal.serve.endpoint import EndpointSpec
from shoal.serve.ray_serve import deploy


class RegisteredModelSpec(Spec):
    """`model` is a reference, name@version or name@alias; the endpoint is called by the model's name."""

    model: str
    endpoint: EndpointSpec = EndpointSpec(name="model", num_cpus=0.5)


def serve_registered_model(spec: RegisteredModelSpec, job: str) -> None:
    """Serve until interrupted. Raises RegistryError when there is no such model, ClusterError, ConfigError."""
    version = Registry().get(spec.model)
    require_room(spec.endpoint.num_replicas * spec.endpoint.num_cpus)
    endpoint_spec = spec.endpoint.model_copy(update={"name": version.name, "token": SecretStr(access_token())})
    with shoal.runs.create(job, spec.to_yaml(), expected_run_id()) as recorder:
        source = RegistrySource(Registry(), spec.model)
        endpoint = deploy(endpoint_spec, version.manifest.model, version.manifest.signature, source)
        try:
            recorder.endpoint(version.name, "inference", endpoint.url, "ready")
            print(f"serving {spec.model} (now {version.ref}) at {endpoint.url}/v2/models/{version.name}", flush=True)
            threading.Event().wait()
        finally:
            recorder.endpoint(version.name, "inference", endpoint.url, "closed")
            endpoint.close()
