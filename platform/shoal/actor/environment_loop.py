"""The bundled loop: step an environment with the pulled weights and send its experience, segment by segment.

Called by `python -m shoal.actor` and for any environment of `agent_streams`. A game with a loop of its own uses
ActorClient and SegmentBuilder directly.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from shoal.actor.agent_streams import (
    AgentStream,
    BatchGame,
    Environment,
    Game,
    ParallelEnvironment,
    SingleGame,
    is_parallel,
)
from shoal.actor.client import ActorClient
from shoal.actor.environment import apply_settings
from shoal.actor.other_games import adapt_aec
from shoal.actor.parallel_game import Opponent, OpponentDraw, ParallelGame, assign_agents, require_one_run
from shoal.actor.policy import Policy, make_policy
from shoal.errors import Closed, RunChanged
from shoal.wire import EpisodeSummary, ExperienceSpec, Segment
from shoal.wire.action_masks import find_choices
from shoal.wire.segment import MAX_UNRECORDED

NO_CREDIT_PAUSE_S = 0.002  # where actors pause while the learner updates


def play(
    environments: Environment | ParallelEnvironment | Sequence[Environment | ParallelEnvironment],
    client: ActorClient | Sequence[ActorClient],
    seed: int | None = None,
    max_steps: int | None = None,
    on_weights: Callable[[int], None] | None = None,
    pull_interval_s: float = 0.01,
    on_run: Callable[[ExperienceSpec], None] | None = None,
) -> int:
    """Play until the run is over, or for `max_steps`; returns the number of steps.

    Of several environments, each takes a step in turn; one evaluation of the policy gives all of their actions. Their
    steps are counted together, and each begins with a seed of its own. Of several agents in an environment, each has
    experience of its own, and a step of each is counted; all have the same policy, or, in a run of several policies,
    each has the one whose client's spec names it: `client` then has a connected client for each policy.

    The loop pulls newer weights at most every `pull_interval_s`, and applies them between two steps. It calls
    `on_weights` with each applied version. It waits for a busy learner while the gateway answers. When another run
    takes the address, the actor joins it. It calls `on_run`, which may raise, with each run's spec before the first
    step. Raises Refused or ConnectionLost as the client does, and ConfigError for an agent without a policy.
    """
    given = environments if isinstance(environments, Sequence) else [environments]
    games = [adapt_aec(each) for each in given]
    clients = client if isinstance(client, Sequence) else [client]
    return follow_runs(clients, max_steps, on_run, lambda: _Player(games, clients, seed, on_weights, pull_interval_s))


class RunPlayer(Protocol):
    """Plays one run, until it raises RunChanged, or Closed when the run is over."""

    def start(self) -> None: ...

    def step(self, limit: int) -> int:
        """Take a step in every environment, or, of one agent, as many as are cheap at once, at most `limit`; returns
        the number of agents' steps."""
        ...


def follow_runs(
    clients: Sequence[ActorClient],
    max_steps: int | None,
    on_run: Callable[[ExperienceSpec], None] | None,
    make_player: Callable[[], RunPlayer],
) -> int:
    """Play run after run, each with another player, until one is over, or for `max_steps`; returns the number of
    steps."""
    steps = 0
    first = clients[0]
    most = sys.maxsize if max_steps is None else max_steps
    while not any(each.finished for each in clients) and steps < most:
        try:
            if on_run is not None:
                for each in clients:
                    on_run(each.spec)
            player = make_player()
            player.start()
            while not first.finished and steps < most:
                steps += player.step(most - steps)
        except RunChanged:
            if len(clients) > 1:
                for each in clients:
                    each.connect()  # the others may still have the old run
        except Closed:
            if not any(each.finished for each in clients):
                raise
    return steps


