"""Users of an endpoint teach its policy: what a call gives, what is recorded, and what expires."""

import time
from contextlib import AbstractContextManager
from typing import Any

import pytest

from rl_setting import Parts, segment, serving
from shoal.errors import ConfigError
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.gateway.user_episodes import EpisodeRejection
from waiting import wait_for


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
        here = parts.gateway._users.key[1]  # type: ignore[union-attr]
        handle = ask(parts, observation=observe(1)).episode
        for status, fields in (
            (422, {}),
            (422, {"observation": [[1.0], [1.0, 2.0]]}),
            (422, {"observation": ["a", "b", "c", "d"]}),
            (422, {"observation": [1e300] * 4}),
            (404, {"episode": "nonsense"}),
            (404, {"episode": f"{here}-7-ff"}),
            (404, {"episode": f"12-{'9' * 5000}-ff"}),  # more digits than int takes
            (410, {"episode": "12-0-ff"}),  # of a gateway before this one
            (422, {"episode": handle, "reward": float("nan")}),
            (422, {"episode": handle, "reward": 5.0, "observation": observe(-11)}),
        ):
            assert refuse(parts, **fields) == status, fields
        ask(parts, episode=handle, reward=-7e11)
        assert refuse(parts, episode=handle, reward=-7e11) == 422  # of their sum the learner makes squares
        ask(parts, episode=handle, reward=7e11)
        ask(parts, episode=handle, reward=1.0, ended=True)
        assert parts.take().rewards.tolist() == [1.0]


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
    parts = Parts(setting={"is_synchronous": True, "learns_from_users": True})
    with pytest.raises(ConfigError, match="does not pause"):
        parts.gateway.start()
    assert parts.gateway.port == 0  # it listens nowhere
