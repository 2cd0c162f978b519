"""A parameter server as a service: its calls over a socket, in one thread, in the order in which they come.

Called by the process of a server. The controller's messages come over one connection and so in their order; pulls and
snapshots of a version that is still to come are answered when it has come. The state goes to a file every few seconds,
in the background, so that a server that died begins again from there, while workers wait for it and the others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from shoal.atomic_file import replace_synced
from shoal.errors import RankLost
from shoal.extend.sync import LATER, CallId, CurveKeys, RpcClient, RpcService, answers, list_handlers
from shoal.libs.asynchronous.messages import (
    CommitUpdate,
    DumpState,
    FetchWeights,
    GetAddress,
    LoadServer,
    PulledVersions,
    PullVersions,
    PushGradient,
    ResumeServer,
    ServerAddress,
    StoreState,
    StoreWeights,
)
from shoal.libs.asynchronous.parameter_server.compression import decompress
from shoal.libs.asynchronous.parameter_server.server import ParameterServer


class ServerService:
    """Serves `server` at `address`.

    controller: the address of the run's
    file:       of the state; None: nothing is kept for a second life
    every_s:    between two writings of the state
    keys:       of the run, where its processes are on several hosts
    report:     receives what the optimizer raises: no process waits for the answer to an update
    """

    def __init__(
        self,
        address: str,
        server: ParameterServer,
        controller: str,
        timeout_s: float,
        file: Path | None = None,
        every_s: float = 5.0,
        keys: CurveKeys | None = None,
        report: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._report = report
        self._server = server
        self._index = server.index
        self._file = file
        self._every_s = every_s
        self._controller = RpcClient(controller, timeout_s, keys=keys)
        self._incarnation = 0
        self._waiting: dict[CallId, tuple[int, Callable[[], object]]] = {}  # calls for a version still to come
        self._snapshot_at = -1
        self._snapshot = b""  # the state of the version `_snapshot_at`, as safetensors
        self._stored: dict[int, tuple[int, bytes]] = {}  # by worker: the weights of a version
        self._incarnations: dict[int, int] = {}  # by worker, of its newest push
        self._written_s = time.monotonic()
        self._written_version = -1
        self._writer: threading.Thread | None = None
        self.service = RpcService(address, list_handlers(self), keys)

    def start(self) -> None:
        """Begin, or begin again where the file is.

        Raises ConnectionLost without a controller, and RankLost when it was on a host that is lost with its disk.
        """
        version = -1
        if self._file is not None and self._file.exists():
            self._server.load(safetensors.torch.load(self._file.read_bytes()))
            version = self._server.version
        resumed = self._controller.call(ResumeServer(self._index, version, self.service.address))
        if resumed is None:
            problem = f"server {self._index} has died, and its state is lost: there is no {self._file}"
            raise RankLost(f"{problem}. The run goes on from its newest checkpoint")
        self._incarnation = resumed.incarnation
        self._server.set_version(resumed.version)
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

    @answers(GetAddress)
    def get_address(self, caller: CallId, request: GetAddress) -> ServerAddress:
        return ServerAddress(self._server.memory.address, self._incarnation, self._server.parameters)

    @answers(LoadServer)
    def load(self, caller: CallId, request: LoadServer) -> None:
        self._server.load(safetensors.torch.load(request.state))
        if self._file is not None:
            self._write(self._file)
            self.wait_until_written()  # from here on it can come back

    @answers(PullVersions)
    def pull(self, caller: CallId, request: PullVersions) -> object:
        if self._server.version < request.needed:
            return self._wait_for(request.needed, caller, lambda: self.pull(caller, request))
        self._server.remember_pull(request.worker, self._server.weights)
        return PulledVersions(self._incarnation, self._server.memory.get_versions())

    @answers(PushGradient)
    def push(self, caller: CallId, request: PushGradient) -> None:
        """One of an earlier life of the worker comes too late."""
        worker = request.worker
        if request.incarnation >= self._incarnations.get(worker, 0):
            self._incarnations[worker] = request.incarnation
            if request.begin < request.end:
                vector = self._server.memory.gradients[worker][request.begin : request.end]
                decompress(self._server.spec.compression, request.payload, vector)

    @answers(StoreWeights)
    def store_weights(self, caller: CallId, request: StoreWeights) -> object:
        if self._server.version == request.version:  # else updates were lost on the way, and come again
            self._stored[request.worker] = request.version, self._server.copy_weights()
            self._answer_waiting()
        return LATER

    @answers(FetchWeights)
    def fetch(self, caller: CallId, request: FetchWeights) -> object:
        worker, version = request.worker, request.version
        stored_version, stored = self._stored.get(worker, (-1, b""))
        if request.incarnation == self._incarnation and stored_version == version:
            if self._server.spec.delay_compensation:
                self._server.remember_pull(worker, torch.frombuffer(bytearray(stored), dtype=torch.float32))
            return stored[4 * request.begin : 4 * request.end]
        if request.incarnation != self._incarnation or self._server.version > version:
            return None
        if self._server.version == version:
            self._stored[worker] = version, self._server.copy_weights()
            return self.fetch(caller, request)
        return self._wait_for(version, caller, lambda: self.fetch(caller, request))

    def _wait_for(self, version: int, caller: CallId, answer: Callable[[], object]) -> object:
        """Answer a call once there is this version."""
        self._waiting[caller] = version, answer
        return LATER

    def _answer_waiting(self) -> None:
        for caller, (version, answer) in list(self._waiting.items()):
            if version <= self._server.version:
                del self._waiting[caller]
                self.service.reply(caller, answer())

    @answers(CommitUpdate)
    def commit(self, caller: CallId, request: CommitUpdate) -> object:
        try:
            self._server.commit(request.update)
        except Exception as error:
            self._report(error)
            raise
        self._answer_waiting()
        if self._file is not None and time.monotonic() - self._written_s > self._every_s:
            self._write(self._file)
        return LATER  # the controller does not wait for an answer

    @answers(StoreState)
    def store_state(self, caller: CallId, request: StoreState) -> object:
        if self._server.version == request.version:  # else as weights
            self._snapshot_at, self._snapshot = request.version, safetensors.torch.save(self._server.dump())
        return LATER

    @answers(DumpState)
    def dump(self, caller: CallId, request: DumpState) -> object:
        if request.incarnation == self._incarnation and request.version == self._snapshot_at:
            return self._snapshot
        if request.incarnation != self._incarnation or self._server.version > request.version:
            return None
        if self._server.version == request.version:
            return safetensors.torch.save(self._server.dump())
        return self._wait_for(request.version, caller, lambda: self.dump(caller, request))

    def _write(self, file: Path) -> None:
        """Write the present state in the background, unless the last one is still being written."""
        if self._writer is not None and self._writer.is_alive():
            return
        self._written_s = time.monotonic()
        self._written_version = self._server.version
        arguments = file, safetensors.torch.save(self._server.dump())
        writer = threading.Thread(target=replace_synced, args=arguments, name=f"state of server {self._index}")
        writer.start()
        self._writer = writer  # started: another thread may join it at once
