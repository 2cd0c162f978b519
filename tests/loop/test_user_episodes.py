"""Users of an endpoint teach its policy: what a call gives, what is recorded, and what expires."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import pytest

from rl_setting import Parts, segment, serving, weights
from shoal.errors import ConfigError
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.experience.queue import BatchRequest
from shoal.rl.gateway.sessions import USERS_ACTOR_ID
from shoal.rl.gateway.user_episodes import EpisodeRejection
from waiting import wait_for

TAKE_ALL = BatchRequest(1, 10_000, 1_000, 10.0)


def learning(**spec: object) -> AbstractContextManager[Parts]:
    return serving(setting={"learns_from_users": True}, **spec)


def ask(parts: Parts, **fields: Any) -> EpisodeAnswer:
    answer = parts.gateway.answer_user(EpisodeRequest("m", **fields), 20.0)
    assert isinstance(answer, EpisodeAnswer), answer
    return answer


def refuse(parts: Parts, **fields: Any) -> int:
    answer = parts.gateway.answer_user(EpisodeRequest("m", **fields), 20.0)
    assert isinstance(answer, EpisodeRejection), answer
    return answer.status


def observe(value: float) -> list[float]:
    return [value, 0.0, 0.0, 0.0]


def test_an_episode_of_several_calls_enters_the_same_books_as_an_actors() -> None:
    with learning() as parts:
        first = ask(parts, observation=observe(1))
        assert first.action in (0, 1)
        ask(parts, episode=first.episode, reward=0.5)
        ask(parts, episode=first.episode, reward=0.25)
        parts.store.publish(weights(2))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 2)
        second = ask(parts, episode=first.episode, observation=observe(2))
        assert (first.version, second.version) == (1, 2)
        end = ask(parts, episode=first.episode, reward=2.0, ended=True)
        assert end.action is None
        batch = parts.take()
        assert batch.observations[:, 0].tolist() == [1, 2, 2]
        assert batch.actions.tolist() == [first.action, second.action]
        assert batch.rewards.tolist() == [0.75, 2.0]
        assert batch.versions.tolist() == [1, 2]
        assert batch.terminated.tolist() == [True]
        assert (batch.log_probabilities < 0).all()
        stats = parts.gateway.stats()
        assert stats["user_episodes"] == {"begun": 1, "ended": 1, "expired": 0, "open": 0}
        assert [actor["actor_id"] for actor in stats["actors"]] == [USERS_ACTOR_ID]
        assert list(parts.gateway._progress.returns) == [2.75]
        assert refuse(parts, episode=first.episode, reward=1.0) == 410


def test_a_handle_that_is_never_rewarded_expires_and_a_rewarded_one_is_cut_off() -> None:
    with learning(heartbeat_s=0.05, episode_timeout_s=0.3) as parts:
        silent = ask(parts, observation=observe(1))
        rewarded = ask(parts, observation=observe(2))
        ask(parts, episode=rewarded.episode, reward=1.0)
        wait_for(lambda: parts.ledger.get_totals().received == 2)
        assert parts.ledger.get_totals().dropped == {"expired": 1}
        batch = parts.take()
        assert (batch.rewards.tolist(), batch.terminated.tolist()) == ([1.0], [False])
        assert list(parts.gateway._progress.returns) == [1.0]
        assert refuse(parts, episode=silent.episode, reward=1.0) == 410
        assert refuse(parts, episode=rewarded.episode, observation=observe(0)) == 410
        assert parts.gateway.stats()["user_episodes"] == {"begun": 2, "ended": 0, "expired": 2, "open": 0}


def test_an_episode_whose_time_is_up_while_others_are_cut_off_expires_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with learning(heartbeat_s=0.05, episode_timeout_s=0.3) as parts:
        users = parts.gateway._users
        assert users is not None
        expire = users.expire

        def expire_slowly(before_s: float) -> None:
            expire(before_s)
            time.sleep(0.35)  # thousands of rewarded episodes end

        monkeypatch.setattr(users, "expire", expire_slowly)
        handle = ask(parts, observation=observe(1)).episode
        wait_for(lambda: parts.ledger.get_totals().dropped == {"expired": 1})
        assert refuse(parts, episode=handle, reward=1.0) == 410
        assert parts.gateway.stats()["user_episodes"] == {"begun": 1, "ended": 0, "expired": 1, "open": 0}


def test_wrong_requests_are_refused_by_name_and_change_nothing() -> None:
    with learning() as parts:
        assert refuse(parts) == 422
        assert refuse(parts, observation=observe(1), reward=1.0) == 422
        assert refuse(parts, observation=[1.0]) == 422
        assert refuse(parts, observation=[[1.0], [1.0, 2.0]]) == 422
        assert refuse(parts, observation=["a", "b", "c", "d"]) == 422
        assert refuse(parts, observation=observe(11)) == 422
        assert refuse(parts, episode="nonsense", reward=1.0) == 404
        assert refuse(parts, episode=f"{parts.gateway._users.key[1]}-7-ff", reward=1.0) == 404  # type: ignore[union-attr]
        assert refuse(parts, episode="12-0-ff", reward=1.0) == 410  # of a gateway before this one
        assert refuse(parts, episode=f"12-{'9' * 5000}-ff", reward=1.0) == 404  # more digits than int takes
        handle = ask(parts, observation=observe(1)).episode
        assert refuse(parts, episode=handle, reward=float("nan")) == 422
        assert refuse(parts, episode=handle, reward=1e39) == 422
        assert refuse(parts, observation=[1e300] * 4) == 422
        ask(parts, episode=handle, reward=-7e11)
        assert refuse(parts, episode=handle, reward=-7e11) == 422  # of their sum the learner makes squares
        ask(parts, episode=handle, reward=7e11)
        assert refuse(parts, episode=handle, reward=5.0, observation=observe(-11)) == 422
        ask(parts, episode=handle, reward=1.0, ended=True)
        batch = parts.take()
        assert batch.rewards.tolist() == [1.0]


def test_an_answer_waits_for_the_learner_and_a_second_request_meanwhile_is_refused() -> None:
    with learning(queue_capacity=2) as parts:
        handle = ask(parts, observation=observe(1)).episode
        for seq in (100, 101):
            parts.queue.put(("other", 1), seq, segment())
        with pytest.raises(TimeoutError):
            parts.gateway.answer_user(EpisodeRequest("m", handle, ended=True), 0.2)
        assert refuse(parts, episode=handle, reward=1.0) == 409
        parts.take()
        wait_for(lambda: parts.ledger.get_account(parts.gateway._users.key).received == 1)  # type: ignore[union-attr]


def test_a_run_learns_from_users_only_where_it_says_so() -> None:
    assert refuse(Parts(), observation=observe(1)) == 404
    with pytest.raises(ConfigError, match="does not pause"):
        Parts(setting={"is_synchronous": True, "learns_from_users": True}).gateway.start()
