"""What a gateway remembers of its actors and of those that it refused."""

from __future__ import annotations

from shoal.rl.progress import MAX_GONE_ACTORS, REFUSALS_INTERVAL_S, Progress, Roster


def test_the_next_word_on_refusals_says_how_many_there_were() -> None:
    progress = Progress()
    for number in range(1, 8):
        progress.protocol_errors["bad_token"] = number
        progress.refused("guest")
    progress._refusals_told_at -= REFUSALS_INTERVAL_S
    progress.refused("guest")
    assert [details["count"] for _, _, details in progress.events] == [1, 7]


def test_of_the_actors_that_left_only_the_last_ones_are_remembered() -> None:
    roster = Roster()
    here, back = ("here", 1), ("back", 1)
    roster.join(here)
    roster.join(back).steps = 5
    roster.leave(back)
    assert roster.join(back).steps == 5
    for number in range(MAX_GONE_ACTORS + 50):
        roster.join((f"guest {number}", 1))
        roster.leave((f"guest {number}", 1))
    names = [actor.actor_id for actor in roster]
    assert names == ["here", "back", *(f"guest {number}" for number in range(50, MAX_GONE_ACTORS + 50))]
    assert [actor.actor_id for actor in roster.forget_older(("guest 60", 2))] == ["guest 60"]
    assert roster.forget_older(("guest 0", 2)) == []
