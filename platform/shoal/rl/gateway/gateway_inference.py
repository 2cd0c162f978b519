"""The gateway's part of remote inference: who is answered, and what becomes of their segments.

Owns the inference, which begins with the first session that asks for it, and the requests of the endpoint's users.
The gateway calls it in its thread, under its lock, and sends the answers; `put_user_request` comes from any thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from shoal.errors import ConfigError
from shoal.open_inference.episodes import EpisodeRequest
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress, ActorTable
from shoal.rl.gateway.admission import Admission
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.sessions import REMOTE, Session, Sessions
from shoal.rl.gateway.user_episodes import MAX_USER_EPISODES, EpisodeReply, UserEpisodes
from shoal.weights import WeightSnapshot
from shoal.wire import DropReason, ExperienceSpec
from shoal.wire.action_masks import MASKS
from shoal.wire.messages import ActionMessage, ActMessage


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


class GatewayInference:
    """Answers the sessions that send observations, and the endpoint's users."""

    def __init__(
        self,
        experience: ExperienceSpec,
        is_synchronous: bool,
        queue: ExperienceQueue,
        sessions: Sessions,
        admission: Admission,
        get_weights: Callable[[], WeightSnapshot | None],
        wake: Callable[[], None],
    ) -> None:
        """`wake` makes the gateway call `run_round`."""
        self._experience, self._is_synchronous, self._queue = experience, is_synchronous, queue
        self._sessions, self._admission, self._get_weights, self._wake = sessions, admission, get_weights, wake
        self._inference: RemoteInference | None = None  # from the first session that asks for it
        self._users: UserEpisodes | None = None
        self._user_requests: deque[tuple[EpisodeRequest, EpisodeReply]] = deque()  # from other threads

    def start(self) -> RemoteInference:
        """Start it, if it has not begun. Raises ConfigError for a policy that cannot be computed here."""
        require_remote_inference(self._experience, self._is_synchronous)
        if self._inference is None:
            self._inference = RemoteInference(
                self._experience,
                self._get_weights,
                lambda: self._sessions.has_space(self._queue),
                self._admission.store,
                self._wake,
            )
        return self._inference

    def admit_users(self, actors: ActorTable) -> None:
        """Take the users of the endpoint, who are one actor, whose incarnation is this gateway. Raises as `start`."""
        inference = self.start()
        self._users = UserEpisodes(inference, self._experience, time.time_ns())
        self._queue.ledger.open_account(self._users.key)
        inference.add_client(self._users.key, actors.join(self._users.key), MAX_USER_EPISODES)

    @property
    def has_users(self) -> bool:
        """Whether it takes the users of the endpoint."""
        return self._users is not None

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, or it has not begun."""
        return self._inference is None or self._inference.is_alive

    def put_user_request(self, request: EpisodeRequest) -> EpisodeReply:
        """Queue a user's request, which a later round answers. From any thread."""
        reply: EpisodeReply = Future()
        self._user_requests.append((request, reply))
        self._wake()
        return reply

    def add_client(self, key: ActorKey, progress: ActorProgress) -> None:
        """Add a new or returning client, after `start`."""
        assert self._inference is not None
        self._inference.add_client(key, progress)

    def forget(self, key: ActorKey) -> None:
        """Drop a client that will not return."""
        if self._inference is not None:
            self._inference.forget(key)

    def take_act(self, session: Session, message: ActMessage, frames: Sequence[bytes]) -> ActionMessage | None:
        """Take an observation; returns an answer that needs no policy, or None. Raises InvalidSegment for one that is
        outside of the spec, or one episode too many."""
        assert self._inference is not None
        return self._inference.take_act(session.key, message, frames)

    def run_round(self) -> Iterator[tuple[bytes, ActionMessage]]:
        """Take what users have asked, store completed segments, and yield the actions for sessions, by route."""
        if self._inference is None:
            return
        while self._users is not None and self._user_requests:
            self._users.take(*self._user_requests.popleft())
        self._inference.run_round()
        for key, answer in self._inference.take_answers():
            if self._users is not None and key == self._users.key:
                self._users.deliver(answer)
            elif (route := self._sessions.find_route(key[0])) is not None and self._sessions[route].key == key:
                yield route, answer  # otherwise another incarnation has taken the actor's place

    def expire_episodes(self, timeout_s: float) -> None:
        """End the episodes that nobody continues, and count each as a dropped segment."""
        if self._inference is None:
            return
        if self._users is not None:
            self._users.expire(timeout_s)
        for client in self._inference.expire(timeout_s):
            seq = self._queue.ledger.get_account(client.key).next_seq
            self._queue.ledger.record_received(client.key, seq, DropReason.EXPIRED)

    def get_counts(self) -> dict[str, Any]:
        """For the gateway's stats."""
        return {
            "remote_inference": self._inference.get_counts() if self._inference else None,
            "user_episodes": self._users.get_counts() if self._users else None,
        }

    def close_users(self) -> None:
        """Answer the users who still wait."""
        if self._users is not None:
            self._users.close([reply for _, reply in self._user_requests])

    def close(self) -> None:
        """End its thread. Idempotent."""
        if self._inference is not None:
            self._inference.close()
