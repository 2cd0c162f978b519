"""The synchronizer of a worker in asynchronous training: pulls weights, pushes gradients, and waits only if it must.

Owns the worker's connections. Called by the Trainer. On one host weights and gradients lie in shared memory, so a step
costs one message to the controller and one to each server. Where a server's memory cannot be opened, they travel in the
messages: the controller has every server hold the weights of one version for the worker, which fetches
them, whatever updates come meanwhile.

A ServerLink is the connection with one server. A gradient is compressed once, whatever must be sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError, SpecMismatch, TrainError
from shoal.extend.sync import Connection, Replica, RpcClient, Traffic
from shoal.extend.train import list_parameters
from shoal.libs.asynchronous.clock import Push
from shoal.libs.asynchronous.config import ServersConfig
from shoal.libs.asynchronous.controlled import ControlledSync
from shoal.libs.asynchronous.messages import (
    DumpState,
    FetchWeights,
    GetAddress,
    GetVersion,
    HoldWeights,
    Join,
    LoadServer,
    LocateServer,
    Prepare,
    PullVersions,
    PushAgain,
    PushGradient,
    SetSteps,
    TakeSnapshot,
)
from shoal.libs.asynchronous.parameter_server.compression import GradientCompressor, count_payload_bytes
from shoal.libs.asynchronous.parameter_server.partition import (
    ParameterSlice,
    Partition,
    describe_parameters,
    plan_partition,
)
from shoal.libs.asynchronous.parameter_server.server import SETTINGS
from shoal.libs.asynchronous.shared_memory import WRITING, SharedWeights


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
                self.memory = SharedWeights(server.memory)
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


class ParameterServerSync(ControlledSync):
    """A worker of a run with servers.

    optimizer:       its parameters get the weights, and its settings go with each push; its state is the servers'
    get_step_weight: of the newest gradients, as `ParallelModel.step_weight`
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spec: ServersConfig,
        connection: Connection,
        get_step_weight: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(connection)
        self._optimizer, self._partition = optimizer, plan_partition(optimizer, len(connection.servers))
        self._parameters = list_parameters(optimizer)
        self._spec: ServersConfig = spec
        self._links: list[ServerLink] = []
        for index, server in enumerate(connection.servers):
            locate = partial(self._controller.call, LocateServer(index))
            client = RpcClient(server or locate(), connection.timeout_s, keys=connection.keys, locate=locate)
            self._links.append(ServerLink(client, self._partition, index, connection.index, spec))
        self._needed = self._version = self._steps = 0
        self._accumulate = self._num_batches = spec.micro_batches  # on average, and in the present step
        self._sums: list[Tensor | None] = []  # of the gradients of the micro-batches so far, by their weights
        self._num_done, self._weight = 0, 0.0  # micro-batches; the sum of their weights
        self._batch_began_s = self._computed_s = 0.0  # this micro-batch; all of the step
        self._push: Push  # the newest
        self.get_step_weight = get_step_weight

    def begin(self, step: int) -> int:
        self._open_servers()
        joined = self._controller.call(Join(self._worker, self.is_chief))
        self._incarnation, self._clock = joined.incarnation, joined.clock
        self._needed, self._steps = joined.version, joined.steps
        if not joined.has_weights:
            self._steps = step // self._accumulate
            version = torch.tensor(self._controller.call(GetVersion(self._steps)))
            for server, link in enumerate(self._links):
                weights = torch.empty(self._partition.get_size(server))
                self._partition.write(server, [each.detach() for each in self._parameters], weights)
                state = {"version": version, "weights": weights}
                for index, piece in enumerate(self._partition.pieces[server]):
                    stored = self._optimizer.state.get(self._parameters[piece.parameter], {})
                    for name, each in stored.items():
                        state[f"{index}.{name}"] = each.reshape(-1)[piece.begin : piece.end] if each.ndim else each
                link.client.call(LoadServer(safetensors.torch.save(state)))
            self._needed = self._controller.call(SetSteps(self._steps))
        self._pull(self._parameters)
        return self._accumulate * self._steps

    def _open_servers(self) -> None:
        """Open every server's memory: at the beginning, and again when one of them has begun another life."""
        for link in self._links:
            if link.open() != describe_parameters(self._optimizer):
                problem = "has parameters of other shapes than the servers'"
                raise SpecMismatch(
                    "task", f"worker {self._worker}", problem, "every worker needs the same Task and args"
                )

    def before_step(self) -> None:
        self._leave_if_noticed()
        self._batch_began_s = time.perf_counter()
        if not self._num_done:  # not in the middle of an accumulation
            self._pull(self._parameters)
        self._batch_began_s = time.perf_counter()

    def _pull(self, parameters: Sequence[Tensor], chosen: range | None = None) -> None:
        """The newest weights that all servers have, and at least those of the last update of this worker.

        chosen: the parameters that are pulled; None: all
        """
        began_s = time.perf_counter()
        while not (self._copy_shared if all(link.memory for link in self._links) else self._fetch)(parameters, chosen):
            pass
        self.waited_s += time.perf_counter() - began_s

    def _copy_shared(self, parameters: Sequence[Tensor], chosen: range | None) -> bool:
        """Copy the weights out of the servers' memory; whether they had a version in common until it was copied."""
        for link in self._links:
            link.client.send(PullVersions(self._worker, self._needed))
        answers = [link.client.receive(PullVersions) for link in self._links]
        if [each.incarnation for each in answers] != self._server_incarnations:
            self._open_servers()
            return False
        version = max(set.intersection(*(set(each.versions) for each in answers)), default=WRITING)
        with torch.no_grad():
            if version >= self._needed and all(
                link.copy_shared_weights(version, parameters, chosen) for link in self._links
            ):
                self._version = version
                return True
        self._needed = max(self._needed, *(min(each.versions) for each in answers))  # a server does not go back
        return False

    def _fetch(self, parameters: Sequence[Tensor], chosen: range | None) -> bool:
        """Take the weights of one version in messages; whether every server still lived that held them."""
        marked = self._controller.call(HoldWeights(self._worker))
        for link, incarnation in zip(self._links, marked.server_incarnations, strict=True):
            link.fetch(marked.version, incarnation, chosen)
        answers = [link.client.receive(FetchWeights) for link in self._links]
        if marked.server_incarnations != self._server_incarnations:
            self._open_servers()
        if None in answers:
            return False
        with torch.no_grad():
            for link, weights in zip(self._links, answers, strict=True):
                link.copy_weights(weights or b"", parameters, chosen)
        self._version = marked.version
        return True

    @property
    def _server_incarnations(self) -> list[int]:
        """Of the servers, as this worker knows them."""
        return [link.incarnation for link in self._links]

    def apply_gradients(self) -> int:
        """Push the mean gradient of the step's micro-batches, after the last of them."""
        gradients = [parameter.grad for parameter in self._parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise TrainError("a parameter server takes dense gradients: use sparse=False, or sync=all_reduce")
        self.num_steps += 1
        self._num_done += 1
        weight = self.get_step_weight()
        self._weight += weight
        self._computed_s += time.perf_counter() - self._batch_began_s
        if self._num_batches > 1:
            self._sums = self._sums or [None] * len(gradients)
            for index, each in enumerate(gradients):
                before = self._sums[index]
                if before is None:
                    self._sums[index] = None if each is None else each.detach() * weight
                elif each is not None:
                    before.add_(each, alpha=weight)
            if self._num_done < self._num_batches:
                return self._accumulate * self._steps
            gradients = [None if each is None else each / (self._weight or 1.0) for each in self._sums]
        self._begin_push(gradients, weight=self._weight, batch_s=self._computed_s / self._num_done)
        self._finish_push()
        self._sums = []
        self._num_done = 0
        self._weight = 0.0
        self._computed_s = 0.0
        return self._accumulate * self._steps

    def _begin_push(
        self,
        gradients: Sequence[Tensor | None],
        chosen: range | None = None,
        num_steps: int = 1,
        weight: float = 1.0,
        batch_s: float = 0.0,
    ) -> None:
        """Bring gradients to all servers, of all parameters or the chosen ones. They may not change until the end."""
        began_s = time.perf_counter()
        for link in self._links:
            link.take(gradients, chosen)
        self._push = Push(
            self._worker,
            self._incarnation,
            self._clock,
            self._version,
            absent=[index for index, gradient in enumerate(gradients) if gradient is None],
            settings=[{name: each[name] for name in SETTINGS if name in each} for each in self._optimizer.param_groups],
            num_bytes=sum(link.num_bytes for link in self._links),
            num_steps=num_steps,
            weight=weight,
            batch_s=batch_s,
        )
        self._bring_push()
        self.waited_s += time.perf_counter() - began_s

    def _bring_push(self) -> None:
        for link in self._links:
            link.send(self._push.incarnation)
        for link in self._links:
            link.finish()
        push = msgspec.structs.replace(self._push, server_incarnations=self._server_incarnations)
        self._pushes.send(Prepare(push))

    def _finish_push(self) -> None:
        """Wait until this worker may go on."""
        began_s = time.perf_counter()
        while isinstance(answer := self._pushes.receive(Prepare), PushAgain):  # a server died meanwhile
            self._open_servers()
            self._bring_push()
        self.waited_s += time.perf_counter() - began_s
        if answer is None:
            self._end_as_lost()
        self._needed = answer.version
        self._clock = answer.clock
        self._steps = answer.steps
        self._is_stopping, self._num_batches = answer.is_stopping, answer.num_batches

    def measure_traffic(self) -> Traffic:
        """Gradients that this worker has written to servers, and weights that it has read."""
        pushed = sum(link.num_pushed_bytes for link in self._links)
        pulled = sum(link.num_pulled_bytes for link in self._links)
        predicted = self._spec.predict_bytes(sum(each.numel() for each in self._parameters))
        return Traffic(self.num_steps, pushed, pulled, predicted)

    def collect_state(self) -> None:
        """The state of one version, from all servers, into the chief's model and optimiser."""
        states: list[bytes | None] = [None]
        while None in states:  # once, unless a server dies meanwhile
            marked = self._controller.call(TakeSnapshot())
            for link, incarnation in zip(self._links, marked.server_incarnations, strict=True):
                link.client.send(DumpState(marked.version, incarnation))
            states = [link.client.receive(DumpState) for link in self._links]
        for index, encoded in enumerate(states):
            assert encoded is not None
            state = safetensors.torch.load(encoded)
            with torch.no_grad():
                self._partition.read(index, state.pop("weights"), self._parameters)
            for name, value in state.items():
                number, is_of_optimizer, stored = name.partition(".")
                if is_of_optimizer:  # not the version or late gradients
                    self._join_state(self._partition.pieces[index][int(number)], stored, value)
        self._version = marked.version

    def _join_state(self, piece: ParameterSlice, name: str, value: Tensor) -> None:
        """Put a server's piece of what the optimiser stores for a parameter into this one's."""
        parameter = self._parameters[piece.parameter]
        own = self._optimizer.state[parameter]
        if not value.ndim:
            own[name] = value
            return
        if name not in own or own[name].shape != parameter.shape:
            own[name] = torch.zeros_like(parameter, dtype=value.dtype)
        own[name].view(-1)[piece.begin : piece.end] = value

    def close(self) -> None:
        for link in self._links:
            link.close()
        super().close()


def make_server_sync(replica: Replica) -> ParameterServerSync:
    spec, model = cast(ServersConfig, replica.config), replica.model
    connection = replica.require_connection()
    return ParameterServerSync(replica.optimizer, spec, connection, lambda: float(model.step_weight))
