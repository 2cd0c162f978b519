"""A parameter server as a service: its calls over a socket, in one thread, in the order in which they come.

Called by the process of a server. The controller's messages come over one connection and so in their order; pulls and
snapshots of a version that is still to come are answered when it has come. The state goes to a file every few seconds,
in the background, so that a server that died begins again from there, while workers wait for it and the others go on.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch

from shoal.atomic_file import replace_synced
from shoal.sync.parameter_server.clock import Update
from shoal.sync.parameter_server.rpc import LATER, CallId, RpcClient, RpcService
from shoal.sync.parameter_server.server import ParameterServer


class ServerService:
    """Serves `server`, number `index`, at `address`.

    controller: the address of the run's
    file:       of the state; None: nothing is kept for a second life
    every_s:    between two writings of the state
    """

    def __init__(
        self,
        address: str,
        index: int,
        server: ParameterServer,
        controller: str,
        timeout_s: float,
        file: Path | None = None,
        every_s: float = 5.0,
    ) -> None:
        self._server, self._index, self._file, self._every_s = server, index, file, every_s
        self._controller = RpcClient(controller, timeout_s)
        self._life = 0
        self._pulls: dict[CallId, tuple[int, int]] = {}  # those that wait: worker, version needed
        self._dumps: dict[CallId, int] = {}
        self._snapshot_at = -1
        self._kept = b""  # the state of the version `_snapshot_at`, as safetensors
        self._written_s, self._written_version = time.monotonic(), -1
        self._writer: threading.Thread | None = None
        names = ("address", "load", "pull", "commit", "snapshot", "dump")
        self.service = RpcService(address, {name: getattr(self, f"_{name}") for name in names})

    def start(self) -> None:
        """Begin, or begin again where the file is. Raises ConnectionLost without a controller."""
        version = -1
        if self._file is not None and self._file.exists():
            self._server.load(safetensors.torch.load(self._file.read_bytes()))
            version = self._server.version
        self._life, version = self._controller.call("resume_server", self._index, version)
        self._server.set_version(version)
        self.service.start()

    def close(self) -> None:
        """End, and leave the newest state on disk. Idempotent."""
        self.service.close()
        self._controller.close()
        self.wait_until_written()
        if self._file is not None and self._written_version < self._server.version:
            self._write(self._file)
            self.wait_until_written()
        self._server.close()

    def wait_until_written(self) -> None:
        """Wait for the writing of the state that is under way, if any."""
        if self._writer is not None:
            self._writer.join()

    def _address(self, caller: CallId) -> Any:
        """Where its memory is, its life, and the shapes of the model's parameters."""
        return tuple(self._server.memory.address), self._life, self._server.parameters

    def _load(self, caller: CallId, state: bytes) -> None:
        self._server.load(safetensors.torch.load(state))
        if self._file is not None:
            self._write(self._file)
            self.wait_until_written()  # from here on it can come back

    def _pull(self, caller: CallId, worker: int, needed: int) -> Any:
        if self._server.version < needed:
            self._pulls[caller] = worker, needed
            return LATER
        self._server.remember_pull(worker, self._server.version)
        return self._life, self._server.memory.get_versions()

    def _commit(self, caller: CallId, update: dict[str, Any]) -> Any:
        self._server.commit(msgspec.convert(update, Update))
        for waiting, (worker, needed) in list(self._pulls.items()):
            if needed <= self._server.version:
                del self._pulls[waiting]
                self.service.reply(waiting, self._pull(waiting, worker, needed))
        if self._file is not None and time.monotonic() - self._written_s > self._every_s:
            self._write(self._file)
        return LATER  # the controller does not wait for an answer

    def _snapshot(self, caller: CallId, version: int) -> Any:
        """Keep the state of this version; the controller asks for it between two updates."""
        self._snapshot_at, self._kept = version, safetensors.torch.save(self._server.dump())
        for waiting, wanted in list(self._dumps.items()):
            if wanted == version:
                del self._dumps[waiting]
                self.service.reply(waiting, self._kept)
        return LATER

    def _dump(self, caller: CallId, version: int) -> Any:
        if version != self._snapshot_at:
            self._dumps[caller] = version
            return LATER
        return self._kept

    def _write(self, file: Path) -> None:
        """Write the present state in the background, unless the last one is still being written."""
        if self._writer is not None and self._writer.is_alive():
            return
        self._written_s, self._written_version = time.monotonic(), self._server.version
        arguments = file, safetensors.torch.save(self._server.dump())
        self._writer = threading.Thread(target=replace_synced, args=arguments, name=f"state of server {self._index}")
        self._writer.start()
