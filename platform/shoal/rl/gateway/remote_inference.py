"""Inference for clients that send observations: the policy runs here, batched by the endpoint's batcher.

Owns the clients' episodes, the batcher and its policy. The gateway calls it in its thread, under its lock; the policy
runs in the batcher's thread. Touches no socket, no queue and no ledger: the gateway stores the segments.

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
from typing import Any, NamedTuple

import numpy as np

from shoal.actor.policy import make_policy
from shoal.batching.batcher import Batcher, BatchQueue, PendingBatch, Prediction
from shoal.errors import Closed
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.remote_episodes import (
    Choice,
    Observed,
    OpenEpisodes,
    RemoteEpisode,
    completes_segment,
    read_observation,
    take_segment,
    take_step,
)
from shoal.weights import WeightSnapshot, decode_tensors
from shoal.wire import ExperienceSpec, Segment
from shoal.wire.action_masks import find_choices
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


class RemoteInference:
    """Answers `act` messages with the newest weights, and completes the segments of their episodes.

    get_weights: the newest snapshot; called in the batcher's thread
    has_space:    whether one more segment may be stored
    store:       takes a completed segment, once `has_space` has said so
    wake:        makes the gateway call `run_round`

    Raises ConfigError for a policy that cannot be computed here.
    """

    def __init__(
        self,
        experience: ExperienceSpec,
        get_weights: Callable[[], WeightSnapshot | None],
        has_space: Callable[[], bool],
        store: Callable[[ActorKey, ActorProgress, Segment], None],
        wake: Callable[[], None],
        seed: int | None = None,
    ) -> None:
        self._experience, self._get_weights, self._has_space, self._store = experience, get_weights, has_space, store
        self._choices = find_choices(experience)
        self._policy = make_policy(experience.policy, seed, action_shape=experience.action.shape)
        self._clients: dict[ActorKey, OpenEpisodes] = {}
        self._completing: dict[tuple[ActorKey, int], tuple[ActMessage, Observed]] = {}  # waiting for room, in order
        self._answers: list[tuple[ActorKey, ActionMessage]] = []
        self._callbacks = CallbackQueue(wake)
        self._batcher: Batcher[None, _Observation, Choice] = Batcher(loop=self._callbacks)
        self._queue: BatchQueue[None, _Observation, Choice] = self._batcher.add_queue(
            "observations", self._forward, max_batch_rows=MAX_BATCH_ROWS, max_queue_rows=MAX_QUEUE_ROWS
        )

    def add_client(self, key: ActorKey, progress: ActorProgress, max_episodes: int = MAX_OPEN_EPISODES) -> None:
        """Add a new or returning client; the episodes of a returning one go on."""
        client = self._clients.setdefault(key, OpenEpisodes(key, progress, max_episodes))
        client.progress = progress

    def take_act(self, key: ActorKey, message: ActMessage, frames: Sequence[bytes]) -> ActionMessage | None:
        """Take an observation; returns an answer that needs no policy, or None: `take_answers` will have it.

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
        elif not completes_segment(episode, message, self._experience):
            take_step(episode, message, observation)
            self._enqueue(client, episode)
        elif self._completing or not self._has_space():
            episode.is_full = True
            self._completing[key, message.episode] = message, observation
        else:
            return self._complete(client, episode, message, observation)
        return None

    def touch_episode(self, key: ActorKey, number: int) -> None:
        """Postpone the expiry of an open episode."""
        self._clients[key].episodes[number].used_at = time.monotonic()

    def run_round(self) -> None:
        """Deliver the actions that were computed, and store the segments for which there is room now."""
        while self._completing and self._has_space():
            (key, number), (message, observation) = next(iter(self._completing.items()))
            del self._completing[key, number]
            client = self._clients[key]
            answer = self._complete(client, client.episodes[number], message, observation)
            if answer is not None:
                self._answers.append((key, answer))
        self._callbacks.run()

    def take_answers(self) -> list[tuple[ActorKey, ActionMessage]]:
        """The answers since the last call, each with its client."""
        answers = self._answers[:]
        self._answers.clear()
        return answers

    def forget(self, key: ActorKey) -> None:
        """Drop a client that has said goodbye. The steps since its last segments were never counted."""
        if (client := self._clients.pop(key, None)) is not None:
            for episode in client.episodes.values():
                self._policy.reset(_make_stream(client, episode))
        self._completing = {waiting: each for waiting, each in self._completing.items() if waiting[0] != key}

    def expire(self, timeout_s: float) -> list[OpenEpisodes]:
        """Remove the episodes that no client has continued for `timeout_s`; returns the client of each."""
        before_s = time.monotonic() - timeout_s
        expired = []
        for client in self._clients.values():
            for episode in client.take_idle(before_s):
                self._policy.reset(_make_stream(client, episode))
                expired.append(client)
        for client in list(self._clients.values()):
            if not client.episodes and not client.progress.connected:
                del self._clients[client.key]
        return expired

    def get_counts(self) -> dict[str, int]:
        """Open episodes, actions and batches since the start."""
        counts = self._batcher.counts()
        open_episodes = sum(len(client.episodes) for client in self._clients.values())
        return {"open_episodes": open_episodes, "actions": counts.answered, "batches": counts.batches}

    @property
    def is_alive(self) -> bool:
        """Whether the batcher's thread is alive."""
        return self._batcher.is_alive

    def close(self) -> None:
        """End the batcher's thread. Idempotent."""
        self._batcher.close()

    def _complete(
        self, client: OpenEpisodes, episode: RemoteEpisode, message: ActMessage, observation: Observed
    ) -> ActionMessage | None:
        take_step(episode, message, observation)
        self._store(client.key, client.progress, take_segment(episode, message, self._experience))
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
        snapshot, policy, spec = self._get_weights(), self._policy, self._experience.observation
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
