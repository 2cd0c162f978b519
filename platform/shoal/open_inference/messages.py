"""The messages of the Open Inference Protocol v2 and of its extensions in JSON.

Called by the REST application, by the gRPC service (statistics, repository) and by the client. Tensors' values are left
undecoded: `json_tensors` and `binary_tensors` convert them to arrays. Unknown fields are ignored, as the protocol
demands; the decoder raises for a field of the wrong type.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

Parameters = dict[str, bool | int | float | str]
NO_DATA = msgspec.Raw(b"")
PLATFORM = "shoal_pytorch"  # of every model, as its metadata say


class TensorMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input or output of a model.

    shape:   the first dimension is the batch, if any; -1 is a variable one
    columns: names along the last dimension, an addition to the protocol; absent without names
    kind:    number, word, date or truth of an input that is a column of a table, which may have gaps (NaN, or b"" for
             words); an addition, too; absent for a plain tensor
    """

    name: str
    datatype: str
    shape: list[int]
    columns: list[str] = []
    kind: str = ""


class TensorDescription(Protocol):
    """An input or output, as in the registry and the protocol. `shape[0]` is the batch; -1 is any size."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def columns(self) -> list[str]: ...
    @property
    def kind(self) -> str: ...


def describe_tensor(spec: TensorDescription) -> str:
    """`FP32 [any, 64]`."""
    sizes = ", ".join("any" if size == -1 else str(size) for size in spec.shape)
    return f"{spec.datatype} [{sizes}]"


class ModelMetadata(msgspec.Struct):
    """A model's inputs and outputs; `versions` are the available ones, ascending."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct):
    """The server and its extensions of the protocol."""

    name: str
    version: str
    extensions: list[str]


class InputTensor(msgspec.Struct, omit_defaults=True):
    """One input of a request. `data` is decoded once the datatype is known; absent when the bytes follow."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: msgspec.Raw = NO_DATA


class RequestedOutput(msgspec.Struct, omit_defaults=True):
    """An output that the client requests; without any, it gets all."""

    name: str
    parameters: Parameters | None = None


class InferRequest(msgspec.Struct, omit_defaults=True):
    """The JSON object of an inference request."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[RequestedOutput] | None = None


class OutputTensor(msgspec.Struct, omit_defaults=True):
    """One output of an answer; `data` is flat, row-major, and absent when the bytes follow."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: list[Any] | None = None


class InferResponse(msgspec.Struct, omit_defaults=True):
    """The JSON object of an answer."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None
    parameters: Parameters | None = None


class Duration(msgspec.Struct, frozen=True):
    """A count and a total time."""

    count: int = 0
    ns: int = 0


class InferenceStatistics(msgspec.Struct):
    """Durations of requests: successful ones, failed ones, and the parts of successful ones."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class BatchStatistics(msgspec.Struct):
    """Durations of the forwards of one batch size."""

    batch_size: int
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()


class VersionStatistics(msgspec.Struct):
    """The statistics of one version since the answering replica started.

    last_inference:  milliseconds since the epoch
    inference_count: answered rows; execution_count: forwards
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class Statistics(msgspec.Struct):
    """The answer of the statistics extension."""

    model_stats: list[VersionStatistics]


class IndexRequest(msgspec.Struct):
    """A request for the repository's index. `ready`: only versions that can answer now."""

    ready: bool = False


class IndexedModel(msgspec.Struct):
    """One version of a model in the repository's index. `state`: READY, LOADING, UNLOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


class RepositoryRequest(msgspec.Struct, omit_defaults=True):
    """The body of a load or an unload."""

    parameters: Parameters | None = None


class Error(msgspec.Struct, omit_defaults=True):
    """The body of every answer that is not a success. `field`: the column of a row that is at fault."""

    error: str
    field: str = ""
