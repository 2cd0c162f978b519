"""An actor whose policy runs at the gateway: it sends observations and receives actions.

It needs no weights, and computes nothing. Called by `python -m shoal.actor --inference remote`, and by games through
`shoal.connect(address, inference="remote")`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.actor.agent_streams import AgentsEpisode, Environment, ParallelEnvironment, find_mask
from shoal.actor.client import ActorClient
from shoal.actor.environment import apply_settings
from shoal.actor.environment_loop import follow_runs
from shoal.actor.game import EpisodeActor, OpenEpisode
from shoal.actor.other_games import adapt_aec
from shoal.actor.parallel_game import assign_agents, require_one_run
from shoal.actor.segment_builder import SegmentBuilder
from shoal.errors import Closed, ConfigError, ConnectionLost, InvalidSegment, ProtocolViolation, Refused, RunChanged
from shoal.wire import ExperienceSpec, encode
from shoal.wire.action_masks import INFO_KEY, find_choices
from shoal.wire.given_spaces import center_choices, floor_choices
from shoal.wire.messages import ActionMessage, ActMessage, Welcome

_POLL_MS = 50  # how long another thread may wait for the socket
_LOST = frozenset({"unknown_episode", "ended_episode", "failed"})  # the gateway has restarted, or the game has rested


class RemoteClient(ActorClient):
    """An `ActorClient` of a session of observations and actions. It repeats what is unanswered after a reconnect.

    All calls come from one thread.
    """

    inference = "remote"

    def __init__(self, address: str, token: str, actor_id: str = "", **options: Any) -> None:
        """As an `ActorClient`'s."""
        super().__init__(address, token, actor_id, **options)
        self._unanswered: dict[tuple[int, int], list[bytes]] = {}  # by episode and step, in order
        self._answers: dict[tuple[int, int], ActionMessage] = {}

    def ask(self, message: ActMessage, observation: bytes, mask: bytes | None = None) -> None:
        """Send one observation, whose answer `wait_for_action` takes. Several may be on their way, of one episode
        each. mask: bool [K], in a run with action masks"""
        with self._lock:
            frames = [encode(message), observation, *([] if mask is None else [mask])]
            self._unanswered[message.episode, message.step] = frames
            self._send_frames(frames)

    def wait_for_action(self, episode: int, step: int, timeout_s: float | None = None) -> ActionMessage:
        """The answer to an observation; by default waits as long as the gateway answers.

        Raises Closed when the run ends, ConnectionLost, RunChanged: what was unanswered is dropped then.
        """
        answers, key = self._answers, (episode, step)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while key not in answers:
            with self._lock:  # also while it polls, which is cheaper: no other thread waits for a message
                if self._socket is not None and not self._is_session_lost:
                    self._socket.poll(_POLL_MS)
                self._pump(deadline)
            if self.finished and key not in answers:
                raise Closed("the run is over")
            if time.monotonic() >= deadline and key not in answers:
                raise ConnectionLost(f"no action from {self._addresses.current} within {timeout_s} s")
        return answers.pop(key)

    def _begin_exchange(self, welcome: Welcome, changed: bool) -> None:
        if welcome.inference != self.inference:
            raise Refused("no_remote_inference", f"the gateway at {self._addresses.current} infers in the actor alone")
        if changed:
            self._unanswered.clear()
            self._answers.clear()
        for frames in self._unanswered.values():
            self._send_frames(frames)

    def _on_action(self, action: ActionMessage) -> None:
        key = (action.episode, action.step)
        if self._unanswered.pop(key, None) is not None:  # else it is the answer to one that was sent twice
            self._answers[key] = action


class _ObservationEncoder(SegmentBuilder):
    """Checks and encodes single observations, and their action masks."""

    def __init__(self, spec: ExperienceSpec) -> None:
        super().__init__(spec)
        self._choices = find_choices(spec)

    def encode_mask(self, mask: Any, terminated: bool, truncated: bool) -> bytes | None:
        """None in a run without masks. Raises InvalidSegment, and ConfigError for a missing one."""
        allowed = find_mask({} if mask is None else {INFO_KEY: mask}, self._choices, terminated, truncated)
        return None if allowed is None else allowed.tobytes()

    def encode(self, observation: Any) -> bytes:
        """Raises InvalidSegment for one of another shape, or for other integers, than the run's. observation: flat"""
        self._observations.store(0, observation)
        return self._observations.rows[0]


