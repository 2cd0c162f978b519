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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from shoal.errors import InferenceError
from shoal.extend.rl import GatewayState, StoreSegment
from shoal.libs.agents.model import open_pretrained
from shoal.libs.agents.sessions.app import SessionApp
from shoal.libs.agents.sessions.endpoint_sampler import EndpointSampler
from shoal.libs.agents.sessions.local_sampler import LocalSampler
from shoal.libs.agents.sessions.pinned_sampler import PinnedSampler
from shoal.libs.agents.sessions.service import SessionService
from shoal.libs.agents.sessions.steps import Step, StepOutcome
from shoal.libs.agents.sessions.store import TOKENIZER, SessionStore
from shoal.libs.agents.spec import AgentsSpec
from shoal.wire import DropReason

logger = logging.getLogger(__name__)
GRACE_S = 2  # for answers in progress, at the end
KEEP_ALIVE_S = 75  # longer than stock clients keep a connection
ACTOR_ID = "agents"  # of all incarnations of the gateway; each step has an account of its own, by its number
PORT, ENDPOINT = "agents_port", "agents_endpoint"  # facts of the ledger, which outlive the gateway


@dataclass(frozen=True)
class AgentsFrontSetting:
    """What the front of a run is opened with, in the gateway's process. folder: of the run's files"""

    spec: AgentsSpec
    folder: Path
    token: str

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
        self._progress = state.actors.join((ACTOR_ID, 0))
        self._steps: deque[Step] = deque()  # from the event loop to the gateway's thread
        self._queued: dict[int, int] = {}  # at the learner: the number of segments of each step
        self._sessions = SessionStore(setting.folder)
        spec, rules = setting.spec, setting.spec.sessions
        model = open_pretrained(spec.text_algorithm)
        model.tokenizer.backend_tokenizer.save(str(setting.folder / TOKENIZER))
        self._sampler: PinnedSampler | EndpointSampler
        if spec.replicas:
            context = spec.length or model.context
            self._sampler = EndpointSampler(self._find_endpoint, spec.model_name, setting.token, context)
        else:
            opened = model.tokenizer, model.stop_tokens
            self._sampler = PinnedSampler(
                lambda get_weights: LocalSampler(model.make_module(), *opened, get_weights, spec.slots, spec.length),
                lambda: state.weights,
            )
        self._service = SessionService(
            self._sessions, model.tokenizer, spec, self._sampler, self._put, lambda: state.version
        )
        self._steps.extend(self._service.restore(self._was_lost))
        # Of the last step that was learnt, at least; the newest versions may be those of steps that are open.
        self._closed_version = state.version - len(self._steps)
        known = int(self._ledger.get_fact(PORT) or 0)
        self._socket = socket.create_server((rules.host, rules.port or known), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._ledger.set_fact(PORT, str(self.port))
        advertised = rules.advertise.rstrip("/")
        self.url = advertised or f"http://{rules.host}:{self.port}"
        app = SessionApp(self._service, setting.token, advertised)
        config = uvicorn.Config(
            app,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._sampler.is_alive

    def run_round(self) -> None:
        """Queue the next step, and take the outcomes of those that the learner is through with. Called by the gateway's
        thread."""
        with self._ledger.lock:  # the learner takes a whole step, and one step alone
            if self._steps and not len(self._state.queue):
                self._queue_step(self._steps.popleft())
            for number, num_segments in list(self._queued.items()):
                account = self._ledger.get_account((ACTOR_ID, number))
                if account.queued or account.received < num_segments:
                    continue
                if account.consumed:  # what its credit lets in is sampled by its weights
                    if self._state.version <= self._closed_version:
                        continue
                    self._closed_version = min(self._state.version, self._closed_version + 1)
                del self._queued[number]
                outcome = StepOutcome(account.consumed, dict(account.dropped))
                recording = self._service.steps.record_outcome(number, outcome)
                asyncio.run_coroutine_threadsafe(recording, self._loop).add_done_callback(_log_failure)

    def _queue_step(self, step: Step) -> None:
        """Queue the segments of a step, unless an earlier gateway has."""
        key = (ACTOR_ID, step.number)
        account = self._ledger.get_account(key)
        self._queued[step.number] = len(step.segments)
        if not account.received:
            # A learner that begins again skips numbers of versions.
            self._closed_version = max(self._closed_version, self._state.version - len(self._queued) + 1)
            for segment in step.segments:
                self._store(key, self._progress, segment)

    def _was_lost(self, number: int) -> bool:
        """Whether a step was in the queue of a gateway that died."""
        return self._ledger.get_account((ACTOR_ID, number)).dropped[DropReason.GATEWAY_CRASH] > 0

    def connect(self, url: str) -> None:
        """Sample at the endpoint of this address."""
        self._ledger.set_fact(ENDPOINT, url)

    def _find_endpoint(self) -> str:
        if url := self._ledger.get_fact(ENDPOINT):
            return url
        raise InferenceError(503, "the endpoint that samples is on its way", retry_after_s=1.0)

    def get_counts(self) -> dict[str, Any]:
        """Of its sessions, where they are opened, and where texts are sampled."""
        endpoint = self._ledger.get_fact(ENDPOINT) or ""
        return {**self._service.describe(), "url": self.url, "endpoint": endpoint}

    def close(self) -> None:
        """Refuse new sessions, end the answers in progress, and close the files. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._service.close)
        self._sampler.stop()
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
            await self._sampler.close()


def _log_failure(recording: Future[None]) -> None:
    """A step whose outcome could not be written is recorded by the next gateway."""
    if not recording.cancelled() and (error := recording.exception()) is not None:
        logger.error("the outcome of a step was not recorded: %r", error)
