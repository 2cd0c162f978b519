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
from functools import partial
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
    WRONG_STEP,
    Answers,
    Choice,
    Choices,
    Observed,
    OpenEpisodes,
    RemoteEpisode,
    Step,
    read_observation,
    read_step,
    take_shown,
    take_step,
)
from shoal.rl.gateway.row_episodes import INVALID, AnsweringRows, PendingActions, Refusal, RowEpisodes
from shoal.rl.gateway.sessions import REMOTE
from shoal.rl.gateway.state import GatewayState
from shoal.weights import decode_tensors
from shoal.wire import DropReason, ExperienceSpec, Segment
from shoal.wire.act_rows import read_rows
from shoal.wire.action_masks import MASKS, find_choices
from shoal.wire.messages import MAX_ROWS, ActionMessage, ActMessage, ActsMessage

MAX_OPEN_EPISODES = 256  # of one actor, begun by single messages: see RowEpisodes for others
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


_Completing = tuple[Callable[[], ActionMessage | None] | PendingActions, int]  # and its row


class _Observations(NamedTuple):
    """Rows of a batch, of one client. streams: the policy's key of each episode; starting: of those at step 0"""

    frames: bytes
    masks: bytes
    streams: Sequence[Hashable]
    starting: Sequence[Hashable]


