"""The spec of an endpoint, written by jobs and the CLI, and the numbers derived from it. No Ray, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FieldSerializationInfo,
    ModelWrapValidatorHandler,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from shoal.config import Spec, merge
from shoal.network_address import is_loopback
from shoal.runs.formatting import Duration
from shoal.serve.spec.api_key import ApiKey, require_distinct_keys, require_usable_secret
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.trace_destination import TraceDestination


def _require_countable_gpus(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ValueError("above 1 it is a whole number: only one GPU is shared")
    return num_gpus


GpuCount = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_require_countable_gpus)]

# A replica is well utilised when one full batch is computed while the next one gathers.
BATCHES_PER_REPLICA = 2
SpecT = TypeVar("SpecT", bound=Spec)


def _dump_explicit(given: Any) -> Any:
    """Dump a value as a user would write it: of specs, only the explicit fields."""
    if isinstance(given, Spec):
        return given.model_dump(exclude_unset=True)
    return {name: _dump_explicit(each) for name, each in given.items()} if isinstance(given, dict) else given


def _mark_explicit(spec: SpecT, explicit: dict[str, Any]) -> SpecT:
    """Copy a spec, with only the given fields marked as explicit."""
    values = dict(spec)
    nested = {
        name: _mark_explicit(values[name], each) for name, each in explicit.items() if isinstance(values[name], Spec)
    }
    return spec.model_construct(_fields_set=set(explicit), **{**values, **nested})


def with_default_values(**values: object) -> BeforeValidator:
    """For a field with an endpoint: fields that a mapping leaves out take these defaults, not EndpointSpec's."""
    return BeforeValidator(lambda given: {**values, **given} if isinstance(given, dict) else given)


def _reject_token(endpoint: EndpointSpec) -> EndpointSpec:
    if endpoint.token is not None:
        raise ValueError("its token is the access token: set $SHOAL_TOKEN, which is not recorded")
    return endpoint


# For the endpoint field of a spec that is recorded.
TOKEN_FROM_ENVIRONMENT = AfterValidator(_reject_token)


