"""Actors for a game that owns its loop: it asks for actions and reports rewards.

A GameActor never waits for the network: its thread sends the segments and receives the weights, and the game's thread
takes what has arrived. Called by games, through `shoal.connect`; imports neither torch nor ray.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from shoal.actor.agent_streams import find_mask
from shoal.actor.client import ActorClient
from shoal.actor.policy import Policy, make_policy
from shoal.actor.segment_builder import SegmentBuilder, require_numbers
from shoal.errors import Closed, ConfigError, RunChanged, ShoalError
from shoal.wire import Segment
from shoal.wire.action_masks import INFO_KEY, MASKS, find_choices, read_mask
from shoal.wire.given_spaces import center_choices, floor_choices, read_choices
from shoal.wire.segment import HUMAN
from shoal.wire.spaces import flatten_observation

_POLL_S = 0.01  # how often the thread looks for new weights while the game sends nothing


@dataclass
class OpenEpisode:
    """An episode that a game is playing. reward: since its newest action"""

    reward: float = field(default=0.0, kw_only=True)


C = TypeVar("C", bound=ActorClient)
E = TypeVar("E", bound=OpenEpisode)


class EpisodeActor(ABC, Generic[C, E]):
    """The calls of a game that owns its loop, wherever its policy runs. client: connected"""

    def __init__(self, client: C) -> None:
        self.client = client
        self._choices = read_choices(client.offers.get("action"))
        self._episodes: dict[Hashable, E] = {}

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.client.finished

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that chose the last action."""

    @abstractmethod
    def act(self, observation: Any, episode: Hashable = None, mask: Any = None, taken: Any = None) -> Any:
        """The action for an observation: as the environment of the run shows it, or flat.

        episode: the key of the episode; a key that is not in use begins one
        mask:    in a run with action masks, 1 for each action that is allowed here, and 0 for the others
        taken:   what the game does here in place of the policy's action, which is returned: a demonstration. From one
                 step to the next, a person may take the controls and give them back
        """

    def reward(self, value: float, episode: Hashable = None) -> None:
        """Add to the reward of the last action. May be called several times, or never, which is 0. Raises
        InvalidSegment for what is no number, or not finite."""
        require_numbers("reward", value, episode)
        self._find(episode).reward += float(value)

    @abstractmethod
    def end_episode(
        self,
        observation: Any,
        *,
        truncated: bool = False,
        episode: Hashable = None,
        mask: Any = None,
        success: bool | None = None,
    ) -> None:
        """End an episode. `observation` is the real one after its last step; `truncated`: a limit has cut it off; then
        `mask` is its action mask, by default one that allows everything. `success`: whether it reached its goal, in a
        game that has one: of these is the run's success rate."""

    @abstractmethod
    def close(self, drain_timeout_s: float = 2.0) -> None:
        """Send what waits, for at most `drain_timeout_s`, and disconnect. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_taken(self, taken: Any) -> None:
        """Raise ConfigError where somebody else acts than the policy, and the action is missing."""
        if taken is None and (behaviour := self.client.behaviour):
            problem = f"is missing, and the behaviour of this actor is {behaviour}"
            raise ConfigError("taken", taken, problem, "act(observation, taken=action), or leave behaviour out")

    def _flatten(self, observation: Any, episode: Hashable) -> Any:
        """An observation as segments have it. Raises InvalidSegment, which names its number and the episode."""
        spec = self.client.spec
        flat = flatten_observation(spec, observation)
        require_numbers("observation", flat, episode, int(np.prod(spec.observation.shape)))
        return flat

    def _find(self, episode: Hashable) -> E:
        if episode not in self._episodes:
            raise ConfigError("episode", episode, "has no action yet", "call act(observation) first")
        return self._episodes[episode]


@dataclass
class _Episode(OpenEpisode):
    """`step` is its last action, whose reward is not complete. behaviour: who took the builder's steps; is_assisted:
    others than the policy have taken some of the episode."""

    builder: SegmentBuilder
    step: tuple[Any, float, int, str]  # action, log-probability, version, behaviour
    behaviour: str = ""
    is_assisted: bool = False
    is_recorded: bool = True  # not after another run has taken the address: it has seen half of the episode


class GameActor(EpisodeActor[ActorClient, _Episode]):
    """Acts for a game, and sends its experience.

        with shoal.connect("tcp://127.0.0.1:5555") as actor:
            while not actor.finished:
                observation = game.restart()
                while game.is_on:
                    action = actor.act(observation)
                    observation, reward = game.tick(action)
                    actor.reward(reward)
                actor.end_episode(observation)

    Several episodes may run at once, each under a key of the game's choice. All calls come from one thread.

    client:       connected
    seed:         of the sampled actions
    budget_s:     how long a call may wait for a busy learner before it discards the oldest waiting segment; with a
                  demonstration it waits for as long as it takes
    max_waiting:  segments that wait to be sent
    discarded:    how many segments were discarded, because the learner was busy for longer

    | queue            | capacity      | what blocks              | who unblocks | close()              |
    |------------------|---------------|--------------------------|--------------|----------------------|
    | waiting segments | `max_waiting` | the game, for `budget_s` | the thread   | sends what is waiting |
    """

    def __init__(
        self, client: ActorClient, seed: int | None = None, budget_s: float = 0.002, max_waiting: int = 16
    ) -> None:
        if client.spec.self_play:
            problem = "draws the opponents of an episode, which a game that owns its loop cannot"
            raise ConfigError("self_play", True, problem, "make it an environment of several agents, for actor.play")
        super().__init__(client)
        self.discarded = 0
        self._seed = seed
        self._budget_s = budget_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, Segment]] = deque()  # with the run that it belongs to
        self._changed = threading.Condition()
        self._run = 0  # counts the runs that have taken the address
        self._error: ShoalError | None = None
        self._is_closing = False
        self._current_run = 0  # the run of the policy and the recorded episodes
        self._policy = self._make_policy(self.client.wait_for_weights())
        self._thread = threading.Thread(target=self._exchange, name="game-actor", daemon=True)
        self._thread.start()

    # -- for the game -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._policy.version

    def act(self, observation: Any, episode: Hashable = None, mask: Any = None, taken: Any = None) -> Any:
        """Act as an EpisodeActor: sample with the newest weights that have arrived. When the run is over, with the last
        weights, and nothing is recorded any more.

        Raises InvalidSegment for an observation of another shape than the run's, and Refused or ConnectionLost when the
        gateway has rejected the actor or has been away for longer than the client's `timeout_s`.
        """
        self._check()
        self._require_taken(taken)
        allowed = None
        if choices := find_choices(self.client.spec):
            if mask is None:
                problem = "is missing, and this run has action masks"
                raise ConfigError("mask", mask, problem, "act(observation, mask=...)")
            allowed = read_mask(mask, choices)
        observation = self._flatten(observation, episode)
        playing = self._episodes.get(episode)
        if playing is None:
            builder = SegmentBuilder(self.client.spec)
            self._policy.reset(episode)
            builder.begin(observation, self._get_extras(episode, allowed))
        elif playing.is_recorded:
            self._record(playing, observation, episode, allowed)
        action, log_probability = self._policy.act(np.asarray(observation), episode, allowed)
        step = (action, log_probability, self._policy.version, "")
        if taken is not None:
            action = center_choices(taken, self._choices)
            step = (action, 0.0, 0, self.client.behaviour or HUMAN)
        if playing is None:
            self._episodes[episode] = _Episode(builder, step, is_recorded=self._current_run == self._run)
        else:
            playing.step, playing.reward = step, 0.0
        return floor_choices(action, self._choices)

    def end_episode(
        self,
        observation: Any,
        *,
        truncated: bool = False,
        episode: Hashable = None,
        mask: Any = None,
        success: bool | None = None,
    ) -> None:
        playing = self._find(episode)
        self._check()
        if playing.is_recorded:
            info = {} if mask is None else {INFO_KEY: mask}
            allowed = find_mask(info, find_choices(self.client.spec), not truncated, truncated)
            flat = self._flatten(observation, episode)
            self._record(playing, flat, episode, allowed, not truncated, truncated, success)
        self._policy.reset(episode)
        del self._episodes[episode]

    def close(self, drain_timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + drain_timeout_s
        for playing in self._episodes.values():  # of what was shown nothing is lost
            if playing.behaviour and playing.is_recorded and (shown := playing.builder.take_segment()) is not None:
                shown = replace(shown, behaviour=playing.behaviour, assisted=True)
                self._waiting.append((self._current_run, shown))
        self._episodes.clear()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or not self._thread.is_alive(), drain_timeout_s)
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))  # it may be sending the last one
        self.client.close(max(0.0, deadline - time.monotonic()))
        self._thread.join()

    # -- of the game's thread -----------------------------------------------------------------------------------

    def _make_policy(self, weights: tuple[int, dict[str, np.ndarray]]) -> Policy:
        spec = self.client.spec
        policy = make_policy(spec.policy, self._seed, self.client.actor_id, spec.action.shape)
        policy.load(*weights)
        return policy

    def _check(self) -> None:
        """Raise the thread's error, and apply newer weights. Until those of another run have arrived, the game goes on
        with the policy that it has."""
        if self._error is not None:
            raise self._error
        run = self._run
        is_same = run == self._current_run
        newer = self.client.received_weights(self._policy.version if is_same else 0)
        if not is_same:
            for playing in self._episodes.values():
                playing.is_recorded = False
        if newer is not None and is_same:
            self._policy.load(*newer)
        elif newer is not None:
            self._policy, self._current_run = self._make_policy(newer), run

    def _get_extras(self, episode: Hashable, allowed: np.ndarray | None) -> Mapping[str, Any]:
        extras = self._policy.get_extras(episode)
        return extras if allowed is None else {**extras, MASKS: allowed}

    def _record(
        self,
        playing: _Episode,
        observation: Any,
        episode: Hashable,
        allowed: np.ndarray | None,
        terminated: bool = False,
        truncated: bool = False,
        success: bool | None = None,
    ) -> None:
        action, log_probability, version, behaviour = playing.step
        extras = self._get_extras(episode, allowed)
        if behaviour != playing.behaviour and (before := playing.builder.take_segment()) is not None:
            self._put(playing, before)
        playing.behaviour, playing.is_assisted = behaviour, playing.is_assisted or bool(behaviour)
        segment = playing.builder.step(
            action, log_probability, version, playing.reward, observation, terminated, truncated, extras
        )
        if segment is not None:
            self._put(playing, segment if success is None else replace(segment, success=bool(success)))

    def _put(self, playing: _Episode, segment: Segment) -> None:
        """Let a segment wait to be sent."""
        if self.finished:
            return
        if playing.is_assisted:
            segment = replace(segment, behaviour=playing.behaviour, assisted=True)
        with self._changed:
            if len(self._waiting) >= self._max_waiting:  # of a demonstration nothing is discarded
                budget_s = None if segment.behaviour else self._budget_s
                self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting, budget_s)
            oldest = next((each for each in self._waiting if not each[1].behaviour), None)
            if len(self._waiting) >= self._max_waiting and oldest is not None:
                self._waiting.remove(oldest)  # the newest experience is the most useful
                self.discarded += 1
            self._waiting.append((self._current_run, segment))
            self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Send and receive until the end. An error is raised by the game's next call."""
        try:
            while not self._is_closing and not self.finished:
                self._exchange_once()
        except Closed:
            if not self._is_closing and not self.finished:
                raise
        except ShoalError as error:
            self._error = error
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _exchange_once(self) -> None:
        with self._changed:
            if not self._waiting:
                self._changed.wait(_POLL_S)
        try:
            self.client.newer_weights(2**63)  # receives all that has arrived
            if self._waiting and self.client.has_credit:
                with self._changed:
                    run, segment = self._waiting.popleft()
                    self._changed.notify_all()
                if run == self._run:
                    self.client.send(segment)
            elif self._waiting:
                time.sleep(_POLL_S / 4)
        except RunChanged:
            self._run += 1  # what waits belongs to the one before
