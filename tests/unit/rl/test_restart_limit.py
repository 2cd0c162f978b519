"""A worker may die as often as it likes while the run learns, and not at each of its starts."""

from typing import Any

import pytest

from shoal.errors import ClusterError
from shoal.rl.restart_limit import RestartLimit


def say(pid: int, learnt: int = 0) -> dict[str, Any]:
    return {"pid": pid, "segments": {"consumed": learnt}}


def test_restarts_count_until_the_next_segment_is_learnt() -> None:
    limit = RestartLimit(2, 60.0)
    for number in range(20):  # each learner of them has learnt something
        limit.check(0.0, gateway=say(1, learnt=number), learner=say(100 + number))
    limit.check(0.0, gateway=say(1, learnt=20), learner=say(119))
    limit.check(0.0, gateway=say(1, learnt=20), learner=say(500))
    limit.check(0.0, gateway=say(1, learnt=20), learner=None)
    limit.check(0.0, gateway=None, learner=say(501))
    with pytest.raises(ClusterError, match="the learner died 3 times, and nothing was learnt in between"):
        limit.check(0.0, gateway=say(1, learnt=20), learner=say(502))


def test_a_worker_that_stays_away_ends_the_run() -> None:
    limit = RestartLimit(2, 60.0)
    for now_s in (0.0, 59.0):
        limit.check(now_s, gateway=None, learner=say(1))
    limit.check(60.0, gateway=say(2), learner=say(1))
    limit.check(61.0, gateway=None, learner=say(1))
    with pytest.raises(ClusterError, match="the gateway has not come back for 60 s"):
        limit.check(121.0, gateway=None, learner=say(1))
