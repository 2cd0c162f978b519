"""Every exception that Shoal raises on purpose: one tree, so that `except ShoalError` is always enough.

    ShoalError
    ├── ConfigError            a value given by the user does not fit (field, value, remedy)
    │   └── SpecMismatch       two things that must agree do not (a model and its weights, a run and its resume)
    ├── WireError              a message that breaks the protocol; carries a protocol error code
    │   ├── ProtocolViolation  malformed, oversized, truncated or unknown
    │   └── Refused            the peer answered with an error (bad token, wrong version, ...)
    ├── InvalidSegment         experience that does not fit the run's spec (field, reason)
    ├── ConnectionLost         the peer did not answer within its deadline
    ├── RunChanged             the gateway's address now serves another run, which the client has joined
    ├── Closed                 the object was used after close()
    ├── WeightsError           weights that are missing, damaged or of the wrong shape
    ├── RegistryError          a model, version or alias that does not exist or cannot be written
    ├── CheckpointError        a checkpoint that is missing or damaged
    ├── RunError               a run that does not exist or failed
    ├── InferenceError         a request that an endpoint refuses; carries an HTTP status
    └── ClusterError           Ray could not be started, reached or stopped

Owned by nobody, imported by everybody, imports nothing.
"""

from __future__ import annotations


class ShoalError(Exception):
    """The root of everything that Shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """A value given by the user does not fit. The message names the field, the value and the remedy."""

    def __init__(self, field: str, value: object, problem: str, remedy: str = "") -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        message = f"{field} = {value!r}: {problem}"
        super().__init__(f"{message}. {remedy}" if remedy else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.field, self.value, self.problem, self.remedy))


class SpecMismatch(ConfigError):
    """Two things that must agree do not."""


class WireError(ShoalError):
    """A message broke the protocol. `code` is one of the error codes of docs/protocol.md."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, self.message))


class ProtocolViolation(WireError):
    """A malformed, oversized, truncated or unknown message."""


class Refused(WireError):
    """The peer answered with an error message."""


class InvalidSegment(ShoalError, ValueError):
    """A segment does not fit the run's spec. `reason` is the drop reason under which it is counted."""

    def __init__(self, reason: str, field: str, problem: str) -> None:
        self.reason, self.field, self.problem = reason, field, problem
        super().__init__(f"{field}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reason, self.field, self.problem))


class ConnectionLost(ShoalError, ConnectionError):
    """The peer did not answer within its deadline."""


class RunChanged(ShoalError):
    """The gateway's address now serves another run. The client has joined it: read its spec and weights again."""


class Closed(ShoalError):
    """The object was used after close()."""


class WeightsError(ShoalError):
    """Weights are missing, damaged or of the wrong shape."""


class RegistryError(ShoalError):
    """A model, version or alias does not exist or cannot be written."""


class CheckpointError(ShoalError):
    """A checkpoint is missing or damaged."""


class RunError(ShoalError):
    """A run does not exist or failed."""


class InferenceError(ShoalError):
    """A request that an endpoint refuses; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.status, self.message))


class ClusterError(ShoalError):
    """Ray could not be started, reached or stopped. The message says what to do."""
