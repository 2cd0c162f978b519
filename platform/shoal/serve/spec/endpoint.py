"""The spec of an endpoint, written by jobs and the CLI, and the numbers derived from it. No Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

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

from shoal.cluster.ingress.time_limits import DRAIN_S, HANG_S, HARD_STOP_S, get_answer_s
from shoal.config import Spec, merge
from shoal.errors import ConfigError
from shoal.network_address import require_origin
from shoal.plugins.library import collect_extensions
from shoal.runs.formatting import Duration, Size
from shoal.serve.spec.api_key import ApiKey, digest, require_distinct_keys, require_usable_secret
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.reach import EVERY_NODE, LOOPBACK, OTHER_REACH, Reach, TlsOptions
from shoal.serve.spec.scale import MAX_REPLICAS, ScaleSpec


@dataclass(frozen=True)
class TraceDestination:
    """The destination of spans. target: a URL, or a folder."""

    kind: Literal["otlp", "file"]
    target: str
    ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> TraceDestination:
        """Parse a destination. Raises ConfigError."""
        parts = urlsplit(text)
        remedy = "otlp://HOST:PORT, otlps://HOST:PORT or file:FOLDER, with ?ratio=0.01 if not all"
        try:
            ratio = float(parse_qs(parts.query, strict_parsing=True)["ratio"][0]) if parts.query else 1.0
        except (KeyError, ValueError):
            raise ConfigError("trace", text, "has text after ? that is not ratio=NUMBER", remedy) from None
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("trace", text, "the ratio is not between 0 and 1", remedy)
        match parts.scheme:
            case "otlp" | "otlps" if parts.netloc:
                scheme = "http" if parts.scheme == "otlp" else "https"
                return cls("otlp", f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/v1/traces", ratio)
            case "file" if parts.path:
                return cls("file", parts.path, ratio)
        raise ConfigError("trace", text, "is not a destination of traces", remedy)


def _require_countable_gpus(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ValueError("above 1 it is a whole number: only one GPU is shared")
    return num_gpus


# "*" allows the pages of every origin.
OriginOrAll = Annotated[str, AfterValidator(lambda given: given if given == "*" else require_origin(given))]
GangSplit = Literal["pipeline", "tensor"]
PREDICTORS = "shoal.predictors"  # the extensions that start the workers of a replica, by how they split models
TRACERS = "shoal.tracers"  # the extensions that trace the requests of a replica, by the kind of destination
PROTOCOLS = "shoal.protocols"  # the extensions that answer other requests than REST, such as calls of gRPC
GpuCount = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_require_countable_gpus)]

DETACHED = "detached"  # the lifetime of an endpoint that needs no driver
# Paths of the endpoint that has the root: another one below them would take its requests.
ROOT_PATHS = ("v2", "shoal", "metrics", "openapi.json")

# One full batch is computed while the next one gathers.
BATCHES_PER_REPLICA = 2
MAX_WORKERS = 64
DEFAULT_OBJECTIVE_S = 0.5
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


def describe_taken_name(name: str, owner: str) -> ConfigError:
    """The error for a second endpoint of one name on a cluster. owner: that of the first; "" where it is not known"""
    problem = f"is the name of an endpoint{f' of {owner}' if owner else ''} on this cluster"
    other = f"give another name, or end that one first: `shoal serve delete {name}`"
    remedy = f"change a model that it serves: `shoal serve set {name} A.B=C`; {other}"
    return ConfigError("endpoint.name", name, problem, remedy)


def with_default_values(**values: object) -> BeforeValidator:
    """For a field with an endpoint: fields that a mapping leaves out take these defaults, not EndpointSpec's."""
    return BeforeValidator(lambda given: {**values, **given} if isinstance(given, dict) else given)


def _reject_token(endpoint: EndpointSpec) -> EndpointSpec:
    if endpoint.token is not None:
        raise ValueError("its token is the access token: set $SHOAL_TOKEN, which is not recorded")
    return endpoint


# For the endpoint field of a spec that is recorded.
TOKEN_FROM_ENVIRONMENT = AfterValidator(_reject_token)


