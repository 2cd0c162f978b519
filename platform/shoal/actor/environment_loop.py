"""The bundled loop: step an environment with the pulled weights and send its experience, segment by segment.

Called by `python -m shoal.actor` and for any environment of `agent_streams`. A game with a loop of its own uses
ActorClient and SegmentBuilder directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

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
from shoal.actor.parallel_game import Opponent, OpponentDraw, ParallelGame
from shoal.actor.policy import Policy, make_policy
from shoal.errors import Closed, RunChanged
from shoal.wire import ExperienceSpec, Segment
from shoal.wire.action_masks import find_choices

NO_CREDIT_PAUSE_S = 0.002  # where actors pause while the learner updates


def play(
    environments: Environment | ParallelEnvironment | Sequence[Environment | ParallelEnvironment],
    client: ActorClient,
    seed: int | None = None,
    max_steps: int | None = None,
    on_weights: Callable[[int], None] | None = None,
    pull_interval_s: float = 0.01,
    on_run: Callable[[ExperienceSpec], None] | None = None,
) -> int:
    """Play until the run is over, or for `max_steps`; returns the number of steps.

    Of several environments, each takes a step in turn; one evaluation of the policy gives all of their actions. Their
    steps are counted together, and each begins with a seed of its own. Of several agents in an environment, each has
    the same policy and experience of its own, and a step of each is counted.

    The loop pulls newer weights at most every `pull_interval_s`, and applies them between two steps. It calls
    `on_weights` with each applied version. It waits for a busy learner while the gateway answers. When another run
    takes the address, the actor starts anew. It calls `on_run`, which may raise, with each run's spec before the first
    step. Raises Refused or ConnectionLost as the client does.
    """
    steps, pull_at = 0, 0.0
    environments = environments if isinstance(environments, Sequence) else [environments]
    while not client.finished and (max_steps is None or steps < max_steps):
        if on_run is not None:
            on_run(client.spec)
        runner = _PolicyRunner(environments, client, seed, on_weights)
        try:
            runner.start()
            while not client.finished and (max_steps is None or steps < max_steps):
                if time.monotonic() >= pull_at:
                    runner.pull_weights()
                    pull_at = time.monotonic() + pull_interval_s
                steps += runner.step()
        except RunChanged:
            continue
        except Closed:
            if not client.finished:
                raise
    return steps


class _PolicyRunner:
    """The policy and the environments' state of one run, replaced when another run takes over."""

    def __init__(
        self,
        environments: Sequence[Any],
        client: ActorClient,
        seed: int | None,
        on_weights: Callable[[int], None] | None,
    ) -> None:
        self._client, self._seed, self._on_weights = client, seed, on_weights
        self._policy, self._is_synchronous = self._make_policy(seed), client.is_synchronous
        self.mask_choices: Sequence[int] = find_choices(client.spec)
        self._num_streams = 0
        self._opponents: OpponentDraw | None = None
        if client.spec.self_play:
            self._opponents = OpponentDraw(lambda: client.opponents, self._make_policy, seed)
        self._environments = environments
        self._stream_games = list[SingleGame | ParallelGame]()
        if is_parallel(environments[0]):
            self._stream_games = [ParallelGame(each, self) for each in environments]
        elif len(environments) == 1 or self._is_synchronous:  # there may be no credit for all
            self._stream_games = [SingleGame(each, self) for each in environments]
        self._games: Sequence[Game] = self._stream_games or [BatchGame(environments, self, client.spec)]

    def _make_policy(self, seed: int | None) -> Policy:
        spec = self._client.spec
        return make_policy(spec.policy, seed, self._client.actor_id, spec.action.shape)

    def draw_opponent(self) -> Opponent | None:
        """With self-play, the policy of the other agents in an episode."""
        return None if self._opponents is None else self._opponents.draw()

    def make_stream(self) -> AgentStream:
        """A further stream of experience, for an agent."""
        self._num_streams += 1
        return AgentStream(self._num_streams - 1, self._client.spec, self._policy)

    def send(self, stream: AgentStream, segment: Segment) -> None:
        """Send a segment of a stream; waits for credit."""
        stream.num_segments += 1
        if stream.opponent:
            segment = replace(segment, opponent=stream.opponent)
        self._client.send(segment, timeout_s=None)

    def start(self) -> None:
        self._policy.load(*self._client.wait_for_weights())
        if self._opponents is not None:
            self._client.wait_for_opponents()
        seeds = spread_seeds(self._seed, len(self._environments))
        for index, game in enumerate(self._games):
            game.reset(seeds[index : index + 1] if self._stream_games else seeds)

    def pull_weights(self) -> None:
        newer = self._client.newer_weights(self._policy.version)
        if newer is not None:
            self._policy.load(*newer)
            if self._is_synchronous:
                for game in self._stream_games:
                    game.discard_steps()  # of older weights: the batch that they were for is complete
            if self._on_weights is not None:
                self._on_weights(self._policy.version)

    def step(self) -> int:
        """Take a step in every environment; returns the number of agents' steps."""
        games = self._select_games() if self._is_synchronous else self._games
        if not games:  # begun segments wait for credit, or for the newer weights that discard them
            time.sleep(NO_CREDIT_PAUSE_S)
            self.pull_weights()
            return 0
        if len(games) == 1:
            (game,) = games
            actions, log_probabilities = self._policy.act_batch(game.observations, game.numbers, game.masks)
            game.step(actions, log_probabilities, self._policy.version)
            return len(actions)
        return self._step_games(games)

    def _step_games(self, games: Sequence[Game]) -> int:
        numbers = [game.numbers for game in games]
        masks = [game.masks for game in games]
        actions, log_probabilities = self._policy.act_batch(
            [observation for game in games for observation in game.observations],
            list(chain.from_iterable(numbers)),
            [mask for each in masks if each is not None for mask in each] or None,
        )
        version, begin = self._policy.version, 0
        for game, each in zip(games, numbers, strict=True):
            end = begin + len(each)
            game.step(actions[begin:end], log_probabilities[begin:end], version)
            begin = end
        return len(actions)

    def _select_games(self) -> Sequence[Game]:
        """Of a synchronous run: as far as there is credit for all segments that they have begun or would begin; those
        that have begun come first, then the least played. Waits for credit where there is none at all."""
        if all(game.is_empty for game in self._stream_games):
            self._client.wait_for_credit()
            self.pull_weights()
        selected, num_left = list[Game](), self._client.num_credits
        for game in sorted(self._stream_games, key=lambda game: (game.is_empty, game.num_segments)):
            # One may have more agents than there is credit.
            if game.num_open <= num_left or (num_left and not selected):
                selected.append(game)
                num_left = max(0, num_left - game.num_open)
        return selected


def spread_seeds(seed: int | None, count: int) -> list[int | None]:
    """A seed for each of several environments of an actor; the first has the actor's own."""
    if seed is None:
        return [None] * count
    return [seed, *np.random.SeedSequence(seed).generate_state(count - 1).tolist()]
