"""The interface between the protocols and the models: a prediction, callers, and the models' protocols.

Made by the protocol applications (REST, gRPC), answered by a `ServedModelProtocol`. Knows no HTTP, gRPC, torch or Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Protocol, Self

from shoal.batching.batcher import PendingBatch, Prediction
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.open_inference.messages import VersionStatistics
from shoal.registry.manifest import Signature
from shoal.serve.messages.auth_failures import MAX_CHARS
from shoal.serve.messages.infer_call import Arrays, InferCall, Outputs
from shoal.serve.spec.model_options import ModelOptions

EMPTY_BYTES = getsizeof(b"")
CLIENT_GONE = 499  # the status of a request whose client has disconnected
_FROM = " from "
_PROGRAM = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


class RequestTraceProtocol(Protocol):
    """The span of one request: a context manager that ends it.

    submitted_ns:     when it entered a queue
    cancelled_status: the status of a cancelled request; `CLIENT_GONE` unless it is set
    context:          by which a batch's span names it
    """

    submitted_ns: int
    cancelled_status: int
    context: Any

    def record_prediction(self, prediction: Prediction[Outputs], num_rows: int) -> None:
        """Record a model's answer and its times."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...


class TracerProtocol(Protocol):
    """Traces the requests of a replica. A library has one for each kind of destination: see `EndpointSpec.trace`."""

    def start_request(
        self, name: str, model: str, traceparent: str = "", tracestate: str = ""
    ) -> RequestTraceProtocol | None:
        """Start the span of a new request; None when it is not traced."""
        ...

    def record_batch(self, model: str, batch: PendingBatch[Any, InferCall, Outputs]) -> None:
        """Record a batch that was just computed, when any of its requests is traced."""
        ...

    def close(self) -> None:
        """Export the waiting spans. Idempotent."""
        ...


def size_bytes(inputs: Arrays) -> int:
    """The bytes of a request's inputs in memory, strings included."""
    total = 0
    for array in inputs.values():
        total += array.nbytes
        if array.dtype.hasobject:
            total += array.size * EMPTY_BYTES + sum(map(len, array.ravel().tolist()))
    return total


@dataclass(frozen=True, slots=True)
class RepositoryEntry:
    """One line of the repository index: a version that is or could be served. `state` as in the protocol."""

    name: str
    version: str
    state: str  # READY, LOADING, UNLOADING, UNAVAILABLE
    reason: str = ""


class ServedModelProtocol(Protocol):
    """One model of an endpoint on one replica."""

    name: str
    signature: Signature
    options: ModelOptions

    @property
    def version(self) -> int:
        """The version that answers requests without one; 0 before any weights."""
        ...

    @property
    def versions(self) -> list[int]:
        """Every version that can answer now, ascending."""
        ...

    def statistics(self) -> list[VersionStatistics]:
        """The statistics of each version on this replica since it started, ascending."""
        ...

    async def infer(self, call: InferCall) -> Prediction[Outputs]:
        """Answer a call. Enforces `call.deadline_s` itself: no caller has a timer for it.

        Raises InferenceError (404 version, 429 full or over its rate, 500 the model, 503 no weights, 504 late).
        """
        ...


class ControllerApi(Protocol):
    """What clients ask of an endpoint's controller, through any replica. `by`: see `format_origin`.

    Every method raises ConnectionLost while the controller is away.
    """

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        """Load a registered model on every replica; returns when all have it. Raises InferenceError (400, 404, 503)."""
        ...

    async def unload(self, name: str, by: str) -> None:
        """Unload a model on every replica, once its queued requests are answered. Raises InferenceError (400, 404)."""
        ...

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        """Change a rollout: see `ChangeRequest`. Raises InferenceError (400, 404, 409, 503)."""
        ...

    async def status(self) -> dict[str, Any]:
        """The endpoint as the controller sees it: an `EndpointStatus` of `shoal.client.endpoint_status` as a dict."""
        ...


class ModelManagerProtocol(Protocol):
    """The models of an endpoint on one replica."""

    @property
    def controller(self) -> ControllerApi: ...

    @property
    def is_ready(self) -> bool:
        """Whether this replica answers for a model; one that loads beside the others does not make it unready."""
        ...

    def list_models(self) -> Sequence[ServedModelProtocol]: ...

    def get_model(self, name: str) -> ServedModelProtocol:
        """The model of this name. Raises InferenceError (404) that lists the models."""
        ...

    def get_peer_model(self, name: str, token: bytes, generation: bytes) -> ServedModelProtocol:
        """The model for a request of another replica, which is answered here or not at all.

        generation: of the plan by which this replica has the model
        Raises InferenceError: 401 without the endpoint's token, 404.
        """
        ...

    def list_repository(self) -> list[RepositoryEntry]: ...

    async def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer:
        """Act, reward or end for a user of a live model that learns from its users. Raises InferenceError (404 for any
        other, and as `EpisodeService.take`)."""
        ...


@dataclass(slots=True)
class Caller:
    """A caller: the name of its key (fairness, metrics, audit), and whether it is an administrator."""

    name: str
    administrator: bool = False
    models: frozenset[str] | None = None  # None: all

    def can_see(self, model: str) -> bool:
        """Whether its key is for this model, or the one that `NAME:PART` is a part of."""
        return self.models is None or not self.models.isdisjoint((model, model.partition(":")[0]))


ANONYMOUS = Caller("", models=frozenset())  # for what takes no key


class Disconnected(Exception):
    """The client has disconnected."""


class Relayed(Disconnected):
    """Another replica has answered the client: nothing is left to do."""


def format_origin(caller: str, address: str, program: str = "") -> str:
    """Format the caller and its address as one string: `administrator from 127.0.0.1`.

    program: that asks on the caller's behalf, by its own word: `administrator (console)`; left out unless it is a word
    """
    by = f"{caller} ({program})" if _PROGRAM.fullmatch(program) else caller
    return f"{by}{_FROM}{address[:MAX_CHARS]}" if address else by


def parse_origin(origin: str) -> tuple[str, str]:
    """The two parts of a string from `format_origin`."""
    caller, _, address = origin.partition(_FROM)
    return caller, address
