"""Episodes of an endpoint's users, who act and reward by separate calls: they become `act` messages like an actor's.

The users are one actor of the run, whose episodes are computed, assembled and counted by `RemoteInference`. The gateway
calls this in its thread; `put` comes from any. An episode that no user continues expires: a rewarded one is cut off
there, one whose last action was never rewarded is counted as a dropped segment (`expired`).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.errors import InvalidSegment
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.gateway.remote_episodes import RemoteEpisode
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.sessions import USERS_ACTOR_ID
from shoal.rl.gateway.state import GatewayState
from shoal.wire.messages import ActionMessage, ActMessage
from shoal.wire.segment import REWARD, check_finite, check_values

MAX_USER_EPISODES = 10_000


class EpisodeRejection(NamedTuple):
    """Why a request was not taken: the HTTP status and a message."""

    status: int
    message: str


EpisodeReply = Future[EpisodeAnswer | EpisodeRejection]


@dataclass(eq=False)
class _UserExchange:
    """What the user of an episode has given since its last action, and waits for.

    reward:     None: none was given
    reply:      of the request whose answer is on its way
    is_over:    the episode ends with that answer
    is_expired: no user waits for its end
    """

    handle: str
    reply: EpisodeReply | None
    reward: float | None = None
    is_over: bool = False
    is_expired: bool = False


class UserEpisodes:
    """Takes requests of users, and answers each through its future.

    key: of the users as an actor, whose incarnation is this gateway

    Raises ConfigError for a run whose policy cannot be computed at its gateway.
    """

    def __init__(self, state: GatewayState, inference: RemoteInference) -> None:
        self.key = (USERS_ACTOR_ID, time.time_ns())
        self._spec, self._inference = state.setting.experience, inference.start()
        state.queue.ledger.open_account(self.key)
        self._episodes = inference.add_client(self.key, state.actors.join(self.key), MAX_USER_EPISODES)
        self._exchanges: dict[int, _UserExchange] = {}  # by the number of the episode
        self._requests: deque[tuple[EpisodeRequest, EpisodeReply]] = deque()  # from other threads
        self._num_started = self._num_finished = self._num_expired = 0

    def put(self, request: EpisodeRequest) -> EpisodeReply:
        """Queue a request, which the gateway's next round takes. From any thread."""
        reply: EpisodeReply = Future()
        self._requests.append((request, reply))
        return reply

    def run_round(self) -> None:
        """Take the requests: answer each now or, if the policy must be computed, in `deliver`."""
        while self._requests:
            request, reply = self._requests.popleft()
            try:
                rejection = self._take(request, reply)
            except InvalidSegment as error:
                rejection = EpisodeRejection(422, f"{error.field}: {error.problem}")
            if rejection is not None:
                reply.set_result(rejection)

    def deliver(self, message: ActionMessage) -> None:
        """Answer the request that waits for this action."""
        exchange = self._exchanges.get(message.episode)
        if exchange is None:
            return
        reply, exchange.reply = exchange.reply, None
        if message.reason or exchange.is_over:
            del self._exchanges[message.episode]
            self._num_finished += not exchange.is_expired
        if reply is None:
            return  # it was cut off here, and no user waits
        if message.reason:
            reply.set_result(EpisodeRejection(500, f"the policy could not be computed ({message.reason})"))
            return
        action = message.action
        if action is not None and self._spec.action.shape:
            action = np.array(action).reshape(self._spec.action.shape).tolist()
        reply.set_result(EpisodeAnswer(exchange.handle, action, message.version))

    def expire(self, before_s: float) -> None:
        """Close the episodes that no user has continued since `before_s`. Called before `RemoteInference.expire`, with
        the same time."""
        for number, exchange in list(self._exchanges.items()):
            if exchange.reply is not None or exchange.is_expired or self._episodes[number].used_at >= before_s:
                continue
            self._num_expired += 1
            if exchange.reward is None:
                del self._exchanges[number]  # `RemoteInference` expires it as any other
            else:
                exchange.is_expired = True
                episode = self._episodes[number]
                newest = self._episodes.get_observation(episode)
                self._act(episode, exchange, newest, None, is_last=True, truncated=True)

    def close(self) -> None:
        """Refuse what waits: requests, and those whose answers are on their way."""
        replies = [each.reply for each in self._exchanges.values() if each.reply is not None]
        for reply in (*(reply for _, reply in self._requests), *replies):
            reply.set_result(EpisodeRejection(503, "the run's gateway is closing"))

    def get_counts(self) -> dict[str, int]:
        """Episodes by what became of them."""
        num_open = sum(not each.is_expired for each in self._exchanges.values())
        return {"begun": self._num_started, "ended": self._num_finished, "expired": self._num_expired, "open": num_open}

    def _take(self, request: EpisodeRequest, reply: EpisodeReply) -> EpisodeRejection | None:
        observation = None if request.observation is None else self._encode(request.observation)
        if not request.episode:
            return self._begin(observation, request, reply)
        number = self._read_number(request.episode)
        if isinstance(number, EpisodeRejection):
            return number
        exchange = self._exchanges[number]
        if exchange.reply is not None:
            return EpisodeRejection(409, "the answer to the request before is still on its way")
        episode, before = self._episodes[number], exchange.reward
        reward = before if request.reward is None else (before or 0.0) + request.reward
        check_values("reward", np.array(reward or 0.0), REWARD)
        episode.used_at, exchange.reward = time.monotonic(), reward
        if observation is None and not request.ended:
            reply.set_result(EpisodeAnswer(exchange.handle))
            return None
        try:
            frame = observation or self._episodes.get_observation(episode)
            self._act(episode, exchange, frame, reply, request.ended, request.truncated)
        except InvalidSegment:
            exchange.reward = before
            raise
        return None

    def _begin(
        self, observation: bytes | None, request: EpisodeRequest, reply: EpisodeReply
    ) -> EpisodeRejection | None:
        if observation is None or request.ended or request.reward is not None:
            return EpisodeRejection(422, "episode: an episode begins with an observation alone")
        if len(self._exchanges) >= MAX_USER_EPISODES:
            return EpisodeRejection(429, f"{MAX_USER_EPISODES} episodes are open: end them, or wait until some expire")
        number = self._num_started
        self._inference.take_act(self.key, ActMessage(number, 0), [observation])
        self._num_started += 1
        self._exchanges[number] = _UserExchange(f"{self.key[1]}-{number}-{secrets.token_hex(8)}", reply)
        return None

    def _act(
        self,
        episode: RemoteEpisode,
        exchange: _UserExchange,
        observation: bytes,
        reply: EpisodeReply | None,
        is_last: bool,
        truncated: bool,
    ) -> None:
        """Take one step. Raises InvalidSegment, which changes nothing."""
        message = ActMessage(
            episode.number, episode.step + 1, exchange.reward or 0.0, is_last and not truncated, is_last and truncated
        )
        self._inference.take_act(self.key, message, [observation])
        exchange.reward = None
        exchange.reply = reply
        exchange.is_over = is_last

    def _encode(self, values: list[object]) -> bytes:
        spec = self._spec.observation
        try:
            given = np.array(values)
        except ValueError as error:
            raise InvalidSegment("invalid_shape", "observation", str(error)) from None
        if given.dtype.kind not in "iufb" or given.shape != spec.shape:
            problem = f"{given.dtype} {list(given.shape)}, expected {spec.dtype} {list(spec.shape)}"
            raise InvalidSegment("invalid_shape", "observation", problem)
        if given.dtype.kind == "f" and given.size:  # before the conversion, which makes every such number infinite
            check_finite("observation", float(given.min()), float(given.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            converted = given.astype(spec.numpy_dtype())
        if spec.numpy_dtype().kind in "iu" and not np.array_equal(converted, given):
            raise InvalidSegment("invalid_range", "observation", f"does not fit {spec.dtype}")
        return converted.tobytes()

    def _read_number(self, handle: str) -> int | EpisodeRejection:
        """The number of the open episode with this handle."""
        incarnation, _, rest = handle.partition("-")
        number = rest.partition("-")[0]
        if not (incarnation.isdecimal() and number.isdecimal() and len(number) < 19):
            return EpisodeRejection(404, "there is no such episode")
        exchange = self._exchanges.get(int(number))
        if (
            exchange is not None
            and not exchange.is_expired
            and secrets.compare_digest(exchange.handle.encode(), handle.encode())
        ):
            return int(number)
        if incarnation != str(self.key[1]) or int(number) < self._num_started:
            return EpisodeRejection(410, "the episode has ended or expired, or the run's gateway has restarted")
        return EpisodeRejection(404, "there is no such episode")
