"""Inference for clients that send observations: the policy runs here, batched by the endpoint's batcher.

Owns the clients' episodes, the batcher and its policy, which begin with the first session that asks for them. The
gateway calls it in its thread, under its lock; the policy runs in the batcher's thread. Touches no socket.

| what waits             | capacity                  | who unblocks                 | close()     |
|------------------------|---------------------------|------------------------------|-------------|
| observations           | one for each open episode | the batcher's thread         | answers none |
| completed segments     | one for each open episode | the learner, by taking some  | drops them  |
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from shoal.actor.policy import Policy, make_policy
from shoal.batching.batcher import Batcher, BatchQueue, PendingBatch, Prediction
from shoal.errors import Closed, ConfigError
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.remote_episodes import (
    Choice,
    Observed,
    OpenEpisodes,
    RemoteEpisode,
    Step,
    read_observation,
    read_step,
    take_step,
)
from shoal.rl.gateway.sessions import REMOTE
from shoal.rl.gateway.state import GatewayState
from shoal.weights import decode_tensors
from shoal.wire import DropReason, ExperienceSpec, Segment
from shoal.wire.action_masks import MASKS, find_choices
from shoal.wire.messages import ActionMessage, ActMessage

MAX_OPEN_EPISODES = 256  # of one actor
MAX_BATCH_ROWS = 256
MAX_QUEUE_ROWS = 2**20  # never reached: each actor's open episodes are limited
FAILED = "failed"
logger = logging.getLogger(__name__)


class CallbackQueue:
    """The gateway's thread as the batcher's event loop: it runs the callbacks in its next round."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._callbacks: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake = wake

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Run it in this round. From the gateway's thread."""
        self._callbacks.append((callback, arguments))

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Run it in the next round. From any thread."""
        self._callbacks.append((callback, arguments))
        self._wake()

    def is_closed(self) -> bool:
        return False

    def run(self) -> None:
        """Run what waits, in order."""
        while self._callbacks:
            callback, arguments = self._callbacks.popleft()
            callback(*arguments)


class _Observation(NamedTuple):
    """A row of a batch. `stream` is the policy's key of the episode."""

    observed: Observed
    stream: Hashable
    is_first: bool


class _Answering:
    """An observation that waits for its action: the batcher's future of it."""

    __slots__ = ("_answers", "_client", "_episode")

    def __init__(self, answers: list[tuple[ActorKey, ActionMessage]], client: OpenEpisodes, episode: RemoteEpisode):
        self._answers, self._client, self._episode = answers, client, episode

    def done(self) -> bool:
        return False

    def set_result(self, result: Prediction[Choice], /) -> None:
        episode = self._episode
        episode.choice = result.outputs
        self._answers.append((self._client.key, result.outputs.to_message(episode.number, episode.step)))

    def set_exception(self, error: Exception, /) -> None:
        """The policy has failed: the episode ends without its open segment."""
        logger.error("remote inference failed: %r", error)
        episode = self._client.episodes.pop(self._episode.number, self._episode)
        self._answers.append((self._client.key, ActionMessage(episode.number, episode.step, reason=FAILED)))


def require_remote_inference(experience: ExperienceSpec, is_synchronous: bool) -> None:
    """Raise ConfigError for a run whose policy cannot be computed at the gateway."""
    if is_synchronous:
        remedy = "infer in the actor, or take another algorithm"
        raise ConfigError("inference", REMOTE, "does not pause while the learner updates", remedy)
    if experience.self_play:
        raise ConfigError("inference", REMOTE, "draws no opponents, and this run has self-play", "infer in the actor")
    if lacking := [each.name for each in experience.extras if each.per != "segment" and each.name != MASKS]:
        names = ", ".join(lacking)
        raise ConfigError("inference", REMOTE, f"gives no {names} of an observation", "infer in the actor")