class _ActingPolicy:
    """One policy of a run, with its connection: the `ParallelRunner` of the agents that have it.

    needs_credit: its agents' steps are recorded only where there is credit for their segments
    """

    def __init__(self, client: ActorClient, seed: int | None, needs_credit: bool) -> None:
        self.client = client
        self._seed = seed
        self.needs_credit = needs_credit
        self.policy = self._make_policy(seed)
        self.mask_choices: Sequence[int] = find_choices(client.spec)
        self._num_streams = 0
        # Episodes that ended without credit; the newest ones, all that the gateway's mean return is of.
        self._unrecorded = deque[EpisodeSummary](maxlen=MAX_UNRECORDED)
        self._opponents: OpponentDraw | None = None
        if client.spec.self_play:
            self._opponents = OpponentDraw(lambda: client.opponents, self._make_policy, seed)

    def _make_policy(self, seed: int | None) -> Policy:
        spec = self.client.spec
        return make_policy(spec.policy, seed, self.client.actor_id, spec.action.shape)

    def draw_opponent(self) -> Opponent | None:
        """Draw, with self-play, a past version for the other agents in an episode."""
        return None if self._opponents is None else self._opponents.draw()

    def make_stream(self) -> AgentStream:
        """A further stream of experience, for an agent."""
        self._num_streams += 1
        unrecorded = self._unrecorded if self.needs_credit else None
        return AgentStream(self._num_streams - 1, self.client.spec, self.policy, unrecorded)

    def send(self, stream: AgentStream, segment: Segment) -> None:
        """Send a segment of a stream, with the episodes that have ended without one; waits for credit."""
        stream.num_segments += 1
        if stream.opponent:
            segment = replace(segment, opponent=stream.opponent)
        if self._unrecorded:
            segment = replace(segment, unrecorded=tuple(self._unrecorded))
            self._unrecorded.clear()
        self.client.send(segment, timeout_s=None)

    def start(self) -> None:
        """Wait for the first weights, and with self-play for an opponent."""
        self.policy.load(*self.client.wait_for_weights())
        if self._opponents is not None:
            self.client.wait_for_opponents()