class _Answering:
    """An observation that waits for its action: the batcher's future of it."""

    __slots__ = ("_answers", "_client", "_episode")

    def __init__(self, answers: Answers, client: OpenEpisodes, episode: RemoteEpisode):
        self._answers, self._client, self._episode = answers, client, episode

    def done(self) -> bool:
        return False

    def set_result(self, result: Prediction[Choices], /) -> None:
        episode, (actions, log_probabilities, version, extras) = self._episode, result.outputs
        episode.choice = Choice(actions[0], log_probabilities[0], version, *extras)
        self._answers.append((self._client.key, episode.choice.to_message(episode.number, episode.step)))

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
    _queue: BatchQueue[None, _Observations, Choices]

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
        self._has_state = any(each.per == "segment" for each in self._experience.extras) or bool(
            self._experience.policy.noise_decays
        )
        self._rows: dict[ActorKey, RowEpisodes] = {}  # of clients that have sent `acts`
        # Completed segments, waiting for a slot, in order.
        self._completing: dict[tuple[ActorKey, int], _Completing] = {}
        self._single: dict[tuple[ActorKey, int, int], tuple[PendingActions, int]] = {}  # rows taken as an `act`
        self._answers: Answers = []
        self._callbacks = CallbackQueue(wake)
        self._batcher: Batcher[None, _Observations, Choices] | None = None  # from `start` on

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
        open_episodes = sum(len(client.episodes) for client in self._clients.values()) + sum(
            map(len, self._rows.values())
        )
        return {"open_episodes": open_episodes, "actions": counts.rows, "batches": counts.batches}

    def add_client(self, key: ActorKey, progress: ActorProgress, max_episodes: int = MAX_OPEN_EPISODES) -> OpenEpisodes:
        """Add a new or returning client; the episodes of a returning one go on."""
        client = self._clients.setdefault(key, OpenEpisodes(key, progress, max_episodes))
        client.progress = progress
        return client

    def take_message(self, key: ActorKey, message: ActMessage | ActsMessage, frames: Sequence[bytes]) -> None:
        """Take observations of an actor: `run_round` will have the answer. Raises ProtocolViolation for columns that do
        not fit together."""
        if isinstance(message, ActsMessage):
            return self._take_acts(key, message, frames)
        try:
            answer = self.take_act(key, message, frames)
        except InvalidSegment as error:
            reason = "too_many_episodes" if error.field == "episode" else INVALID
            answer = ActionMessage(
                message.episode, message.step, reason=reason, detail=self._record_invalid(key, error)
            )
        if answer is not None:
            self._answers.append((key, answer))

    def _record_invalid(self, key: ActorKey, error: InvalidSegment) -> str:
        """Count it, and return it for people."""
        detail = f"{error.field}: {error.problem}"
        self._state.progress.record_rejection(self._clients[key].progress, error.reason, detail)
        return detail

    def take_act(self, key: ActorKey, message: ActMessage, frames: Sequence[bytes]) -> ActionMessage | None:
        """Take an observation; returns an answer that needs no policy, or None: `run_round` will have it.

        Raises InvalidSegment for an observation or a reward outside of the spec, which changes nothing.
        """
        observation = read_observation(message, frames, self._experience, self._choices)
        client = self._clients[key]
        if (rows := self._rows.get(key)) is not None:
            if rows.is_waiting(message.episode, message.step):
                return None
            if (released := rows.release(message.episode)) is not None:
                client.episodes[message.episode] = released
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
            complete = partial(self._take, client, episode, message, observation, step)
            self._completing[key, message.episode] = complete, 0
        return None

    def _take_acts(self, key: ActorKey, message: ActsMessage, frames: Sequence[bytes]) -> None:
        rows, invalid = read_rows(message, frames, self._experience, self._choices)
        client = self._clients[key]
        if (episodes := self._rows.get(key)) is None:
            episodes = self._rows[key] = RowEpisodes(client, self._experience, sum(self._choices))
        refused: dict[int, Refusal | None] = {
            row: (INVALID, self._record_invalid(key, error)) for row, error in invalid.items()
        }
        if client.behaviour:
            refusal = INVALID, f"taken: {client.behaviour} acts: send it as `act`"
            refused = dict.fromkeys(range(len(rows.episodes)), refusal)
        single: dict[int, int] = {}  # rows of episodes that stay as they are
        for row, number in enumerate(rows.episodes) if client.episodes else ():  # of single messages
            if (episode := client.episodes.get(number)) is None or row in refused:
                continue
            if episode.choice is None or episode.is_full:
                is_waiting = rows.steps[row] == episode.step + episode.is_full
                refused[row] = None if is_waiting else (WRONG_STEP, "")
            elif episode.is_assisted:
                refused[row] = (WRONG_STEP, "") if number in single else None
                single.setdefault(number, row)
            else:
                episodes.adopt(client.episodes.pop(number))
        pending = PendingActions(rows, self._experience.action)
        taken = episodes.take(pending, refused, time.monotonic())
        pending.num_waiting = len(taken.asking) + len(taken.completing) + len(single)
        for row in single.values():
            self._take_single(key, pending, row)
        if not pending.num_waiting and (answer := pending.to_frames()):
            self._answers.append((key, answer))
        self._enqueue_rows(key, pending, taken.asking)
        room = 0 if self._completing else max(0, self._state.sessions.count_free())
        self._complete_rows(key, pending, taken.completing[:room])
        waiting = taken.completing[room:].tolist()
        episodes.hold([rows.episodes[row] for row in waiting])
        self._completing |= {(key, rows.episodes[row]): (pending, row) for row in waiting}

    def _take_single(self, key: ActorKey, pending: PendingActions, row: int) -> None:
        """Take a row as an `act`, whose answer becomes part of the rows'."""
        message, frames = pending.rows.to_act(row, has_masks=bool(self._choices))
        self._single[key, message.episode, message.step] = pending, row
        self.take_message(key, message, frames)

    def _join_single(self, answers: Answers) -> Answers:
        """The answers, those to rows that were taken as an `act` within those of their messages."""
        joined: Answers = []
        for key, answer in answers:
            place = (key, answer.episode, answer.step) if isinstance(answer, ActionMessage) else None
            if place not in self._single or not isinstance(answer, ActionMessage):
                joined.append((key, answer))
                continue
            pending, row = self._single.pop(place)
            pending.take(row, answer)
            if not pending.num_waiting:
                joined.append((key, pending.to_frames()))
        return joined

    def run_round(self) -> Answers:
        """Store the segments for which there are slots now; returns the new answers, each with its client."""
        room = max(0, self._state.sessions.count_free()) if self._completing else 0
        for owner, group in groupby(list(islice(self._completing.items(), room)), lambda each: each[1][0]):
            places, rows = zip(*[(place, row) for place, (_, row) in group], strict=True)
            for place in places:
                del self._completing[place]
            if isinstance(owner, PendingActions):
                self._complete_rows(places[0][0], owner, np.array(rows))
            elif (answer := owner()) is not None:
                self._answers.append((places[0][0], answer))
        self._callbacks.run()
        answers = self._answers[:]
        self._answers.clear()
        return self._join_single(answers) if self._single else answers

    def forget(self, key: ActorKey) -> None:
        """Drop a client that has said goodbye. The steps since its last segments were never counted."""
        if (client := self._clients.pop(key, None)) is not None:
            self._store_shown(client, client.episodes.values())
            rows = self._rows.pop(key, None)
            for number in (*client.episodes, *(rows.get_numbers() if rows is not None else ())):
                self._policy.reset(_make_stream(key, number))
        self._completing = {waiting: each for waiting, each in self._completing.items() if waiting[0] != key}
        self._single = {waiting: each for waiting, each in self._single.items() if waiting[0] != key}

    def expire(self, before_s: float) -> None:
        """End the episodes that no client has continued since `before_s`, and count each as a dropped segment."""
        ledger = self._state.queue.ledger
        for key, client in list(self._clients.items()):
            rows = self._rows.get(key)
            idle = list(client.take_idle(before_s))
            self._store_shown(client, idle)
            numbers = [episode.number for episode in idle]
            for number in (*numbers, *(rows.take_idle(before_s) if rows is not None else ())):
                self._policy.reset(_make_stream(key, number))
                ledger.record_received(key, ledger.get_account(key).next_seq, DropReason.EXPIRED)
            if not client.episodes and not rows and not client.progress.connected:
                del self._clients[key]
                self._rows.pop(key, None)

    def _store_shown(self, client: OpenEpisodes, episodes: Iterable[RemoteEpisode]) -> None:
        """Store what was shown in episodes that do not go on, since their last segments."""
        for segment in filter(None, (take_shown(episode, self._experience) for episode in episodes)):
            self._store(client.key, client.progress, segment)

    def _take(
        self, client: OpenEpisodes, episode: RemoteEpisode, message: ActMessage, observation: Observed, step: Step
    ) -> ActionMessage | None:
        """Take a step, and store the segments that it completes."""
        for segment in take_step(episode, message, observation, step, self._experience):
            self._store(client.key, client.progress, segment)
        if message.terminated or message.truncated:
            del client.episodes[episode.number]
            self._policy.reset(_make_stream(client.key, episode.number))
            return ActionMessage(message.episode, message.step)
        self._enqueue(client, episode)
        return None

    def _complete_rows(self, key: ActorKey, pending: PendingActions, at: np.ndarray) -> None:
        """Store the segments that rows complete: their episodes end, or ask for an action."""
        if not len(at):
            return
        for segment in self._rows[key].complete(pending.rows, at):
            self._store(key, self._clients[key].progress, segment)
        are_last = pending.rows.are_last[at]
        for row in at[are_last].tolist():
            self._policy.reset(_make_stream(key, pending.rows.episodes[row]))
            pending.end(row)
            pending.num_waiting -= 1
        if not pending.num_waiting:
            self._answers.append((key, pending.to_frames()))
        self._enqueue_rows(key, pending, at[~are_last])

    def _enqueue_rows(self, key: ActorKey, pending: PendingActions, at: np.ndarray) -> None:
        if not len(at):
            return
        rows = pending.rows
        streams: list[Hashable] = [_make_stream(key, -1)] * len(at)
        starting: list[Hashable] = []
        if self._has_state:
            streams = [_make_stream(key, rows.episodes[row]) for row in at]
            starting = [stream for stream, row in zip(streams, at, strict=True) if rows.steps[row] == 0]
        asked = _Observations(rows.observations[at].tobytes(), rows.masks[at].tobytes(), streams, starting)
        reply = AnsweringRows(self._answers, self._clients[key], self._rows[key], pending, at)
        self._queue.enqueue(asked, reply, len(at), group=None, tenant=key[0])

    def _enqueue(self, client: OpenEpisodes, episode: RemoteEpisode) -> None:
        observed, streams = episode.observations[-1], [_make_stream(client.key, episode.number)]
        asked = _Observations(observed.frame, observed.mask, streams, () if episode.step else streams)
        self._queue.enqueue(asked, _Answering(self._answers, client, episode), group=None, tenant=client.key[0])

    # What follows runs in the batcher's thread, or for a short batch in the gateway's.

    def _forward(self, batch: PendingBatch[None, _Observations, Choices]) -> list[Choices]:
        asked = [entry.request for entry in batch.requests]
        snapshot, policy, spec = self._state.weights, self._policy, self._experience.observation
        if snapshot is None:
            raise Closed("there are no weights")
        if snapshot.version != policy.version:
            policy.load(snapshot.version, decode_tensors(snapshot.payload))
        streams = [stream for each in asked for stream in each.streams]
        frames = np.frombuffer(b"".join([each.frames for each in asked]), spec.numpy_dtype())
        masks = None
        if self._choices:
            masks = np.frombuffer(b"".join([each.masks for each in asked]), np.bool_).reshape(len(streams), -1)
        extras: list[Mapping[str, Any]] = []
        if self._has_state:
            for stream in [stream for each in asked for stream in each.starting]:
                policy.reset(stream)
            extras = [policy.get_extras(stream) for stream in streams]  # before the observations
        actions, log_probabilities = policy.act_batch(frames.reshape(len(streams), *spec.shape), streams, masks)
        version, end, choices = policy.version, 0, []
        for each in asked:
            begin, end = end, end + len(each.streams)
            choices.append(Choices(actions[begin:end], log_probabilities[begin:end], version, extras[begin:end]))
        return choices


def _make_stream(key: ActorKey, episode: int) -> Hashable:
    """The actor's id decides how it explores, the rest tells its episodes apart."""
    return key[0], (key[1], episode)