@dataclass
class _Episode(OpenEpisode):
    """An episode as the game sees it. Its number changes when the gateway has lost it.

    total: of the steps before the newest action
    taken: what the game did in place of the newest answer
    is_assisted: others than the policy have acted
    """

    number: int
    step: int = 0
    total: float = 0.0
    taken: Any = None
    is_assisted: bool = False

    def advance(self) -> _Episode:
        """Move on to the next observation."""
        return replace(self, step=self.step + 1)


class _Question(NamedTuple):
    """What is asked of a gateway, and the run that it was sent to."""

    episode: _Episode
    observation: Any
    mask: Any
    taken: Any
    run_id: str


class RemoteActor(EpisodeActor[RemoteClient, _Episode]):
    """An EpisodeActor with the policy at the gateway. `act` waits for the answer over the network, and while the
    learner is busy for that, too. client: connected"""

    version = 0

    def __init__(self, client: RemoteClient) -> None:
        super().__init__(client)
        self._encoder = _ObservationEncoder(client.spec)
        self._run_id = client.run_id
        self._asked: dict[Hashable, _Question] = {}
        self._next_number = 0

    def act(self, observation: Any, episode: Hashable = None, mask: Any = None, taken: Any = None) -> Any:
        """Act as an EpisodeActor. Raises InvalidSegment for an observation that does not fit the run, Closed when the
        run is over, and Refused or ConnectionLost as the client does."""
        self.ask(observation, episode, mask, taken)
        return self.wait_for_action(episode)

    def ask(self, observation: Any, episode: Hashable = None, mask: Any = None, taken: Any = None) -> None:
        """The first half of `act`: several episodes may ask before the first of them waits."""
        self._require_taken(taken)
        observation = self._flatten(observation, episode)
        taken = center_choices(taken, self._choices)
        playing = self._episodes.get(episode)
        asked = self._begin(0.0) if playing is None else playing.advance()
        self._asked[episode] = _Question(asked, observation, mask, taken, self._send(asked, observation, mask))

    def wait_for_action(self, episode: Hashable = None) -> Any:
        """The second half of `act`."""
        asked, observation, mask, taken, run_id = self._asked.pop(episode)
        answer = self._receive(asked, run_id)
        while answer is None or answer.reason in _LOST:
            asked = self._begin(asked.total + asked.reward, asked.is_assisted)
            answer = self._receive(asked, self._send(asked, observation, mask))
        _require_taken(answer, self._episodes.get(episode, asked))
        if answer.action is None:
            raise ProtocolViolation("malformed", "the gateway gave no action")
        is_assisted = asked.is_assisted or taken is not None
        self._episodes[episode] = _Episode(asked.number, asked.step, asked.total + asked.reward, taken, is_assisted)
        self.version = answer.version
        spec, action = self.client.spec.action, answer.action if taken is None else taken
        if taken is None and spec.shape:
            action = np.array(action, spec.numpy_dtype()).reshape(spec.shape)
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
        ending = playing.advance()
        observation = self._flatten(observation, episode)
        run_id = self._send(ending, observation, mask, not truncated, truncated, success)
        answer = self._receive(ending, run_id)
        if answer is not None and answer.reason not in _LOST:  # one that is lost is over, too
            _require_taken(answer, playing)
        del self._episodes[episode]

    def close(self, drain_timeout_s: float = 2.0) -> None:
        self.client.close(drain_timeout_s)

    def _begin(self, total: float, is_assisted: bool = False) -> _Episode:
        """An episode, whose first step carries the return until then."""
        self._next_number += 1
        return _Episode(self._next_number - 1, reward=total, taken=0 if is_assisted else None, is_assisted=is_assisted)

    def _send(
        self,
        playing: _Episode,
        observation: Any,
        mask: Any,
        terminated: bool = False,
        truncated: bool = False,
        success: bool | None = None,
    ) -> str:
        """Returns the run that the observation was sent to; "" when another one has taken the address."""
        if self._run_id != self.client.run_id:
            self._run_id, self._encoder = self.client.run_id, _ObservationEncoder(self.client.spec)
        said = msgspec.UNSET if success is None else bool(success)
        taken = msgspec.UNSET if playing.taken is None else _to_numbers(playing.taken)
        message = ActMessage(playing.number, playing.step, playing.reward, terminated, truncated, said, taken=taken)
        encoded = self._encoder.encode_mask(mask, terminated, truncated)
        try:
            self.client.ask(message, self._encoder.encode(observation), encoded)
        except RunChanged:
            return ""
        return self._run_id

    def _receive(self, playing: _Episode, run_id: str) -> ActionMessage | None:
        """The gateway's answer; None: another run has taken the address, and knows nothing of the question."""
        if run_id != self.client.run_id:
            return None
        try:
            return self.client.wait_for_action(playing.number, playing.step)
        except RunChanged:
            return None


