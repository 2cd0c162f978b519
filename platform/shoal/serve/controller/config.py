"""A controller's configuration, derived once from an endpoint's spec and models when they are deployed.

Called by the Ray shells; knows no Ray.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.client.discovery import CARD_SUFFIX
from shoal.errors import ConfigError
from shoal.home import home
from shoal.registry import Registry
from shoal.runs.formatting import format_size
from shoal.runs.record.provenance import find_owner
from shoal.serve.controller.assignments import describe_too_large
from shoal.serve.controller.state import Deployment
from shoal.serve.spec.endpoint import DETACHED, EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel, RegisteredModel, RegistryCatalogue

LOAD_TIMEOUT_S = 300.0  # of a model's versions on every replica
_ACTOR_NAME = re.compile(rf"endpoint-(.+)-[0-9a-f]+@([0-9a-f]+|{DETACHED})")


@dataclass(frozen=True)
class ControllerConfig:
    """The values from which a controller is built.

    spec:       of the endpoint, without its secrets
    deployment: the call of `deploy` that it belongs to
    folder:     holds its state
    registry:   source of models that are loaded later
    idle_s:     without a call from a replica for so long, the controller ends
    driver:     Ray's id of the job that keeps the endpoint up; DETACHED for one that stays without; "" when Serve does
                (`serve_app`)
    owner:      who has deployed it, USER@HOST
    key_digests: the SHA-256 in hex of the token and of each key, for the ingress of an endpoint that sleeps
    """

    spec: EndpointSpec
    deployment: str
    models: tuple[Deployment, ...]
    folder: Path
    registry: str
    idle_s: float = 120.0
    driver: str = ""
    owner: str = ""
    key_digests: tuple[str, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def actor_name(self) -> str:
        """The actor's name, which `parse_actor_name` reads."""
        return f"endpoint-{self.name}-{self.deployment}" + (f"@{self.driver}" if self.driver else "")

    @property
    def is_detached(self) -> bool:
        return self.driver == DETACHED

    @property
    def card_file(self) -> Path:
        """Where a detached endpoint's `EndpointCard` is."""
        return self.state_file.with_suffix(CARD_SUFFIX)

    @property
    def state_file(self) -> Path:
        """The state file of this deployment alone: two clusters may have endpoints of one name."""
        return self.folder / f"{self.name}-{self.deployment}.json"


def parse_actor_name(actor: str) -> tuple[str, str]:
    """(endpoint, driver) if the actor is the controller of an endpoint that a driver keeps up; else ("", "")."""
    parts = _ACTOR_NAME.fullmatch(actor)
    return (parts[1], parts[2]) if parts else ("", "")


def _require_one_worker(spec: EndpointSpec, reason: str, remedy: str) -> None:
    if spec.num_workers > 1:
        problem = f"splits modules of the registry between workers, and {reason}"
        raise ConfigError("endpoint.num_workers", spec.num_workers, problem, f"leave it out, or {remedy}")


def build_controller_config(
    spec: EndpointSpec, models: Sequence[EndpointModel]
) -> tuple[ControllerConfig, dict[str, LiveModel]]:
    """Build the controller's configuration, and the models that the replicas follow by themselves.

    Raises ConfigError, and RegistryError for an unknown version or alias.
    """
    if not models:
        raise ConfigError("models", [], "an endpoint serves something", "name a model")
    deployments: dict[str, Deployment] = {}
    for model in models:
        if model.name in deployments:
            raise ConfigError("models", model.name, "is there twice", "serve it once, or under another name")
        options = (model.options or spec.options(model.name)).model_dump(mode="json")
        registry = ""
        if isinstance(model.source, RegisteredModel):
            registry = model.source.registry
            version = RegistryCatalogue(registry).resolve(model.name, model.version)
            model_format = Registry(registry).get(f"{model.name}@{version}").manifest.model.format
            if model_format != "module":
                _require_one_worker(spec, f"{model.name!r} is of format {model_format}", "register the module itself")
        else:
            _require_one_worker(spec, f"{model.name!r} follows a run", "register the model")
        deployments[model.name] = Deployment(model.name, registry, model.version, options)
    if spec.memory is not None:
        require_memory(spec.memory, deployments.values())
    config = ControllerConfig(
        spec.model_copy(update={"token": None, "keys": []}),
        secrets.token_hex(4),
        tuple(deployments.values()),
        home() / "endpoints",
        Registry().location,
        owner=find_owner(),
        key_digests=spec.key_digests,
    )
    return config, {model.name: model.source for model in models if isinstance(model.source, LiveModel)}


def require_memory(memory_bytes: int, deployments: Iterable[Deployment]) -> None:
    """Raise ConfigError when the pinned models, or one of the others with them, do not fit a replica's memory."""
    sizes: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for each in deployments:
        if not each.is_live:
            catalogue = RegistryCatalogue(each.registry)
            _, size_bytes = catalogue.describe(each.name, catalogue.resolve(each.name, each.version))
            sizes[each.options["pin"]][each.name] = size_bytes
    free_bytes = memory_bytes - sum(sizes[True].values())
    written = format_size(memory_bytes)
    if free_bytes < 0:
        problem = f"is less than the pinned models take, {format_size(sum(sizes[True].values()))}"
        raise ConfigError("endpoint.memory", written, problem, "give more, or pin fewer models")
    largest = max(sizes[False], key=lambda name: sizes[False][name], default="")
    if largest and sizes[False][largest] > free_bytes:
        raise ConfigError("endpoint.memory", written, describe_too_large(largest, sizes[False][largest], free_bytes))
