"""Serve the registry's model of one reference: `serving`, for a single model.

Called by `serve_apps/registered_model.py`, in a process connected to a Ray cluster.
"""

from __future__ import annotations

from shoal.config import Spec
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import NAMED_BY_MODEL, NamedByModel, ServingSpec, check
from shoal.serve.spec.endpoint import EndpointSpec


class RegisteredModelSpec(Spec):
    """`model` is a reference, name@version or name@alias; the endpoint has the model's name."""

    model: str
    endpoint: NamedByModel = EndpointSpec(name=NAMED_BY_MODEL, num_cpus=0.5)

    def to_serving_spec(self) -> ServingSpec:
        """The equivalent spec for any number of models."""
        return ServingSpec(models=[self.model], endpoint=self.endpoint)


def check_registered_model(spec: RegisteredModelSpec) -> None:
    """Require that the model exists. Raises ConfigError, RegistryError."""
    check(spec.to_serving_spec())


def serve_registered_model(spec: RegisteredModelSpec, job: str) -> None:
    """Serve until interrupted. Raises RegistryError for an unknown model, ClusterError, ConfigError."""
    serve_models(spec.to_serving_spec(), job)
