"""What an endpoint is: the spec that jobs and the CLI write, and the numbers derived from it. No Ray, no torch."""

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
from shoal.serve.spec.api_key import ApiKey, require_distinct_keys, require_usable_secret
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.trace_destination import TraceDestination


def _require_countable_gpus(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ValueError("above 1 it is a whole number: only one GPU is shared")
    return num_gpus


GpuCount = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_require_countable_gpus)]

# A replica is well used when one full batch is computed while the next one gathers.
BATCHES_PER_REPLICA = 2
SpecT = TypeVar("SpecT", bound=Spec)


def _dump_explicit(given: Any) -> Any:
    """As a user would write it: of specs, only what was set."""
    if isinstance(given, Spec):
        return given.model_dump(exclude_unset=True)
    return {name: _dump_explicit(each) for name, each in given.items()} if isinstance(given, dict) else given


def _mark_explicit(spec: SpecT, said: dict[str, Any]) -> SpecT:
    """The same values, of which no more is set than was said."""
    values = dict(spec)
    nested = {name: _mark_explicit(values[name], each) for name, each in said.items() if isinstance(values[name], Spec)}
    return spec.model_construct(_fields_set=set(said), **{**values, **nested})


def with_default_values(**values: object) -> BeforeValidator:
    """For a field with an endpoint: in a mapping, too, what is not said is as here, and not as EndpointSpec has it."""
    return BeforeValidator(lambda given: {**values, **given} if isinstance(given, dict) else given)


def _reject_token(endpoint: EndpointSpec) -> EndpointSpec:
    if endpoint.token is not None:
        raise ValueError("its token is the access token: set $SHOAL_TOKEN, which is not recorded")
    return endpoint


# For a field with the endpoint of a spec that is recorded.
TOKEN_FROM_ENVIRONMENT = AfterValidator(_reject_token)


class EndpointSpec(Spec):
    """Models behind one address.

    name:           of the endpoint: letters, digits, `-`, `_` and `.`
    host, port:     where the ingress listens; loopback only; 0 is a free port
    grpc_port:      where gRPC listens; None for no gRPC, 0 for a free port
    num_replicas:   processes that each hold every model
    max_replicas:   above `num_replicas`: as many as the load needs; None for a fixed number
    model:          how a model is served that `models` does not name
    models:         how models are served otherwise, by name: what is not said of one is as in `model`
    max_body_bytes: a larger request is refused with 413
    token:          when set, everything but the health of the server asks for `Authorization: Bearer TOKEN`
    keys:           who else may call, which models, how often
    torch_threads:  threads of one forward; 1 is best for small models under load
    num_cpus:       what each replica reserves of the cluster
    num_gpus:       GPUs, or a fraction of one, that each replica reserves and sees; None: an equal share of the
                    cluster's, of one at most, where a model has `device: cuda`, and else 0
    drain_s:        how long a replica that is being stopped finishes what it has
    hang_s:         a replica whose forward takes longer than this is taken for hung, and replaced
    max_memory_gib: a replica whose process has grown beyond this is replaced; None for as large as it gets
    trace:          where traces (OpenTelemetry) of requests go, from the ingress to the forward; "" for none. See
                    `shoal.serve.protocol.tracing`: otlp://HOST:PORT, file:FOLDER
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    model: ModelOptions = ModelOptions()
    models: dict[str, ModelOptions] = Field(default_factory=dict)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    token: SecretStr | None = None
    keys: list[ApiKey] = Field(default_factory=list)
    torch_threads: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: GpuCount | None = None
    drain_s: float = Field(default=10.0, gt=0)
    hang_s: float = Field(default=60.0, gt=0)
    max_memory_gib: float | None = Field(default=None, gt=0)
    trace: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _models_begin_as_all(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fills each of `models` from `model`; its `model_fields_set` remains what was said of it alone."""
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
        """So that what is changed in `model` later, by words or by hand in a record, changes these too."""
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
        """How the model of this name is served."""
        return self.models.get(model, self.model)

    @property
    def needs_cuda(self) -> bool:
        """Whether a model can be served on a GPU only."""
        return any(options.needs_cuda for options in (self.model, *self.models.values()))

    @property
    def most_replicas(self) -> int:
        """How many there may come to be."""
        return self.max_replicas or self.num_replicas

    @property
    def grpc_address(self) -> str:
        """host:port where gRPC listens; "" when it does not, or when the port is yet to be found."""
        return f"{self.host}:{self.grpc_port}" if self.grpc_port else ""

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas > self.num_replicas

    @property
    def target_ongoing_requests(self) -> int:
        """The load of one replica at which another is added: a batch in hand and one that gathers, of one row each.

        Serve's default of 2 would spread ten requests over five replicas, and so take every batch apart.
        """
        return BATCHES_PER_REPLICA * max(each.max_batch_size for each in (self.model, *self.models.values()))

    @property
    def max_ongoing_requests(self) -> int:
        """What Serve may let into a replica: the queues, two batches in hand each, and room for those that are refused.

        Serve's default of 5 would keep requests out of the batcher, whose queues are the ones that count and refuse.
        """
        served = (self.model, *self.models.values())
        return 2 * sum(each.max_queue_size + BATCHES_PER_REPLICA * each.max_batch_size for each in served)
