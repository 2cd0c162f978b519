"""One worker's connection with one server: where the weights come from, and where a gradient goes.

On one host both lie in memory that the server shares. Elsewhere, or with `sync.transport=frames`, they travel in the
calls. Owned by the worker's synchronizer. A gradient is compressed once, whatever must be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.extend.sync import RpcClient
from shoal.libs.asynchronous.config import ServersConfig
from shoal.libs.asynchronous.messages import FetchWeights, GetAddress, PushGradient
from shoal.libs.asynchronous.parameter_server.compression import GradientCompressor, count_payload_bytes
from shoal.libs.asynchronous.parameter_server.partition import Partition
from shoal.libs.asynchronous.shared_memory import SharedWeights


class ServerLink:
    """Worker `worker` and server `server` of `partition`.

    memory:      the server's, if this process can open it
    incarnation: of the server, when the link was opened
    """

    def __init__(self, client: RpcClient, partition: Partition, server: int, worker: int, spec: ServersConfig) -> None:
        self.client, self._spec = client, spec
        self._partition = partition
        self._server = server
        self._worker = worker
        self.memory: SharedWeights | None = None
        self.incarnation = -1
        self._compressors: dict[tuple[int, int], GradientCompressor] = {}  # by the range that they compress
        self._vector = torch.empty(0)  # [size], when a gradient was needed in one piece
        self._payload: bytes | None = None  # of the present gradient
        self._gradients: Sequence[Tensor | None] = ()
        self._chosen: range | None = None  # the parameters whose gradients are sent
        self._range = 0, 0  # of them in the server's vector
        self.num_bytes = 0  # of the present gradient, as it is sent
        self.num_pushed_bytes = self.num_pulled_bytes = 0  # that were written for the server, and read from it

    def open(self) -> list[list[int]]:
        """Connect with the server's present life; returns the shapes of its parameters.

        Raises ConfigError when the memory must be shared and cannot be.
        """
        self.close_memory()
        server = self.client.call(GetAddress())
        self.incarnation = server.incarnation
        if self._spec.transport != "frames":
            try:
                self.memory = SharedWeights.open(server.memory)
            except OSError as error:
                if self._spec.transport == "shared_memory":
                    problem = f"worker {self._worker} cannot open the memory of server {self._server} ({error})"
                    remedy = "use sync.transport=auto when they are on different hosts"
                    raise ConfigError("sync.transport", "shared_memory", problem, remedy) from error
        return server.parameters

    # -- a gradient

    def take(self, gradients: Sequence[Tensor | None], chosen: range | None = None) -> None:
        """The worker's next gradient, of all parameters or the chosen ones. It may not change before `finish`."""
        self._gradients = gradients
        self._payload = None
        self._chosen = chosen
        self._range = self._find_range(chosen)
        size = self._range[1] - self._range[0]
        self.num_bytes = count_payload_bytes(self._spec.compression, size, self._spec.top_k) if size else 0

    def _find_range(self, chosen: range | None) -> tuple[int, int]:
        size = self._partition.get_size(self._server)
        return (0, size) if chosen is None else self._partition.find_range(self._server, chosen)

    def send(self, incarnation: int) -> None:
        """Begin to bring it to the server; `finish` ends it. Again after `open`, when the server has died meanwhile.

        incarnation: of the worker
        """
        begin, end = self._range
        if self._payload is None and (self.memory is None or self._spec.compression != "none"):
            self._payload = self._compress()
        if self.memory is None:
            assert self._payload is not None
            self.num_pushed_bytes += len(self._payload)
            self.client.send(PushGradient(self._worker, incarnation, self._payload, begin, end))
            return
        gradient = self.memory.gradients[self._worker]
        if self._payload is None:
            self.num_pushed_bytes += self._partition.write(self._server, self._gradients, gradient, self._chosen)
        else:
            self.num_pushed_bytes += gradient[begin:end].copy_(self._vector[begin:end]).nbytes

    def _compress(self) -> bytes:
        begin, end = self._range
        if begin == end:  # the server has none of the chosen parameters
            return b""
        if not len(self._vector):
            self._vector = torch.empty(self._partition.get_size(self._server))
        self._partition.write(self._server, self._gradients, self._vector, self._chosen)
        if self._range not in self._compressors:
            compressor = GradientCompressor(self._spec.compression, end - begin, self._spec.top_k)
            self._compressors[self._range] = compressor
        return self._compressors[self._range].compress(self._vector[begin:end])

    def finish(self) -> None:
        """The server has the gradient."""
        if self.memory is None:
            self.client.receive(PushGradient)

    # -- weights

    def copy_shared_weights(self, version: int, parameters: Sequence[Tensor], chosen: range | None = None) -> bool:
        """Whether the server's memory had the version until it was copied into the parameters."""
        assert self.memory is not None
        buffer = self.memory.find_buffer(version)
        if buffer is None:
            return False
        self.num_pulled_bytes += self._partition.read(self._server, buffer, parameters, chosen)
        return version in self.memory.get_versions()

    def fetch(self, version: int, incarnation: int, chosen: range | None = None) -> None:
        """Begin to fetch what is held of this version, of all parameters or the chosen ones."""
        self.client.send(FetchWeights(self._worker, version, incarnation, *self._find_range(chosen)))

    def copy_weights(self, weights: bytes, parameters: Sequence[Tensor], chosen: range | None = None) -> None:
        """Copy the part of the server's vector that was fetched, as bytes, into the parameters."""
        self.num_pulled_bytes += len(weights)
        if weights:
            begin, end = self._find_range(chosen)
            vector = torch.empty(self._partition.get_size(self._server))
            vector[begin:end] = torch.frombuffer(bytearray(weights), dtype=torch.float32)
            self._partition.read(self._server, vector, parameters, chosen)

    def close_memory(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def close(self) -> None:
        """Idempotent."""
        self.close_memory()
        self.client.close()
