"""An actor for a game that owns its loop: what it records, and that the game never waits for the network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import shoal
from rl_setting import TOKEN, Parts, serving, weights
from shoal.actor import GameActor
from shoal.errors import ConfigError, InvalidSegment, Refused
from waiting import start_thread, wait_for


@contextmanager
def connected(parts: Parts, **options: Any) -> Iterator[GameActor]:
    with shoal.connect(parts.address, token=TOKEN, actor_id="game", **options) as actor:
        yield actor


def observe(value: float) -> list[float]:
    return [value, 0.0, 0.0, 0.0]


def test_a_game_goes_on_while_the_learner_is_busy_and_the_newest_experience_is_kept() -> None:
    with serving(queue_capacity=2) as parts, connected(parts, budget_s=0.0) as actor:
        for number in range(40):
            actor.act(observe(number / 10))
            actor.end_episode(observe(0))
        wait_for(lambda: parts.ledger.get_totals().received == 2)
        assert actor.discarded >= 40 - 2 - 16
        seen: list[float] = []
        while 3.9 not in seen:  # of the last episode
            batch = parts.take(1, 1, 1)
            seen.append(round(float(batch.observations[0, 0]), 1))
            parts.queue.acknowledge(batch.lease_id, [None])
        assert parts.ledger.get_totals().dropped.total() == 0


def test_a_game_goes_on_with_older_weights_while_its_connection_is_being_mended() -> None:
    with serving() as parts, connected(parts) as actor:
        actions: list[int] = []
        with actor.client._lock:  # as a reconnect holds it
            game = start_thread(lambda: actions.extend(actor.act(observe(0)) for _ in range(200)))
            game.join(60)
            assert len(actions) == 200
        parts.store.publish(weights(2))
        wait_for(lambda: actor.act(observe(0)) in (0, 1) and actor.version == 2)


def test_errors_reach_the_game_with_its_next_call() -> None:
    with serving() as parts, connected(parts, incarnation=1) as actor:
        with pytest.raises(ConfigError, match="has no action yet"):
            actor.reward(1.0)
        with pytest.raises(InvalidSegment):
            actor.act([0.0])
        with shoal.connect(parts.address, token=TOKEN, actor_id="game", incarnation=2):
            wait_for(lambda: actor._error)
            with pytest.raises(Refused, match="superseded"):
                actor.act(observe(0))


def test_an_episode_in_which_the_run_changes_is_not_recorded_and_the_next_one_is() -> None:
    with serving() as parts, connected(parts) as actor:
        actor.act(observe(0))
        parts.gateway.close()
        with serving(port=parts.gateway.port, run_id="run-2") as other:
            wait_for(lambda: actor.act(observe(1)) in (0, 1) and actor._current_run == 1)
            actor.end_episode(observe(2))
            actor.act(observe(3))
            actor.end_episode(observe(4))
            wait_for(lambda: other.ledger.get_totals().received == 1)
            batch = other.take(1, 1, 1)
            assert batch.observations[:, 0].tolist() == [3, 4]
