"""The methods of the gRPC service, and a call's metadata and final status.

Called by `app`. A method's error becomes a status:

    400 405 422 INVALID_ARGUMENT     401 UNAUTHENTICATED      403 PERMISSION_DENIED   404 NOT_FOUND
    409 FAILED_PRECONDITION          413 429 RESOURCE_EXHAUSTED                       500 INTERNAL
    415 501 UNIMPLEMENTED            503 UNAVAILABLE          408 504 DEADLINE_EXCEEDED

A rejection with a known time to retry has `retry-after` (seconds) in its trailing metadata.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from grpc import StatusCode

from shoal.errors import InferenceError
from shoal.libs.grpc import inference_pb2 as pb

if TYPE_CHECKING:
    from shoal.libs.grpc.service import InferenceServicer

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
PATH_PREFIX = f"/{SERVICE}/"
GRPC_STATUSES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.INVALID_ARGUMENT,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.RESOURCE_EXHAUSTED,
    415: StatusCode.UNIMPLEMENTED,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    431: StatusCode.RESOURCE_EXHAUSTED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
RAW_BYTES_METHODS = frozenset({"ModelInfer", "ModelStreamInfer"})
UNAUTHENTICATED_METHODS = frozenset({"ServerLive", "ServerReady"})  # to every caller
MAX_DETAILS_CHARS = 2000  # sent in a header block, which proxies limit
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # characters that `grpc-message` takes unescaped
# Methods of stock clients that are not served, with the error's text.
UNSUPPORTED_METHODS = {
    **{
        f"{memory}SharedMemory{action}": "shared memory"
        for memory in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    "TraceSetting": "changing what is traced",
    "LogSettings": "changing what is logged",
}


class GrpcCall:
    """One call: its metadata, and the status and trailing metadata after its answer."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.metadata = dict(headers)
        self.trailing: list[tuple[bytes, bytes]] = []
        self._error: InferenceError | None = None

    def set_error(self, error: InferenceError) -> None:
        """Set the status and message of an error."""
        self._error = error
        self.trailing = (
            [] if error.retry_after_s is None else [(b"retry-after", b"%d" % math.ceil(error.retry_after_s))]
        )

    def build_trailers(self) -> list[tuple[bytes, bytes]]:
        """Build the trailers: the status, its message and the trailing metadata."""
        if self._error is None:
            return [(b"grpc-status", b"0"), *self.trailing]
        status: int = GRPC_STATUSES.get(self._error.status, StatusCode.INTERNAL).value[0]
        message = urllib.parse.quote(str(self._error)[:MAX_DETAILS_CHARS], safe=_PRINTABLE)[:MAX_DETAILS_CHARS]
        message = re.sub("%[0-9A-F]?$", "", message)  # an escape that was cut
        return [(b"grpc-status", b"%d" % status), (b"grpc-message", message.encode()), *self.trailing]


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """One method of the service. `attribute` is its name in `InferenceServicer`.

    takes_bytes: it takes and returns messages as bytes
    """

    name: str
    attribute: str
    request: type[Message]
    response: type[Message]
    streams: bool
    takes_bytes: bool

    def bind(self, servicer: InferenceServicer) -> Callable[..., Any]:
        """The servicer's method."""
        method: Callable[..., Any] = getattr(servicer, self.attribute)
        return method


METHODS = {
    each.name: GrpcMethod(
        each.name,
        re.sub(r"(?<!^)(?=[A-Z])", "_", each.name).lower(),
        getattr(pb, each.input_type.name),
        getattr(pb, each.output_type.name),
        each.server_streaming,
        each.name in RAW_BYTES_METHODS,
    )
    for each in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}
