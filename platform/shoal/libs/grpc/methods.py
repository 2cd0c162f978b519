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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import Message
from grpc import StatusCode

from shoal.errors import InferenceError
from shoal.extend.serve import FORWARDED_FROM_HEADER, RouteAction
from shoal.libs.grpc import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
PATH_PREFIX = f"/{SERVICE}/"
GRPC_STATUSES = {
    **dict.fromkeys((400, 405, 422), StatusCode.INVALID_ARGUMENT),
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.FAILED_PRECONDITION,
    **dict.fromkeys((413, 429, 431), StatusCode.RESOURCE_EXHAUSTED),
    **dict.fromkeys((415, 501), StatusCode.UNIMPLEMENTED),
    503: StatusCode.UNAVAILABLE,
    **dict.fromkeys((408, 504), StatusCode.DEADLINE_EXCEEDED),
}
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


@dataclass(slots=True)
class GrpcCall:
    """One call: its metadata, and the status and trailing metadata after its answer.

    deadline_s: `time.monotonic()` until which the client waits; None for no limit
    """

    metadata: Mapping[bytes, bytes]
    deadline_s: float | None = None
    trailing: list[tuple[bytes, bytes]] = field(default_factory=list)
    error: InferenceError | None = None

    @property
    def credentials(self) -> tuple[bytes, bytes]:
        """The caller's key and address."""
        return self.metadata.get(b"authorization", b""), self.metadata.get(FORWARDED_FROM_HEADER, b"")

    def set_error(self, error: InferenceError) -> None:
        """Set the status and message of an error."""
        self.error = error
        self.trailing = (
            [] if error.retry_after_s is None else [(b"retry-after", b"%d" % math.ceil(error.retry_after_s))]
        )

    def build_trailers(self) -> list[tuple[bytes, bytes]]:
        """Build the trailers: the status, its message and the trailing metadata."""
        if self.error is None:
            return [(b"grpc-status", b"0"), *self.trailing]
        status: int = GRPC_STATUSES.get(self.error.status, StatusCode.INTERNAL).value[0]
        message = urllib.parse.quote(str(self.error)[:MAX_DETAILS_CHARS], safe=_PRINTABLE)[:MAX_DETAILS_CHARS]
        message = re.sub("%[0-9A-F]?$", "", message)  # an escape that was cut
        return [(b"grpc-status", b"%d" % status), (b"grpc-message", message.encode()), *self.trailing]


class GrpcMethod(NamedTuple):
    """One method of the service."""

    name: str
    request: type[Message]
    response: type[Message]
    streams: bool


METHODS = {
    each.name: GrpcMethod(
        each.name, getattr(pb, each.input_type.name), getattr(pb, each.output_type.name), each.server_streaming
    )
    for each in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}
# Of those that are no inferences: what REST does, and the JSON of the message, where it is around that of the answer.
ACTIONS = {
    "ServerLive": RouteAction.LIVE,
    "ServerReady": RouteAction.READY,
    "ServerMetadata": RouteAction.SERVER,
    "ModelReady": RouteAction.MODEL_READY,
    "ModelMetadata": RouteAction.MODEL,
    "ModelConfig": RouteAction.MODEL_CONFIG,
    "ModelStatistics": RouteAction.STATISTICS,
    "RepositoryIndex": RouteAction.INDEX,
    "RepositoryModelLoad": RouteAction.LOAD,
    "RepositoryModelUnload": RouteAction.UNLOAD,
}
FORMS = {"ModelConfig": b'{"config": %b}', "RepositoryIndex": b'{"models": %b}'}