class RemoteInference:
    """Answers `act` messages with the newest weights, and completes the segments of their episodes, after `start`.

    store: takes a completed segment, when the queue has a slot for it
    wake:  makes the gateway call `run_round`
    seed:  of the policy
    """

    _policy: Policy
    _queue: BatchQueue[None, _Observation, Choice]

    def __init__(
        self,
        state: GatewayState,
        store: Callable[[ActorKey, ActorProgress, Segment], None],
        wake: Callable[[], None],
        seed: int | None = None,
    ) -> None:
        self._state, self._experience = state, state.setting.experience
        self._store, self._seed = store, seed
        self._choices = find_choices(self._experience)
        self._clients: dict[ActorKey, OpenEpisodes] = {}
        self._completing: dict[
            tuple[ActorKey, int], tuple[ActMessage, Observed, Step]
        ] = {}  # waiting for a slot, in order
        self._answers: list[tuple[ActorKey, ActionMessage]] = []
        self._callbacks = CallbackQueue(wake)
        self._batcher: Batcher[None, _Observation, Choice] | None = None  # from `start` on

    def start(self) -> Self:
        """Begin, if it has not. Raises ConfigError for a policy that cannot be computed here."""
        require_remote_inference(self._experience, self._state.setting.is_synchronous)
        if self._batcher is None:
            self._policy = make_policy(self._experience.policy, self._seed, action_shape=self._experience.action.shape)
            self._batcher = Batcher(loop=self._callbacks)
            self._queue = self._batcher.add_queue(
                "observations", self._forward, max_batch_rows=MAX_BATCH_ROWS, max_queue_rows=MAX_QUEUE_ROWS
            )
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the batcher's thread is alive, or has not begun."""
        return self._batcher is None or self._batcher.is_alive

    def close(self) -> None:
        """End the batcher's thread. Idempotent."""
        if self._batcher is not None:
            self._batcher.close()

    def get_counts(self) -> dict[str, int] | None:
        """Open episodes, actions and batches since the start; None before."""
        if self._batcher is None:
            return None
        counts = self._batcher.counts()
        open_episodes = sum(len(client.episodes) for client in self._clients.values())
        return {"open_episodes": open_episodes, "actions": counts.answered, "batches": counts.batches}

    def add_client(self, key: ActorKey, progress: ActorProgress, max_episodes: int = MAX_OPEN_EPISODES) -> OpenEpisodes:
        """Add a new or returning client; the episodes of a returning one go on."""
        client = self._clients.setdefault(key, OpenEpisodes(key, progress, max_episodes))
        client.progress = progress
        return client

    def take_act(self, key: ActorKey, message: ActMessage, frames: Sequence[bytes]) -> ActionMessage | None:
        """Take an observation; returns an answer that needs no policy, or None: `run_round` will have it.

        Raises InvalidSegment for an observation or a reward outside of the spec, which changes nothing.
        """
        observation = read_observation(message, frames, self._experience, self._choices)
        client = self._clients[key]
        known = len(client.episodes)
        episode = client.find_episode(message, observation, time.monotonic())
        if isinstance(episode, ActionMessage):
            return episode
        if len(client.episodes) > known:  # it has begun
            self._enqueue(client, episode)
        elif message.step == episode.step or episode.is_full:
            return None  # it is waiting already
        else:
            step = read_step(episode, client.behaviour, message, self._experience)
            if not step.fills_slot(episode, message, self._experience) or (
                not self._completing and self._state.sessions.has_space()
            ):
                return self._take(client, episode, message, observation, step)
            episode.is_full = True
            self._completing[key, message.episode] = message, observation, step
        return None

    def run_round(self) -> list[tuple[ActorKey, ActionMessage]]:
        """Store the segments for which there are slots now; returns the new answers, each with its client."""
        while self._completing and self._state.sessions.has_space():
            (key, number), waiting = next(iter(self._completing.items()))
            del self._completing[key, number]
            client = self._clients[key]
            answer = self._take(client, client.episodes[number], *waiting)
            if answer is not None:
                self._answers.append((key, answer))
        self._callbacks.run()
        answers = self._answers[:]
        self._answers.clear()
        return answers

    def forget(self, key: ActorKey) -> None:
        """Drop a client that has said goodbye. The steps since its last segments were never counted."""
        if (client := self._clients.pop(key, None)) is not None:
            for episode in client.episodes.values():
                self._policy.reset(_make_stream(client, episode))
        self._completing = {waiting: each for waiting, each in self._completing.items() if waiting[0] != key}

    def expire(self, before_s: float) -> None:
        """End the episodes that no client has continued since `before_s`, and count each as a dropped segment."""
        ledger = self._state.queue.ledger
        for key, client in list(self._clients.items()):
            for episode in client.take_idle(before_s):
                self._policy.reset(_make_stream(client, episode))
                ledger.record_received(key, ledger.get_account(key).next_seq, DropReason.EXPIRED)
            if not client.episodes and not client.progress.connected:
                del self._clients[key]

    def _take(
        self, client: OpenEpisodes, episode: RemoteEpisode, message: ActMessage, observation: Observed, step: Step
    ) -> ActionMessage | None:
        """Take a step, and store the segments that it completes."""
        for segment in take_step(episode, message, observation, step, self._experience):
            self._store(client.key, client.progress, segment)
        if message.terminated or message.truncated:
            del client.episodes[episode.number]
            self._policy.reset(_make_stream(client, episode))
            return ActionMessage(message.episode, message.step)
        self._enqueue(client, episode)
        return None

    def _enqueue(self, client: OpenEpisodes, episode: RemoteEpisode) -> None:
        row = _Observation(episode.observations[-1], _make_stream(client, episode), episode.step == 0)
        self._queue.enqueue(row, _Answering(self._answers, client, episode), group=None, tenant=client.key[0])

    # What follows runs in the batcher's thread.

    def _forward(self, batch: PendingBatch[None, _Observation, Choice]) -> list[Choice]:
        rows = [entry.request for entry in batch.requests]
        snapshot, policy, spec = self._state.weights, self._policy, self._experience.observation
        if snapshot is None:
            raise Closed("there are no weights")
        if snapshot.version != policy.version:
            policy.load(snapshot.version, decode_tensors(snapshot.payload))
        frames = np.frombuffer(b"".join([row.observed.frame for row in rows]), spec.numpy_dtype())
        masks = [np.frombuffer(row.observed.mask, np.bool_) for row in rows] if self._choices else None
        streams = [row.stream for row in rows]
        for row in rows:
            if row.is_first:
                policy.reset(row.stream)
        extras = [policy.get_extras(stream) for stream in streams]  # before the observations: a recurrent state
        actions, log_probabilities = policy.act_batch(frames.reshape(len(rows), *spec.shape), streams, masks)
        choices = zip(actions, log_probabilities, extras, strict=True)
        return [Choice(action, log_probability, policy.version, extra) for action, log_probability, extra in choices]


def _make_stream(client: OpenEpisodes, episode: RemoteEpisode) -> Hashable:
    """The actor's id decides how it explores, the rest tells its episodes apart."""
    return client.key[0], (client.key[1], episode.number)