def _to_numbers(action: Any) -> Any:
    """An action as a message has it: a number, or those of an array in C order."""
    numbers = np.asarray(action)
    return (numbers.astype(np.uint8) if numbers.dtype.kind == "b" else numbers).ravel().tolist()


def _require_taken(answer: ActionMessage, playing: _Episode) -> None:
    """Raise InvalidSegment, ConfigError or ProtocolViolation for a step that the gateway has not taken. A reward that
    it has not is forgotten."""
    if answer.reason == "invalid":
        field, _, problem = (answer.detail or "observation or reward: is outside of the spec").partition(": ")
        if field == "reward":
            playing.reward = 0.0
        raise InvalidSegment("invalid_range", field, f"{problem}, so the gateway has not taken it")
    if answer.reason == "too_many_episodes":
        raise ConfigError("episode", answer.episode, "is one too many for this actor", "end others first: end_episode")
    if answer.reason:
        raise ProtocolViolation("malformed", f"the gateway took no step: {answer.reason}")


def run_remote_actor(
    environment: Environment | ParallelEnvironment,
    clients: RemoteClient | Sequence[RemoteClient],
    seed: int | None = None,
    max_steps: int | None = None,
    on_run: Callable[[ExperienceSpec], None] | None = None,
) -> int:
    """`play` without a policy: until the run is over, or for `max_steps`; returns the number of agents' steps.

    It calls `on_run`, which may raise, with each run's spec before the first step. Raises Refused or ConnectionLost as
    the clients do, and ConfigError for an agent without a policy.
    """
    clients = clients if isinstance(clients, Sequence) else [clients]
    game = _RemoteGame(environment, [RemoteActor(client) for client in clients], seed)
    return follow_runs(clients, max_steps, on_run, lambda: game)


class _RemoteGame:
    """An environment in which each agent has an episode at the gateway of its policy. It is played on in a new run."""

    def __init__(self, environment: Any, actors: Sequence[RemoteActor], seed: int | None) -> None:
        self._environment, self._seed = adapt_aec(environment), seed
        self._actors, self._actor_of = actors, dict[Any, RemoteActor]()
        self._run_ids: list[str] = []
        self._settings_version = 0
        self._episode: AgentsEpisode | None = None
        self._open: set[Any] = set()  # the agents that have acted and not ended

    def start(self) -> None:
        """Find each agent's policy, in a new run. Raises ConfigError."""
        require_one_run([each.client for each in self._actors])
        self._run_ids = [each.client.run_id for each in self._actors]
        named = [(each, each.client.spec.agents) for each in self._actors]
        self._actor_of = assign_agents(self._environment, named)

    def step(self, limit: int) -> int:
        """Take one step, of a new episode where one is over; returns how many agents have acted."""
        if self._run_ids != [each.client.run_id for each in self._actors]:
            raise RunChanged("another run has taken the address")
        if self._episode is None or not self._episode.observations:
            client = self._actors[0].client
            if client.settings_version != self._settings_version:
                self._settings_version = client.settings_version
                apply_settings([self._environment], client.settings)
            self._episode, self._open = AgentsEpisode(self._environment, self._seed), set()
            self._seed = None
        episode = self._episode
        for agent, observation in episode.observations.items():
            self._actor_of[agent].ask(observation, agent, episode.get_mask(agent))
        actions = {agent: self._actor_of[agent].wait_for_action(agent) for agent in episode.observations}
        self._open |= actions.keys()
        episode.step(actions)
        for agent in self._open & episode.rewards.keys():
            self._actor_of[agent].reward(episode.rewards[agent], agent)
        for agent in [agent for agent in episode.outcomes if agent in self._open]:
            observation, is_cut_off = episode.get_outcome(agent)
            mask, success = episode.get_mask(agent), episode.find_success(agent)
            self._actor_of[agent].end_episode(
                observation, truncated=is_cut_off, episode=agent, mask=mask, success=success
            )
        self._open -= episode.outcomes.keys()
        return len(actions)
