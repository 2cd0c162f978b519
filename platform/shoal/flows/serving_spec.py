"""The spec of an endpoint: parsing and validation.

Called by the command line before a job starts, and by the flow in it. Starts nothing, and imports no Ray.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from shoal.cluster.ingress.front import require_listenable
from shoal.config import Spec, last_override
from shoal.errors import ConfigError, needs_extra
from shoal.registry import Registry, split_ref
from shoal.registry.code_import import activate_code
from shoal.registry.manifest import find_callable
from shoal.registry.model_code import require_installed
from shoal.serve.spec.batch_layout import BatchLayout
from shoal.serve.spec.endpoint import TOKEN_FROM_ENVIRONMENT, EndpointSpec, with_default_values
from shoal.yaml_text import read_fields

NAMED_BY_MODEL = "named-by-model"
READY = "ready: "  # begins the line of a serving job that has its addresses as JSON: `url`, and `grpc` or null
NamedByModel = Annotated[EndpointSpec, with_default_values(name=NAMED_BY_MODEL, num_cpus=0.5), TOKEN_FROM_ENVIRONMENT]


class ServingSpec(Spec):
    """An endpoint and its models.

    models:   references: name@version, name@alias (the endpoint follows it), or name for the newest version now;
              a list, or one word with commas
    endpoint: its address, replicas, and options of each model; its name is by default that of its first model
    file:     a YAML file with this spec, which overrides change
    """

    page = "serving.md"
    models: list[str] = Field(default_factory=list)
    endpoint: NamedByModel = EndpointSpec(name=NAMED_BY_MODEL, num_cpus=0.5)
    file: str = ""

    @property
    def name(self) -> str:
        """The endpoint's."""
        return split_ref(self.models[0])[0] if self.endpoint.name == NAMED_BY_MODEL else self.endpoint.name

    @field_validator("models", mode="before")
    @classmethod
    def _split_names(cls, models: object) -> object:
        return [word.strip() for word in models.split(",") if word.strip()] if isinstance(models, str) else models

    @field_validator("models")
    @classmethod
    def _references(cls, models: list[str]) -> list[str]:
        names = [split_ref(model)[0] for model in models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice: a canary serves two versions of one model")
        return models


def spec_from_overrides(overrides: Sequence[str]) -> ServingSpec:
    """The spec of the file among the overrides, or the defaults; with the overrides. Raises ConfigError."""
    file = last_override(overrides, "file")
    return (load_serving_spec(Path(file)) if file else ServingSpec()).override(overrides)


def load_serving_spec(path: Path) -> ServingSpec:
    """Read a YAML file of this spec, or one for `serve deploy` with the spec as its application's `args`."""
    content = _load_content(path)
    if "applications" in content:
        content = _extract_arguments(content["applications"])
    return ServingSpec.parse({**content, "file": str(path)})


def _extract_arguments(applications: object) -> dict[str, Any]:
    """The arguments of the only application in a file for `serve deploy`. Raises ConfigError."""
    remedy = (
        "write `applications: [{name: shop, import_path: shoal.serve.on_ray.serve_app:build, args: {models: [...]}}]`"
    )
    match applications:
        case [dict(application)]:
            args = application.get("args") or {}
            if not isinstance(args, dict):
                raise ConfigError("args", args, "is not a mapping", remedy)
            return args
    raise ConfigError("applications", applications, "is not a list of one application, which an endpoint is", remedy)


def read_serve_port(path: Path) -> int | None:
    """The port that Ray's own `serve deploy` would take from the file, or None. Raises ConfigError."""
    options = _load_content(path).get("http_options")
    port = options.get("port") if isinstance(options, dict) else None
    return port if isinstance(port, int) else None


def _load_content(path: Path) -> dict[str, Any]:
    return read_fields(path, "file", "write `models: [name@champion]`")


def check(spec: ServingSpec) -> None:
    """Require that every model exists, with the batch that its options name. Raises ConfigError, RegistryError."""
    if not spec.models:
        raise ConfigError("models", [], "there is nothing to serve", "name a model: `shoal models list` shows them")
    for model in spec.models:
        version = Registry().get(model)
        BatchLayout(version.manifest.signature, spec.endpoint.options(version.name))
    names = [split_ref(model)[0] for model in spec.models]
    if unknown := sorted(set(spec.endpoint.models) - set(names)):
        raise ConfigError("endpoint.models", unknown[0], "is not served", f"models: {', '.join(names)}")


def describe_other_packages(spec: ServingSpec) -> list[str]:
    """A warning for each model whose packages have another release here. Raises RegistryError."""
    codes = {model: Registry().get(model).manifest.model.code for model in spec.models}
    named = {model: code.describe_other_packages() for model, code in codes.items() if code is not None}
    return [f"{model} was registered with {others}" for model, others in named.items() if others]


def check_address(spec: ServingSpec) -> None:
    """Require that this host, the cluster's head, can listen there with that certificate. Raises ConfigError."""
    endpoint = spec.endpoint
    require_listenable(endpoint.host, {"port": endpoint.port, "grpc_port": endpoint.grpc_port})
    if endpoint.tls is not None:
        with needs_extra("serve"):
            from shoal.cluster.ingress.tls import read_certificate

        read_certificate(endpoint.tls.files, time.time())


def require_importable(spec: ServingSpec) -> None:
    """Require that this process finds the models' classes and hooks, as the replicas must. Raises ConfigError,
    RegistryError.

    Imports their modules, which may take as long as torch does: call it only when the overrides alone do not suffice.
    """
    for model in spec.models:
        version = Registry().get(model)
        name = version.name
        options = spec.endpoint.options(version.name)
        own = spec.endpoint.models.get(version.name)
        registered = version.manifest.model
        if spec.endpoint.code == "installed":
            require_installed(registered.model_dump())
        if registered.factory:
            with activate_code(registered.code):
                find_callable(f"{version.ref}: model.factory", registered.factory)
        for field in ("preprocess", "postprocess"):
            is_own = own is not None and field in own.model_fields_set
            given, known = getattr(options, field), getattr(registered, field)
            if given:
                find_callable(f"endpoint.models.{name}.{field}" if is_own else f"endpoint.model.{field}", given)
            elif given is None and known:
                with activate_code(registered.code):
                    find_callable(f"{version.ref}: model.{field}", known)
