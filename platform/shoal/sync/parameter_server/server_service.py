"""A parameter server as a service: its calls over a socket, in one thread, in the order in which they come.

Called by the process of a server. The controller's messages come over one connection and so in their order; pulls and
snapshots of a version that is still to come are answered when it has come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.sync.parameter_server.clock import Update
from shoal.sync.parameter_server.rpc import LATER, Service
from shoal.sync.parameter_server.server import ParameterServer
from shoal.sync.parameter_server.tensor_codec import pack, unpack


class ServerService:
    """Serves `server` at `address`."""

    def __init__(self, address: str, server: ParameterServer) -> None:
        self._server = server
        self._pulls: list[tuple[bytes, int, int]] = []  # caller, worker, version needed
        self._dumps: list[tuple[bytes, int]] = []
        self._snapshots: dict[int, Any] = {}  # by version: the newest one requested
        methods = {
            name: getattr(self, f"_{name}")
            for name in ("address", "load", "pull", "push", "commit", "snapshot", "dump")
        }
        self.service = Service(address, methods)

    def start(self) -> None:
        self.service.start()

    def close(self) -> None:
        """Idempotent."""
        self.service.close()
        self._server.close()

    def _address(self, caller: bytes) -> Any:
        """Where its memory is, and the shapes of the model's parameters."""
        return tuple(self._server.memory.address), self._server.parameters

    def _load(self, caller: bytes, weights: Any, state: list[dict[str, Any]], version: int) -> None:
        self._server.load(
            unpack(weights), [{name: unpack(value) for name, value in each.items()} for each in state], version
        )

    def _push(self, caller: bytes, worker: int, gradient: bytes) -> None:
        self._server.push(worker, gradient)

    def _pull(self, caller: bytes, worker: int, needed: int) -> Any:
        if self._server.version < needed:
            self._pulls.append((caller, worker, needed))
            return LATER
        self._server.remember_pull(worker, self._server.version)
        return self._server.memory.get_versions()

    def _commit(self, caller: bytes, update: dict[str, Any]) -> Any:
        self._server.commit(msgspec.convert(update, Update))
        self._answer_waiting()
        return LATER  # the controller does not wait for an answer

    def _snapshot(self, caller: bytes, version: int) -> Any:
        """Keep the state of this version; the controller asks for it between two updates."""
        self._snapshots = {version: self._take_snapshot()}
        self._answer_waiting()
        return LATER

    def _dump(self, caller: bytes, version: int) -> Any:
        if version not in self._snapshots:
            self._dumps.append((caller, version))
            return LATER
        return self._snapshots.pop(version)

    def _take_snapshot(self) -> Any:
        _, weights, state = self._server.dump()
        return pack(weights), [{name: pack(value) for name, value in each.items()} for each in state]

    def _answer_waiting(self) -> None:
        ready = [each for each in self._pulls if each[2] <= self._server.version]
        self._pulls = [each for each in self._pulls if each[2] > self._server.version]
        for caller, worker, _ in ready:
            self._server.remember_pull(worker, self._server.version)
            self.service.reply(caller, self._server.memory.get_versions())
        for caller, version in [each for each in self._dumps if each[1] in self._snapshots]:
            self._dumps.remove((caller, version))
            self.service.reply(caller, self._snapshots.pop(version))