class EndpointSpec(Reach):
    """Models behind one address.

    name:           the endpoint's name, which no other on its cluster has: letters, digits, `-`, `_` and `.`
    lifetime:       "driver": it ends with the process that has deployed it; "detached": `shoal serve delete` ends it
    port:           where the ingress listens; 0 is a free port
    route_prefix:   before the protocol's paths: "/NAME" where another endpoint has the root; `deploy` sets it
    grpc_port:      where gRPC listens; None for no gRPC, 0 for a free port
    num_replicas:   processes, each with every model: a fixed number, without `scale`
    scale:          the number of replicas follows the load: `scale.max=4`; None for a fixed number
    model:          options of models that `models` does not name
    models:         options by model name; unspecified ones are as in `model`
    max_body_bytes: a larger request is refused with 413
    show_errors:    callers receive the text of a model's own exception; else a reference to the endpoint's log
    token:          when set, all calls except the server's health need `Authorization: Bearer TOKEN`
    keys:           further callers, their models and rates
    allow_origins:  web pages that may call it with a key, as browsers name their origin: https://app.example; `*`: all
    torch_threads:  threads of one forward; 1 is best for small models under load
    num_workers:    of each replica: above 1, its models are split between so many processes, which no single one
                    could hold
    parallel:       how: by layers one after the other (`pipeline`, the default) or parts of each (`tensor`)
    num_cpus:       CPUs of the cluster that each replica reserves, or each of its workers
    num_gpus:       GPUs, or a fraction of one, that each replica reserves and sees; None: an equal share of the
                    cluster's, of one at most, where a model has `device: cuda`, and else 0
    wait:           how long the first replica (in the loop: all workers) may wait for nodes that an autoscaler adds, as
                    30m or seconds; None: 30m
    drain_s:        how long a stopping replica may finish its requests; see `drain_warning`
    hang_s:         a replica whose forward takes longer than this counts as hung and is replaced, and no request waits
                    longer for its answer
    memory:         of each replica's loaded models, as 2GiB, 512MiB or bytes: a model is then loaded when it is first
                    requested, in place of others if need be; None: every replica has every model
    max_memory_gib: a replica whose process grows beyond this is replaced; None: no limit
    code:           "stored": each version of the registry runs with the code that was registered with it; "installed":
                    a version is refused unless the same code lies on the replicas' hosts: none is run that only the
                    registry has
    trace:          the destination of traces (OpenTelemetry) of requests, from the ingress to the forward; "" for none.
                    See `TraceDestination`: otlp://HOST:PORT, file:FOLDER
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    lifetime: Literal["driver", "detached"] = "driver"
    port: int = Field(default=0, ge=0, le=65535)
    route_prefix: str = Field(default="", pattern=r"^(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    scale: ScaleSpec | None = None
    model: ModelOptions = ModelOptions()
    models: dict[str, ModelOptions] = Field(default_factory=dict)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1, le=1 << 40)
    show_errors: bool = False
    token: SecretStr | None = None
    keys: list[ApiKey] = Field(default_factory=list)
    allow_origins: list[OriginOrAll] = Field(default_factory=list)
    torch_threads: int = Field(default=1, ge=1, le=1024)
    num_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    parallel: GangSplit | None = None
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: GpuCount | None = None
    wait: Duration | None = None
    drain_s: float = Field(default=DRAIN_S, gt=0, le=HARD_STOP_S)
    hang_s: float = Field(default=HANG_S, gt=0)
    memory: Size | None = None
    max_memory_gib: float | None = Field(default=None, gt=0)
    code: Literal["stored", "installed"] = "stored"
    trace: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _models_begin_as_all(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill each of `models` from `model`; its `model_fields_set` has only its explicit fields."""
        explicit = _dump_explicit(values.get("models", {})) if isinstance(values, dict) else {}
        if not isinstance(explicit, dict) or not explicit:
            return handler(values)
        everybodys = _dump_explicit(values.get("model", {}))
        spec = handler({**values, "models": {name: merge(everybodys, each) for name, each in explicit.items()}})
        for name, each in explicit.items():
            spec.models[name] = _mark_explicit(spec.models[name], each)
        return spec

    @field_serializer("models")
    def _keep_explicit(self, models: dict[str, ModelOptions], info: FieldSerializationInfo) -> dict[str, Any]:
        """Serialise only explicit fields, so that a later change of `model`, by overrides or in a record, applies to
        these too."""
        mode = "json" if info.mode == "json" else "python"
        return {name: each.model_dump(mode=mode, exclude_unset=True) for name, each in models.items()}

    @field_validator("token")
    @classmethod
    def _usable_in_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        return None if token is None else require_usable_secret(token)

    @field_validator("trace")
    @classmethod
    def _destination(cls, trace: str) -> str:
        if trace and TraceDestination.parse(trace).kind not in collect_extensions(TRACERS):
            raise ValueError("no library records traces here: leave it out, or install one")
        return trace

    @model_validator(mode="after")
    def _fits_together(self) -> EndpointSpec:
        require_distinct_keys(self.token.get_secret_value() if self.token is not None else None, self.keys)
        if self.grpc_port is not None and "grpc" not in collect_extensions(PROTOCOLS):
            raise ValueError(f"grpc_port = {self.grpc_port}: no library speaks gRPC here: leave it out, or install one")
        if self.grpc_port and self.grpc_port == self.port:
            raise ValueError(f"grpc_port = {self.grpc_port} is where HTTP listens (port): gRPC needs another, or 0")
        if self.scale is not None and self.num_replicas != 1:
            raise ValueError(
                f"num_replicas = {self.num_replicas} is a fixed number: with `scale`, give scale.min instead"
            )
        if self.scale is not None and self.scale.budget is not None and self.may_sleep and self.ingress == EVERY_NODE:
            problem = "scale.budget keeps an endpoint with scale.min = 0 asleep on the head alone"
            raise ValueError(f"{problem}: give scale.min = 1, or ingress: head")
        if self.may_sleep and self.allow_origins:
            problem = "allow_origins: an endpoint that sleeps wants a key, which the preflight of a browser has not"
            raise ValueError(f"{problem}: give scale.min = 1, or leave it out")
        if "*" in self.allow_origins and not self.key_digests:
            problem = "allow_origins = ['*']: any page that a browser here opens would administer the endpoint"
            raise ValueError(f"{problem}: give it a token or keys, or name the pages")
        return self

    @model_validator(mode="after")
    def _workers_share_what_can_be_split(self) -> EndpointSpec:
        if self.num_workers == 1:
            if self.parallel is not None:
                raise ValueError(f"parallel = {self.parallel!r} splits models between workers: give num_workers = 2")
            return self
        problem = f"num_workers = {self.num_workers} splits models between processes on CPUs"
        if self.split not in collect_extensions(PREDICTORS):
            raise ValueError(f"{problem}, which no library does here: give num_workers = 1, or install shoal complete")
        if self.num_gpus or self.needs_cuda:
            raise ValueError(f"{problem}: leave out num_gpus, device: cuda and cuda_graphs")
        if self.memory is not None:
            raise ValueError(f"{problem}: leave out memory, which counts what a replica's own process has")
        if not self.num_cpus:
            raise ValueError(f"{problem}, which reserve them: num_cpus is above 0")
        for name, options in [("model", self.model), *((f"models.{each}", self.models[each]) for each in self.models)]:
            if options.precision != "fp32" or options.compile:
                raise ValueError(f"{problem}: leave out {name}.precision and {name}.compile")
        return self

    def adopt_reach(self, there: Reach) -> EndpointSpec:
        """The spec with the address of an endpoint that it joins. Raises ConfigError for a field that differs."""
        for field in Reach.model_fields:
            own = getattr(self, field)
            if isinstance(own, TlsOptions) and there.tls is not None and not own.name:
                own = own.model_copy(update={"name": there.tls.name})
            if field in self.model_fields_set and own != getattr(there, field):
                problem = "is not that of the endpoint whose address it shares"
                raise ConfigError(f"endpoint.{field}", str(own), problem, OTHER_REACH)
        return self.model_copy(update=dict(there))

    @classmethod
    def explain_absence(cls, name: str) -> str:
        return "the most replicas under load are scale.max, the least scale.min" if name == "max_replicas" else ""

    def options(self, model: str) -> ModelOptions:
        return self.models.get(model, self.model)

    @property
    def split(self) -> GangSplit | None:
        """How models are split between workers; None for a replica that is one process."""
        return (self.parallel or "pipeline") if self.num_workers > 1 else None

    @property
    def needs_cuda(self) -> bool:
        return any(options.needs_cuda for options in (self.model, *self.models.values()))

    @property
    def may_sleep(self) -> bool:
        """Whether it has no replica while it is idle."""
        return self.scale is not None and self.scale.min == 0

    @property
    def key_digests(self) -> tuple[str, ...]:
        """The SHA-256 in hex of the token and of each key; empty where every caller may do everything."""
        secrets = [self.token, *(each.key for each in self.keys)]
        return tuple(digest(each.get_secret_value()).hex() for each in secrets if each is not None)

    @property
    def least_replicas(self) -> int:
        """The least number of replicas; 0 where an idle endpoint has none."""
        return self.num_replicas if self.scale is None else self.scale.min

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.scale is None else self.scale.max

    @property
    def objective_s(self) -> float:
        """What 99 of 100 requests are to be answered within, where the number of replicas follows the load."""
        if self.scale is not None and self.scale.objective_s is not None:
            return self.scale.objective_s
        deadlines = [each.deadline_s for each in (self.model, *self.models.values()) if each.deadline_s is not None]
        return min(deadlines, default=DEFAULT_OBJECTIVE_S)

    @property
    def answer_s(self) -> float:
        return get_answer_s(self.hang_s)

    @property
    def drain_warning(self) -> str:
        """Which answers a replica that stops does not finish; "" for none."""
        if self.drain_s > self.answer_s:
            return ""
        cut = f"a replica that stops, as in a scale-down, cuts answers that take longer, up to {self.answer_s:g} s"
        return f"endpoint.drain_s = {self.drain_s:g}: {cut}. Give more, or a shorter hang_s"

    @property
    def public_host(self) -> str:
        """The host in the endpoint's addresses, for IPv6 with brackets."""
        host = (self.tls.name if self.tls is not None else "") or LOOPBACK.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def url(self) -> str:
        """The root of the protocol."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.public_host}:{self.port}{self.route_prefix}"

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC; "" without gRPC, or before a free port is chosen."""
        return f"{self.public_host}:{self.grpc_port}" if self.grpc_port else ""

    @property
    def max_ongoing_requests(self) -> int:
        """The most requests that Serve admits to a replica: the queues, two batches in progress each, and room for
        refused ones.

        Serve's default of 5 would keep requests out of the batcher, whose queues count and refuse them.
        """
        served = (self.model, *self.models.values())
        return 2 * sum(each.max_queue_size + BATCHES_PER_REPLICA * each.max_rows for each in served)