class _Player:
    """The policies and the environments' state of one run, replaced when another run takes over."""

    def __init__(
        self,
        environments: Sequence[Any],
        clients: Sequence[ActorClient],
        seed: int | None,
        on_weights: Callable[[int], None] | None,
        pull_interval_s: float,
    ) -> None:
        self._seed = seed
        self._on_weights = on_weights
        self._environments = environments
        self._pull_at, self._pull_interval_s = 0.0, pull_interval_s
        self._settings_version = 0
        # Of two policies with one seed, both would explore by the same random numbers.
        seeds = [seed if not number or seed is None else seed + (number << 32) for number in range(len(clients))]
        self._policies = [
            _ActingPolicy(client, own, needs_credit=len(clients) > 1 and client.is_synchronous)
            for client, own in zip(clients, seeds, strict=True)
        ]
        first = self._policies[0]
        self._client = first.client
        self._policy = first.policy
        self._is_synchronous = first.client.is_synchronous
        self._stream_games = list[SingleGame | ParallelGame]()
        require_one_run(clients)
        by_agent = assign_agents(environments[0], [(each, each.client.spec.agents) for each in self._policies])
        if is_parallel(environments[0]):
            self._stream_games = [ParallelGame(each, by_agent.__getitem__) for each in environments]
        elif len(environments) == 1 or self._is_synchronous:  # there may be no credit for all
            self._stream_games = [SingleGame(each, first) for each in environments]
        self._games: Sequence[Game] = self._stream_games or [BatchGame(environments, first, first.client.spec)]

    def start(self) -> None:
        for each in self._policies:
            each.start()
        self._apply_settings()
        seeds: list[int | None] = [None] * len(self._environments)
        if self._seed is not None:  # the first environment has the actor's own
            seeds = [self._seed, *np.random.SeedSequence(self._seed).generate_state(len(seeds) - 1).tolist()]
        for index, game in enumerate(self._games):
            game.reset(seeds[index : index + 1] if self._stream_games else seeds)

    def _pull_weights(self) -> None:
        self._apply_settings()
        for each in self._policies:
            newer = each.client.newer_weights(each.policy.version)
            if newer is not None:
                each.policy.load(*newer)
                if each.client.is_synchronous:
                    for game in self._stream_games:
                        game.discard_steps(each.policy)  # of older weights: the batch that they were for is complete
                if self._on_weights is not None:
                    self._on_weights(each.policy.version)

    def _apply_settings(self) -> None:
        if self._client.settings_version != self._settings_version:
            self._settings_version = self._client.settings_version
            apply_settings(self._environments, self._client.settings)

    def step(self, limit: int) -> int:
        if time.monotonic() >= self._pull_at:
            self._pull_weights()
            self._pull_at = time.monotonic() + self._pull_interval_s
            if len(self._policies) > 1 and any(each.client.finished for each in self._policies):
                raise Closed("the run of a policy is over")
        games: Sequence[Any] = self._games
        if len(self._policies) > 1:
            games = self._select_credited_games()
        elif self._is_synchronous:
            games = self._select_games()
        if not games:  # begun segments wait for credit, or for the newer weights that discard them
            time.sleep(NO_CREDIT_PAUSE_S)
            self._pull_weights()
            return 0
        if len(games) > 1 or len(self._policies) > 1:
            return self._step_games(games)
        (game,) = games
        if isinstance(game, SingleGame) and len(self._games) == 1:
            return game.play(self._policy, limit, self._pull_at)
        actions, log_probabilities = self._policy.act_batch(game.observations, game.numbers, game.masks)
        game.step(actions, log_probabilities)
        return len(actions)

    def _step_games(self, games: Sequence[SingleGame | ParallelGame]) -> int:
        """Take a step in each: a policy acts at once for all agents that have it."""
        streams = [stream for game in games for stream in game.acting]
        chosen: dict[int, tuple[Any, float]] = {}  # by the stream's position
        for policy in (each.policy for each in self._policies):
            positions = [index for index, stream in enumerate(streams) if stream.policy is policy]
            own = [streams[index] for index in positions]
            if own:
                masks = [stream.mask for stream in own] if own[0].mask is not None else None
                observations, numbers = [stream.observation for stream in own], [stream.number for stream in own]
                choices = zip(*policy.act_batch(observations, numbers, masks), strict=True)
                chosen.update(zip(positions, choices, strict=True))
        begin = 0
        for game in games:
            end = begin + len(game.acting)
            game.step(*zip(*(chosen[index] for index in range(begin, end)), strict=True))
            begin = end
        return len(streams)

    def _select_credited_games(self) -> Sequence[SingleGame | ParallelGame]:
        """Select games of several policies: share the credit of those that pause actors among their agents that act
        next, the least played first. A game goes on while it may record a step, or an agent could get credit.

        Its other agents act without a record: an actor that waited for the credit of each policy, while another has it
        and waits for that of this one, would never go on. The returns of episodes that end so are sent with the next
        segment.
        """
        games, has_credit_left = self._stream_games, False
        for each in (policy for policy in self._policies if policy.needs_credit):
            own = [stream for game in games for stream in game.streams if stream.policy is each.policy]
            num_left = each.client.num_credits - sum(stream.has_credit for stream in own)
            acting = [stream for game in games for stream in game.acting if stream.policy is each.policy]
            for stream in sorted(acting, key=lambda stream: stream.num_segments):
                if not stream.has_credit and num_left > 0:
                    stream.has_credit, num_left = True, num_left - 1
            has_credit_left |= num_left > 0
        return [game for game in games if has_credit_left or any(stream.has_credit for stream in game.streams)]

    def _select_games(self) -> Sequence[Game]:
        """Select games of a synchronous run, while there is credit for all segments that they have begun or begin;
        those that have begun come first, then the least played. Waits for credit where there is none at all."""
        if all(game.is_empty for game in self._stream_games):
            self._client.wait_for_credit()
            self._pull_weights()
        selected, num_left = list[Game](), self._client.num_credits
        for game in sorted(self._stream_games, key=lambda game: (game.is_empty, game.num_segments)):
            # One may have more agents than there is credit.
            if game.num_open <= num_left or (num_left and not selected):
                selected.append(game)
                num_left = max(0, num_left - game.num_open)
        return selected
