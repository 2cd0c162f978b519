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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple, Self

import numpy as np

from shoal.actor.policy import Policy, make_policy
from shoal.batching.batcher import Batcher, BatchQueue, PendingBatch, Prediction
from shoal.errors import Closed, ConfigError, InvalidSegment
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.remote_episodes import (
    FAILED,
    INVALID,
    Answers,
    Asking,
    OpenEpisodes,
    Refusal,
    RemoteEpisode,
    RowAnswers,
)
from shoal.rl.gateway.sessions import REMOTE
from shoal.rl.gateway.state import GatewayState
from shoal.weights import decode_tensors
from shoal.wire import DropReason, ExperienceSpec, Segment
from shoal.wire.act_rows import ActRows, RowReader
from shoal.wire.action_masks import MASKS
from shoal.wire.messages import MAX_ROWS, ActionMessage, ActMessage, ActsMessage

MAX_OPEN_EPISODES = 256  # of one actor, where a single message begins the next one: see OpenEpisodes for others
SHORT_FORWARD_S = 0.0005  # in the gateway's thread: another one's wake-up, and its wait for this one, take as long
MAX_QUEUE_ROWS = 2**20  # never reached: each actor's open episodes are limited
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


class _Observations(NamedTuple):
    """Rows of a batch, of one client. streams: the policy's key of each episode; starting: of those at step 0"""

    rows: np.ndarray
    masks: np.ndarray
    streams: Sequence[Hashable]
    starting: Sequence[Hashable]


class _Choices(NamedTuple):
    """The policy's answers to rows. extras: what a segment that begins with its observation carries, of each"""

    actions: Sequence[Any]
    log_probabilities: Sequence[float]
    version: int
    extras: Iterable[Mapping[str, Any]]


