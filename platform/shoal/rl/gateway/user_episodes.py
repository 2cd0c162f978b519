"""Episodes of an endpoint's users, who act and reward by separate calls: they become `act` messages like an actor's.

Owns the handles. The gateway calls it in its thread. The users are one actor of the run, whose episodes are computed,
assembled and counted by `RemoteInference`. An episode that nobody continues expires: a rewarded one is cut off there,
one whose last action was never rewarded is counted as a dropped segment (`expired`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.errors import InvalidSegment
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.sessions import USERS_ACTOR_ID
from shoal.wire import ExperienceSpec
from shoal.wire.messages import ActionMessage, ActMessage
from shoal.wire.segment import REWARD, check_finite, check_values

MAX_USER_EPISODES = 10_000


class EpisodeRejection(NamedTuple):
    """Why a request was not taken: the HTTP status and a message."""

    status: int
    message: str


EpisodeReply = Future[EpisodeAnswer | EpisodeRejection]


@dataclass(eq=False)
class _UserEpisode:
    """An episode behind a handle.

    reward:  since the last action; None: none was given
    reply:   of the request whose answer is on its way
    is_over: it ends with that answer
    """

    handle: str
    number: int
    observation: bytes
    used_at: float
    step: int = 0
    reward: float | None = None
    reply: EpisodeReply | None = None
    is_over: bool = False


class UserEpisodes:
    """Takes requests of users, and answers each through its future."""

    def __init__(self, inference: RemoteInference, experience: ExperienceSpec, incarnation: int) -> None:
        self.key = (USERS_ACTOR_ID, incarnation)
        self._inference, self._experience, self._incarnation = inference, experience, incarnation
        self._episodes: dict[str, _UserEpisode] = {}
        self._by_number: dict[int, _UserEpisode] = {}
        self._num_started = self._num_finished = self._num_expired = 0

    def take(self, request: EpisodeRequest, reply: EpisodeReply) -> None:
        """Answer a request now or, if the policy must be computed, in `deliver`."""
        try:
            rejection = self._take(request, reply)
        except InvalidSegment as error:
            rejection = EpisodeRejection(422, f"{error.field}: {error.problem}")
        if rejection is not None:
            reply.set_result(rejection)

    def deliver(self, message: ActionMessage) -> None:
        """Answer the request that waits for this action."""
        episode = self._by_number.get(message.episode)
        if episode is None:
            return
        reply, episode.reply = episode.reply, None
        if message.reason or episode.is_over:
            self._remove(episode)
        if reply is None:
            return  # it was cut off here, and no user waits
        if message.reason:
            reply.set_result(EpisodeRejection(500, f"the policy could not be computed ({message.reason})"))
            return
        action = message.action
        if action is not None and self._experience.action.shape:
            action = np.array(action).reshape(self._experience.action.shape).tolist()
        reply.set_result(EpisodeAnswer(episode.handle, action, message.version))

    def expire(self, timeout_s: float) -> None:
        """Close the episodes that nobody has continued for `timeout_s`."""
        before_s = time.monotonic() - timeout_s
        for episode in [each for each in self._episodes.values() if each.used_at < before_s and each.reply is None]:
            self._num_expired += 1
            del self._episodes[episode.handle]
            if episode.reward is None:
                del self._by_number[episode.number]  # `RemoteInference` expires it as any other
            else:
                self._act(episode, episode.observation, None, is_last=True, truncated=True)

    def close(self, waiting: Sequence[EpisodeReply]) -> None:
        """Refuse what waits: these requests, and those whose answers are on their way."""
        replies = [each.reply for each in self._by_number.values() if each.reply is not None]
        for reply in (*waiting, *replies):
            reply.set_result(EpisodeRejection(503, "the run's gateway is closing"))

    def get_counts(self) -> dict[str, int]:
        """Episodes by what became of them."""
        begun, ended, expired = self._num_started, self._num_finished, self._num_expired
        return {"begun": begun, "ended": ended, "expired": expired, "open": len(self._episodes)}

    def _take(self, request: EpisodeRequest, reply: EpisodeReply) -> EpisodeRejection | None:
        observation = None if request.observation is None else self._encode(request.observation)
        if not request.episode:
            return self._begin(observation, request, reply)
        episode = self._episodes.get(request.episode)
        if episode is None:
            return self._describe_missing(request.episode)
        if episode.reply is not None:
            return EpisodeRejection(409, "the answer to the request before is still on its way")
        before, reward = episode.reward, _add(episode.reward, request.reward)
        check_values("reward", np.array(reward or 0.0), REWARD)
        episode.used_at, episode.reward = time.monotonic(), reward
        if observation is None and not request.ended:
            self._inference.touch_episode(self.key, episode.number)
            reply.set_result(EpisodeAnswer(episode.handle))
            return None
        try:
            self._act(episode, observation or episode.observation, reply, request.ended, request.truncated)
        except InvalidSegment:
            episode.reward, episode.reply = before, None
            raise
        return None

    def _begin(
        self, observation: bytes | None, request: EpisodeRequest, reply: EpisodeReply
    ) -> EpisodeRejection | None:
        if observation is None or request.ended or request.reward is not None:
            return EpisodeRejection(422, "episode: an episode begins with an observation alone")
        if len(self._episodes) >= MAX_USER_EPISODES:
            return EpisodeRejection(429, f"{MAX_USER_EPISODES} episodes are open: end them, or wait until some expire")
        number, secret = self._num_started, secrets.token_hex(8)
        handle = f"{self._incarnation}-{number}-{secret}"
        episode = _UserEpisode(handle, number, observation, time.monotonic())
        message = ActMessage(number, 0)
        self._inference.take_act(self.key, message, [observation])
        episode.reply = reply
        self._num_started += 1
        self._episodes[handle] = self._by_number[number] = episode
        return None

    def _act(
        self, episode: _UserEpisode, observation: bytes, reply: EpisodeReply | None, is_last: bool, truncated: bool
    ) -> None:
        """One step. Raises InvalidSegment, which changes nothing of the episode at `RemoteInference`."""
        message = ActMessage(
            episode.number, episode.step + 1, episode.reward or 0.0, is_last and not truncated, is_last and truncated
        )
        answer = self._inference.take_act(self.key, message, [observation])
        episode.step, episode.observation, episode.reward = episode.step + 1, observation, None
        episode.reply, episode.is_over = reply, is_last
        if answer is not None:
            self.deliver(answer)

    def _encode(self, values: list[object]) -> bytes:
        spec = self._experience.observation
        try:
            given = np.array(values)
        except ValueError as error:
            raise InvalidSegment("invalid_shape", "observation", str(error)) from None
        if given.dtype.kind not in "iufb" or given.shape != spec.shape:
            problem = f"{given.dtype} {list(given.shape)}, expected {spec.dtype} {list(spec.shape)}"
            raise InvalidSegment("invalid_shape", "observation", problem)
        if given.dtype.kind == "f":
            check_finite("observation", given)  # before the conversion, which makes every such number infinite
        with np.errstate(over="ignore", invalid="ignore"):
            converted = given.astype(spec.numpy_dtype())
        if spec.numpy_dtype().kind in "iu" and not np.array_equal(converted, given):
            raise InvalidSegment("invalid_range", "observation", f"does not fit {spec.dtype}")
        return converted.tobytes()

    def _describe_missing(self, handle: str) -> EpisodeRejection:
        incarnation, _, rest = handle.partition("-")
        number = rest.partition("-")[0]
        is_older = incarnation != str(self._incarnation) or (number.isdecimal() and int(number) < self._num_started)
        if incarnation.isdecimal() and number.isdecimal() and is_older:
            return EpisodeRejection(410, "the episode has ended or expired, or the run's gateway has restarted")
        return EpisodeRejection(404, "there is no such episode")

    def _remove(self, episode: _UserEpisode) -> None:
        self._num_finished += self._episodes.pop(episode.handle, None) is not None
        self._by_number.pop(episode.number, None)


def _add(before: float | None, reward: float | None) -> float | None:
    return before if reward is None else (before or 0.0) + reward
