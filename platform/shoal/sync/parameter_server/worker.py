"""The synchronizer of a worker in asynchronous training: pulls weights, pushes gradients, and waits only if it must.

Owns the worker's connections and its view of the servers' memory. Called by the Trainer. On one host weights and
gradients lie in shared memory, so a step costs one message to the controller and one to each server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import SpecMismatch, TrainError
from shoal.sync.parameter_server.clock import Push, Settings
from shoal.sync.parameter_server.controller import AGAIN
from shoal.sync.parameter_server.partition import ParameterSlice, describe_parameters, plan_partition
from shoal.sync.parameter_server.rpc import RpcClient
from shoal.sync.parameter_server.server import SETTINGS
from shoal.sync.parameter_server.shared_weights import WRITING, MemoryAddress, SharedWeights
from shoal.sync.rank_signals import RankSignals
from shoal.sync.synchronizer import Synchronizer

EXCHANGE_S = 0.25  # between two exchanges of signals


class ParameterServerSync(Synchronizer):
    """Worker `worker` of a run; the chief, which evaluates, saves and reports, is worker 0.

    optimizer: its parameters get the weights, and its settings go with each push; its state is the servers'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        worker: int,
        controller: str,
        servers: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._optimizer, self._partition = optimizer, plan_partition(optimizer, len(servers))
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._worker, self.is_chief = worker, worker == 0
        self._controller = RpcClient(controller, timeout_s)
        self._servers = [RpcClient(server, timeout_s) for server in servers]
        self._memories: list[SharedWeights] = []
        self._lives: list[int] = []  # of the servers whose memory is mapped
        self._incarnation = self._clock = self._needed = self._version = self._steps = 0
        self._is_stopping = False
        self._exchanged_s = time.monotonic()
        self.waited_s = 0.0

    def begin(self, step: int) -> int:
        self._open_memories()
        joined = self._controller.call("join", self._worker, self.is_chief)
        self._incarnation, self._clock, self._needed, self._steps, has_weights = joined
        if not has_weights:
            self._load_servers(step)
            self._steps = step
        self.before_step()
        return self._steps

    def _open_memories(self) -> None:
        """Map the memory of every server: at the beginning, and again when one of them has begun another life."""
        for memory in self._memories:
            memory.close()
        self._memories, self._lives = [], []
        for server in self._servers:
            address, life, parameters = server.call("address")
            self._lives.append(life)
            if parameters != describe_parameters(self._optimizer):
                problem = "has parameters of other shapes than the servers'"
                raise SpecMismatch(
                    "task", f"worker {self._worker}", problem, "every worker needs the same Task and args"
                )
            self._memories.append(SharedWeights.open(MemoryAddress(*address)))

    def before_step(self) -> None:
        """Pull: the newest weights that all servers have, and at least those of the last update of this worker."""
        began_s = time.perf_counter()
        needed = self._needed
        while True:
            for server in self._servers:
                server.send("pull", self._worker, needed)
            answers = [server.receive() for server in self._servers]
            if [life for life, _ in answers] != self._lives:
                self._open_memories()
                continue
            common = set.intersection(*(set(versions) for _, versions in answers))
            version = max(common, default=WRITING)
            if version >= needed and self._copy_weights(version):
                break
            needed = max(needed, *(min(versions) for _, versions in answers))  # a server does not go back
        self.waited_s += time.perf_counter() - began_s

    def _copy_weights(self, version: int) -> bool:
        """Whether all servers had the version until it was copied."""
        with torch.no_grad():
            for server, memory in enumerate(self._memories):
                buffer = memory.find_buffer(version)
                if buffer is None:
                    return False
                self._partition.read(server, buffer, self._parameters)
                if version not in memory.get_versions():
                    return False
        self._version = version
        return True

    def apply_gradients(self) -> int:
        """Push: the gradient into every server's memory, then a word to the controller, which makes it an update."""
        found = [parameter.grad for parameter in self._parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in found):
            raise TrainError("a parameter server takes dense gradients: use sparse=False, or sync=all_reduce")
        absent = [index for index, gradient in enumerate(found) if gradient is None]
        settings = self._get_settings()
        began_s = time.perf_counter()
        answer: Any = AGAIN
        while answer == AGAIN:  # once, unless a server dies meanwhile
            for server, memory in enumerate(self._memories):
                self._partition.write(server, found, memory.gradients[self._worker])
            key = (self._worker, self._incarnation, self._clock, self._version)
            push = Push(*key, lives=self._lives, absent=absent, settings=settings)
            answer = self._controller.call("prepare", msgspec.to_builtins(push))
            if answer == AGAIN:
                self._open_memories()
        self.waited_s += time.perf_counter() - began_s
        if answer is None:
            raise TrainError(f"worker {self._worker} was taken for dead, and another has its place")
        self._needed, self._clock, self._steps, self._is_stopping = answer
        return self._steps

    def _get_settings(self) -> Settings:
        """Of each group of the optimiser, for the servers' step."""
        return [{name: group[name] for name in SETTINGS if name in group} for group in self._optimizer.param_groups]

    def is_exchange_due(self) -> bool:
        return self._is_stopping or time.monotonic() - self._exchanged_s > EXCHANGE_S

    def exchange(self, mine: RankSignals) -> RankSignals:
        self._exchanged_s = time.monotonic()
        return RankSignals(*self._controller.call("exchange", self._worker, self.is_chief, tuple(mine)))

    def end(self) -> None:
        """The chief has decided that the run ends."""
        if self.is_chief:
            self._controller.call("stop")
        else:
            self._controller.call("leave", self._worker)

    def _load_servers(self, step: int) -> None:
        version = torch.tensor(self._controller.call("get_version", step))
        for server, client in enumerate(self._servers):
            weights = torch.empty(self._partition.get_size(server))
            self._partition.write(server, [each.detach() for each in self._parameters], weights)
            state = {"version": version, "weights": weights}
            for index, piece in enumerate(self._partition.pieces[server]):
                stored = self._optimizer.state.get(self._parameters[piece.parameter], {})
                for name, each in stored.items():
                    state[f"{index}.{name}"] = each.reshape(-1)[piece.begin : piece.end] if each.ndim else each
            client.call("load", safetensors.torch.save(state))
        self._needed = self._controller.call("load", step)

    def collect_state(self) -> None:
        """The state of one version, from all servers, into the chief's model and optimiser."""
        version = self._controller.call("snapshot")
        for server in self._servers:
            server.send("dump", version)
        for index, server in enumerate(self._servers):
            state = safetensors.torch.load(server.receive())
            with torch.no_grad():
                self._partition.read(index, state.pop("weights"), self._parameters)
            del state["version"]
            for name, value in state.items():
                number, _, stored = name.partition(".")
                self._join_state(self._partition.pieces[index][int(number)], stored, value)
        self._version = version

    def _join_state(self, piece: ParameterSlice, name: str, value: Tensor) -> None:
        parameter = self._parameters[piece.parameter]
        own = self._optimizer.state[parameter]
        if not value.ndim:
            own[name] = value
            return
        if name not in own or own[name].shape != parameter.shape:
            own[name] = torch.zeros_like(parameter, dtype=value.dtype)
        own[name].view(-1)[piece.begin : piece.end] = value

    def close(self) -> None:
        for memory in self._memories:
            memory.close()
        for caller in (self._controller, *self._servers):
            caller.close()
