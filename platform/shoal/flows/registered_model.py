"""Serve what the registry holds under one reference: `serving`, for a single model.

Called by `serve_apps/registered_model.py`, in a process that is connected to a Ray cluster.
"""

from __future__ import annotations

from typing import Annotated

from shoal.config import Spec
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import NAMED_BY_MODEL, ServingSpec
from shoal.serve.endpoint import EndpointSpec, unless_said


class RegisteredModelSpec(Spec):
    """`model` is a reference, name@version or name@alias; the endpoint is called by the model's name."""

    model: str
    endpoint: Annotated[EndpointSpec, unless_said(name=NAMED_BY_MODEL, num_cpus=0.5)] = EndpointSpec(
        name=NAMED_BY_MODEL, num_cpus=0.5
    )


def serve_registered_model(spec: RegisteredModelSpec, job: str) -> None:
    """Serve until interrupted. Raises RegistryError when there is no such model, ClusterError, ConfigError."""
    serve_models(ServingSpec(models=[spec.model], endpoint=spec.endpoint), job)
