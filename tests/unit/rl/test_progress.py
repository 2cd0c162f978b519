"""What a gateway remembers of its actors and of those that it refused."""

import time
from dataclasses import replace

import pytest

from rl_setting import segment
from shoal.rl.gateway.actor_stats import (
    EPISODE_WINDOW,
    MAX_DISCONNECTED_ACTORS,
    REJECTIONS_INTERVAL_S,
    ActorProgress,
    ActorTable,
    RunProgress,
)


def test_the_next_word_on_refusals_says_how_many_there_were() -> None:
    progress = RunProgress()
    for number in range(1, 8):
        progress.protocol_errors["bad_token"] = number
        progress.record_rejected_actor("guest", "bad_token")
    progress.record_rejected_actor("robot", "stale_incarnation")  # a flood of guests hides no robot
    progress._rejected_at["bad_token"] -= REJECTIONS_INTERVAL_S
    progress.record_rejected_actor("guest", "bad_token")
    found = [(details["actor_id"], details["reason"], details["count"]) for _, _, details in progress.events]
    assert found == [("guest", "bad_token", 1), ("robot", "stale_incarnation", 0), ("guest", "bad_token", 7)]


def test_of_the_actors_that_left_only_the_last_ones_are_remembered() -> None:
    roster = ActorTable()
    here, back = ("here", 1), ("back", 1)
    roster.join(here)
    roster.join(back).steps = 5
    roster.leave(back)
    assert roster.join(back).steps == 5
    for number in range(MAX_DISCONNECTED_ACTORS + 50):
        roster.join((f"guest {number}", 1))
        roster.leave((f"guest {number}", 1))
    names = [actor.actor_id for actor in roster]
    assert names == ["here", "back", *(f"guest {number}" for number in range(50, MAX_DISCONNECTED_ACTORS + 50))]
    assert [actor.actor_id for actor in roster.remove_older(("guest 60", 2))] == ["guest 60"]
    assert roster.remove_older(("guest 0", 2)) == []


def test_a_clock_that_is_set_while_a_run_goes_on_changes_nothing_of_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, actor = RunProgress(target_return=1.0), ActorProgress("one", 1)
    episode = segment(2, terminated=True, episode_return=1.0, episode_length=2)
    progress.record_segment(actor, episode)
    now = time.time()
    monkeypatch.setattr("shoal.rl.gateway.actor_stats.time.time", lambda: now - 3600.0)
    for _ in range(EPISODE_WINDOW - 1):
        progress.record_segment(actor, episode)
    assert progress.solved_s is not None
    assert 0.0 <= progress.solved_s < 600.0
    again = RunProgress()
    again.restore(progress.dump_state())
    assert 0.0 <= again.elapsed_s < 600.0


def test_episodes_have_a_spread_and_a_success_rate_also_after_a_restart() -> None:
    progress, actor = RunProgress(), ActorProgress("one", 1)
    assert progress.to_dict()["episode_spread"] == {}
    episodes = [(1.0, 2, True), (3.0, 4, False), (5.0, 6, None)]
    for value, length, success in episodes:
        ended = segment(2, terminated=True, episode_return=value, episode_length=length)
        progress.record_segment(actor, replace(ended, success=success))
    spread = progress.to_dict()["episode_spread"]
    assert spread == pytest.approx(
        {
            **{"return_std": (8 / 3) ** 0.5, "return_min": 1.0, "return_max": 5.0},
            **{"length": 4.0, "length_std": (8 / 3) ** 0.5, "success_rate": 0.5},
        }
    )
    again = RunProgress()
    again.restore(progress.dump_state())
    assert again.to_dict()["episode_spread"] == spread