class EndpointSpec(Spec):
    """Models behind one address.

    name:           the endpoint's name: letters, digits, `-`, `_` and `.`
    host, port:     where the ingress listens; loopback only; 0 is a free port
    route_prefix:   before the protocol's paths: "/NAME" where another endpoint has the cluster's root
    grpc_port:      where gRPC listens; None for no gRPC, 0 for a free port
    num_replicas:   processes, each with every model
    max_replicas:   the most replicas under load, above `num_replicas`; None for a fixed number
    model:          options of models that `models` does not name
    models:         options by model name; unspecified ones are as in `model`
    max_body_bytes: a larger request is refused with 413
    show_errors:    callers receive the text of a model's own exception; else a reference to the endpoint's log
    token:          when set, all calls except the server's health need `Authorization: Bearer TOKEN`
    keys:           further callers, their models and rates
    torch_threads:  threads of one forward; 1 is best for small models under load
    num_cpus:       CPUs of the cluster that each replica reserves
    num_gpus:       GPUs, or a fraction of one, that each replica reserves and sees; None: an equal share of the
                    cluster's, of one at most, where a model has `device: cuda`, and else 0
    wait:           how long the first replica (in the loop: all workers) may wait for nodes that an autoscaler adds, as
                    30m or seconds; None: 30m
    drain_s:        how long a stopping replica may finish its requests
    hang_s:         a replica whose forward takes longer than this counts as hung and is replaced
    max_memory_gib: a replica whose process grows beyond this is replaced; None: no limit
    trace:          the destination of traces (OpenTelemetry) of requests, from the ingress to the forward; "" for none.
                    See `shoal.serve.protocol.tracing`: otlp://HOST:PORT, file:FOLDER
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    route_prefix: str = Field(default="", pattern=r"^(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    model: ModelOptions = ModelOptions()
    models: dict[str, ModelOptions] = Field(default_factory=dict)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    show_errors: bool = False
    token: SecretStr | None = None
    keys: list[ApiKey] = Field(default_factory=list)
    torch_threads: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: GpuCount | None = None
    wait: Duration | None = None
    drain_s: float = Field(default=10.0, gt=0)
    hang_s: float = Field(default=60.0, gt=0)
    max_memory_gib: float | None = Field(default=None, gt=0)
    trace: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _models_begin_as_all(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill each of `models` from `model`; its `model_fields_set` has only its explicit fields."""
        said = _dump_explicit(values.get("models", {})) if isinstance(values, dict) else {}
        if not isinstance(said, dict) or not said:
            return handler(values)
        everybodys = _dump_explicit(values.get("model", {}))
        spec = handler({**values, "models": {name: merge(everybodys, each) for name, each in said.items()}})
        for name, each in said.items():
            spec.models[name] = _mark_explicit(spec.models[name], each)
        return spec

    @field_serializer("models")
    def _keep_explicit(self, models: dict[str, ModelOptions], info: FieldSerializationInfo) -> dict[str, Any]:
        """Serialise only explicit fields, so that a later change of `model`, by overrides or in a record, applies to
        these too."""
        mode = "json" if info.mode == "json" else "python"
        return {name: each.model_dump(mode=mode, exclude_unset=True) for name, each in models.items()}

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError("an endpoint speaks plain HTTP and listens on loopback; put encryption in front of it")
        return host

    @field_validator("host")
    @classmethod
    def _in_four_numbers(cls, host: str) -> str:
        if ":" in host:
            raise ValueError("an endpoint listens on an address of IPv4, such as 127.0.0.1")
        return host

    @field_validator("token")
    @classmethod
    def _usable_in_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        return None if token is None else require_usable_secret(token)

    @field_validator("trace")
    @classmethod
    def _destination(cls, trace: str) -> str:
        if trace:
            TraceDestination.parse(trace)
        return trace

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> EndpointSpec:
        require_distinct_keys(self.token.get_secret_value() if self.token is not None else None, self.keys)
        return self

    @model_validator(mode="after")
    def _ports_are_two(self) -> EndpointSpec:
        if self.grpc_port and self.grpc_port == self.port:
            raise ValueError(f"grpc_port = {self.grpc_port} is where HTTP listens (port): gRPC needs another, or 0")
        return self

    @model_validator(mode="after")
    def _scales_upwards(self) -> EndpointSpec:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} is below num_replicas = {self.num_replicas}")
        return self

    def options(self, model: str) -> ModelOptions:
        """The options of the model of this name."""
        return self.models.get(model, self.model)

    @property
    def needs_cuda(self) -> bool:
        """Whether a model needs a GPU."""
        return any(options.needs_cuda for options in (self.model, *self.models.values()))

    @property
    def most_replicas(self) -> int:
        """The most replicas."""
        return self.max_replicas or self.num_replicas

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC; "" without gRPC, or before a free port is chosen."""
        return f"{self.host}:{self.grpc_port}" if self.grpc_port else ""

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas > self.num_replicas

    @property
    def target_ongoing_requests(self) -> int:
        """The load of one replica at which another is added: a batch in progress and one that gathers, of one-row
        requests.

        Serve's default of 2 would spread ten requests over five replicas and so split every batch.
        """
        return BATCHES_PER_REPLICA * max(each.max_rows for each in (self.model, *self.models.values()))

    @property
    def max_ongoing_requests(self) -> int:
        """The most requests that Serve admits to a replica: the queues, two batches in progress each, and room for
        refused ones.

        Serve's default of 5 would keep requests out of the batcher, whose queues count and refuse them.
        """
        served = (self.model, *self.models.values())
        return 2 * sum(each.max_queue_size + BATCHES_PER_REPLICA * each.max_rows for each in served)
