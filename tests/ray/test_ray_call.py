"""Which of Ray's errors is answered with None, asked again or raised. No cluster here."""

from __future__ import annotations

import pytest


class Method:
    """Of an actor's handle: each call of it ends as the next of `outcomes` says; the last one stays."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes, self.limits_s = list(outcomes), list[float]()

    def remote(self) -> Method:
        return self

    def get(self, timeout: float) -> object:
        self.limits_s.append(timeout)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def get_from_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from shoal import ray_call

    monkeypatch.setattr(ray, "get", Method.get)
    monkeypatch.setattr(ray_call, "RETRY_S", 0.001)


def test_an_actor_out_of_reach_has_no_answer_and_a_dead_one_is_an_error() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

    from shoal.ray_call import AWAY, call_or_none

    assert call_or_none(Method(5)) == 5
    assert call_or_none(Method(GetTimeoutError("late"))) is None
    assert call_or_none(Method(ActorUnavailableError("unheard", None))) is None
    with pytest.raises(ActorDiedError):
        call_or_none(Method(ActorDiedError()))
    assert call_or_none(Method(ActorDiedError()), away=AWAY) is None


def test_an_actor_that_is_away_is_asked_again_while_patience_lasts() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from shoal.ray_call import call_until_answered

    away = ActorUnavailableError("restarting", None)
    method = Method(away, away, 5)
    assert call_until_answered(method, patience_s=60.0) == 5
    assert method.limits_s == [10.0] * 3
    with pytest.raises(ActorDiedError):
        call_until_answered(Method(away, ActorDiedError()), patience_s=0.05)


def test_what_the_actor_itself_raised_is_not_asked_again() -> None:
    from ray.exceptions import RayTaskError

    from shoal.ray_call import call_until_answered

    method = Method(RayTaskError("method", "the traceback", ValueError("no"), "", 1, ""))
    with pytest.raises(RayTaskError):
        call_until_answered(method, patience_s=60.0)
    assert len(method.limits_s) == 1


def test_one_call_may_take_all_the_patience_that_is_left() -> None:
    from ray.exceptions import GetTimeoutError

    from shoal.ray_call import call_until_answered

    method = Method(GetTimeoutError("late"), 5)
    assert call_until_answered(method, patience_s=60.0, timeout_s=None) == 5
    first, second = method.limits_s
    assert 50.0 < second < first <= 60.0
