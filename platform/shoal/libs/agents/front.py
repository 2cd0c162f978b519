"""The way in for agents elsewhere: an HTTP server beside a run's gateway, whose settled groups become its segments.

The server has a thread with an event loop; the gateway calls `run_round` in its own, which queues the segments of whole
steps under the account of this run's agents. What the learner has had gives credit for further sessions.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from shoal.extend.rl import ActorKey, GatewayState, StoreSegment
from shoal.libs.agents.app import SessionApp
from shoal.libs.agents.local_sampler import LocalSampler
from shoal.libs.agents.model import open_pretrained
from shoal.libs.agents.service import SessionRules, SessionService, Step
from shoal.libs.agents.session_store import SessionStore

AGENTS_KEY: ActorKey = ("agents", 0)  # one account of all incarnations of the gateway


@dataclass(frozen=True)
class AgentsFrontSetting:
    """What the front of a run is opened with, in the gateway's process.

    pretrained: the folder of the model and its tokenizer
    folder:     of the run's files
    """

    pretrained: str
    folder: Path
    token: str
    rules: SessionRules
    host: str = "127.0.0.1"
    port: int = 0
    slots: int = 64
    length: int | None = None
    torch_threads: int = 1

    def open(
        self,
        state: GatewayState,
        store: StoreSegment,
        wake: Callable[[], None],
    ) -> AgentsFront:
        return AgentsFront(self, state, store, wake)


class AgentsFront:
    """Serves from its construction until `close`. store, wake: of the gateway"""

    def __init__(
        self,
        setting: AgentsFrontSetting,
        state: GatewayState,
        store: StoreSegment,
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._store = store
        self._wake = wake
        self._ledger = state.queue.ledger
        self._progress = state.actors.join(AGENTS_KEY)
        self._ledger.open_account(AGENTS_KEY)
        self._steps: deque[Step] = deque()  # from the event loop to the gateway's thread
        self._queued: deque[tuple[int, int]] = deque()  # of steps at the learner: segments when it is through, sessions
        self._sessions = SessionStore(setting.folder)
        model = open_pretrained(setting.pretrained)
        self._sampler = LocalSampler(
            model.module,
            model.tokenizer,
            model.stop_tokens,
            lambda: state.weights,
            setting.slots,
            setting.length,
            setting.torch_threads,
        )
        self._service = SessionService(self._sessions, model.tokenizer, setting.rules, self._put, lambda: state.version)
        self._socket = socket.create_server((setting.host, setting.port), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{setting.host}:{self.port}"
        app = SessionApp(self._service, self._sampler, setting.token, lambda: "")
        config = uvicorn.Config(app, log_level=logging.WARNING, access_log=False, server_header=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._sampler.is_alive

    def run_round(self) -> None:
        """Queue the segments that are ready, and give back the credit of those that the learner has had. Called by the
        gateway's thread."""
        account = self._ledger.get_account(AGENTS_KEY)
        with self._ledger.lock:  # the learner takes a whole step, and one step alone
            if self._steps and not len(self._state.queue):
                step = self._steps.popleft()
                for segment in step.segments:
                    self._store(AGENTS_KEY, self._progress, segment)
                self._queued.append((account.received, step.num_sessions))
        num_settled = account.received - account.queued
        while self._queued and self._queued[0][0] <= num_settled:
            _, num_sessions = self._queued.popleft()
            self._loop.call_soon_threadsafe(self._service.take_back, num_sessions)

    def get_counts(self) -> dict[str, Any]:
        """Of its sessions, and where they are opened."""
        return {**self._service.describe(), "url": self.url}

    def close(self) -> None:
        """Refuse new sessions, end the answers in progress, and close the files. Idempotent."""
        if not self._thread.is_alive():
            return
        self._service.is_over = True
        self._sampler.close()
        self._server.should_exit = True
        self._thread.join()
        self._sessions.close()

    def _put(self, step: Step) -> None:
        self._steps.append(step)
        self._wake()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        sweeping = asyncio.ensure_future(self._service.sweep())
        try:
            await self._server._serve([self._socket])
        finally:
            sweeping.cancel()