class _Asked:
    """Rows that wait for their actions: the batcher's future of them."""

    __slots__ = ("_answers", "_asking", "_client")

    def __init__(self, client: OpenEpisodes, answers: RowAnswers, asking: Asking) -> None:
        self._client = client
        self._answers = answers
        self._asking = asking

    def done(self) -> bool:
        return False

    def set_result(self, result: Prediction[_Choices], /) -> None:
        actions, _, version, _ = result.outputs
        self._client.choose(self._asking, *result.outputs)
        self._answers.answer(self._asking, actions, version)
        self._answers.deliver(len(self._asking))

    def set_exception(self, error: Exception, /) -> None:
        """The policy has failed: the episodes end without their open segments."""
        logger.error("remote inference failed: %r", error)
        for row, episode in self._asking.items():
            self._client.close(episode.number)
            self._answers.refuse(row, FAILED)
        self._answers.deliver(len(self._asking))


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
    _queue: BatchQueue[None, _Observations, _Choices]

    def __init__(
        self,
        state: GatewayState,
        store: Callable[[ActorKey, ActorProgress, Segment], None],
        wake: Callable[[], None],
        seed: int | None = None,
    ) -> None:
        self._state, self._experience = state, state.setting.experience
        self._store, self._seed = store, seed
        self._reader = RowReader(self._experience)
        self._has_state = any(each.per == "segment" for each in self._experience.extras) or bool(
            self._experience.policy.noise_decays
        )
        self._clients: dict[ActorKey, OpenEpisodes] = {}
        # Rows that complete segments, waiting for a slot, in order.
        self._filling: dict[tuple[ActorKey, int], tuple[RowAnswers, int]] = {}
        self._answers: Answers = []
        self._callbacks = CallbackQueue(wake)
        self._batcher: Batcher[None, _Observations, _Choices] | None = None  # from `start` on

    def start(self) -> Self:
        """Begin, if it has not. Raises ConfigError for a policy that cannot be computed here."""
        require_remote_inference(self._experience, self._state.setting.is_synchronous)
        if self._batcher is None:
            self._policy = make_policy(self._experience.policy, self._seed, action_shape=self._experience.action.shape)
            self._batcher = Batcher(loop=self._callbacks)
            self._queue = self._batcher.add_queue(
                "observations",
                self._forward,
                max_batch_rows=MAX_ROWS,
                max_queue_rows=MAX_QUEUE_ROWS,
                short_s=SHORT_FORWARD_S,
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
        return {
            "open_episodes": sum(map(len, self._clients.values())),
            "actions": counts.rows,
            "batches": counts.batches,
        }

    def add_client(self, key: ActorKey, progress: ActorProgress, max_single: int = MAX_OPEN_EPISODES) -> OpenEpisodes:
        """Add a new or returning client; the episodes of a returning one go on."""
        client = self._clients.setdefault(key, OpenEpisodes(key, progress, self._experience, max_single))
        client.progress = progress
        return client

    def take_message(self, key: ActorKey, message: ActMessage | ActsMessage, frames: Sequence[bytes]) -> None:
        """Take observations of an actor: `run_round` will have the answer. Raises ProtocolViolation for columns that do
        not fit together."""
        if isinstance(message, ActMessage):
            try:
                self.take_act(key, message, frames)
            except InvalidSegment as error:
                reply = ActionMessage(message.episode, message.step, None, 0, *self._reject(key, error))
                self._answers.append((key, reply, ()))
            return
        rows, invalid = self._reader.read_many(message, frames)
        refused = {row: self._reject(key, error) for row, error in invalid.items()}
        if behaviour := self._clients[key].behaviour:
            refused = dict.fromkeys(range(len(rows.episodes)), (INVALID, f"taken: {behaviour} acts: send it as `act`"))
        self._take(self._clients[key], rows, refused, is_single=False)

    def take_act(self, key: ActorKey, message: ActMessage, frames: Sequence[bytes]) -> None:
        """Take one observation. Raises InvalidSegment for an observation, a reward or an action outside of the spec,
        which changes nothing."""
        row = self._reader.read_one(message, frames)
        self._take(self._clients[key], row, {}, is_single=True)

    def _reject(self, key: ActorKey, error: InvalidSegment) -> Refusal:
        """Count what is outside of the spec."""
        detail = f"{error.field}: {error.problem}"
        self._state.progress.record_rejection(self._clients[key].progress, error.reason, detail)
        return INVALID, detail

    def _take(self, client: OpenEpisodes, rows: ActRows, refused: dict[int, Refusal], is_single: bool) -> None:
        answers = RowAnswers(client.key, rows, is_single, self._answers, self._experience.action)
        limit = client.max_single if is_single else client.max_episodes
        asking, filling, showing = client.take(answers, refused, time.monotonic(), limit)
        if asking:
            self._ask(client, answers, asking)
        if filling or showing:
            room = 0 if self._filling else max(0, self._state.sessions.count_free())
            self._complete(client, answers, sorted([*showing, *filling[:room]]))
            for row in filling[room:]:
                number = answers.rows.episodes[row]
                client.hold(number)
                self._filling[client.key, number] = answers, row
        elif not asking:
            answers.deliver()

    def _complete(self, client: OpenEpisodes, answers: RowAnswers, at: Sequence[int]) -> None:
        """Store the segments that rows complete: their episodes end, or ask for an action."""
        segments, asking = client.complete(answers.rows, at)
        for segment in segments:
            self._store(client.key, client.progress, segment)
        for row in at:
            if row not in asking:
                self._policy.reset(_make_stream(client.key, answers.rows.episodes[row]))
                answers.end(row)
        answers.deliver(len(at) - len(asking))
        if asking:
            self._ask(client, answers, asking)

    def _ask(self, client: OpenEpisodes, answers: RowAnswers, asking: Asking) -> None:
        """Let the policy choose actions for rows."""
        rows, streams = answers.rows, [_make_stream(client.key, -1)] * len(asking)
        starting: Sequence[Hashable] = ()
        if self._has_state:
            streams = [_make_stream(client.key, each.number) for each in asking.values()]
            starting = [stream for stream, each in zip(streams, asking.values(), strict=True) if each.step == 0]
        part = slice(None) if len(asking) == len(rows.episodes) else list(asking)
        asked = _Asked(client, answers, asking)
        self._queue.enqueue(
            _Observations(rows.observations[part], rows.masks[part], streams, starting),
            asked,
            len(asking),
            group=None,
            tenant=client.key[0],
        )

    def run_round(self) -> Answers:
        """Store the segments for which there are slots now; returns the new answers, each with its client."""
        room = max(0, self._state.sessions.count_free()) if self._filling else 0
        for answers, group in groupby(list(islice(self._filling.values(), room)), lambda each: each[0]):
            rows = [row for _, row in group]
            for row in rows:
                del self._filling[answers.key, answers.rows.episodes[row]]
            self._complete(self._clients[answers.key], answers, rows)
        self._callbacks.run()
        answered = self._answers[:]
        self._answers.clear()
        return answered

    def forget(self, key: ActorKey) -> None:
        """Drop a client that has said goodbye. The steps since its last segments were never counted."""
        if (client := self._clients.pop(key, None)) is not None:
            self._abandon(client, list(client.values()))
        self._filling = {place: each for place, each in self._filling.items() if place[0] != key}

    def expire(self, before_s: float) -> None:
        """End the episodes that no client has continued since `before_s`, and count each as a dropped segment."""
        ledger = self._state.queue.ledger
        for key, client in list(self._clients.items()):
            idle = client.take_idle(before_s)
            self._abandon(client, idle)
            for _ in idle:
                ledger.record_received(key, ledger.get_account(key).next_seq, DropReason.EXPIRED)
            if not client and not client.progress.connected:
                del self._clients[key]

    def _abandon(self, client: OpenEpisodes, episodes: Sequence[RemoteEpisode]) -> None:
        """Of episodes that do not go on, store what was shown since their last segments."""
        for segment in client.take_shown(episodes):
            self._store(client.key, client.progress, segment)
        for each in episodes:
            self._policy.reset(_make_stream(client.key, each.number))

    # What follows runs in the batcher's thread, or for a short batch in the gateway's.

    def _forward(self, batch: PendingBatch[None, _Observations, _Choices]) -> list[_Choices]:
        asked = [entry.request for entry in batch.requests]
        snapshot = self._state.weights
        policy = self._policy
        if snapshot is None:
            raise Closed("there are no weights")
        if snapshot.version != policy.version:
            policy.load(snapshot.version, decode_tensors(snapshot.payload))
        streams = [stream for each in asked for stream in each.streams]
        observations = np.concatenate([each.rows for each in asked])
        masks = np.concatenate([each.masks for each in asked]) if self._reader.choices else None
        extras: Sequence[Mapping[str, Any]] = ()
        if self._has_state:
            for stream in [stream for each in asked for stream in each.starting]:
                policy.reset(stream)
            extras = [policy.get_extras(stream) for stream in streams]  # before the observations
        actions, log_probabilities = policy.act_batch(observations, streams, masks)
        version = policy.version
        end = 0
        choices = []
        for each in asked:
            begin, end = end, end + len(each.streams)
            choices.append(_Choices(actions[begin:end], log_probabilities[begin:end], version, extras[begin:end]))
        return choices


def _make_stream(key: ActorKey, episode: int) -> Hashable:
    """The actor's id decides how it explores, the rest tells its episodes apart."""
    return key[0], (key[1], episode)
