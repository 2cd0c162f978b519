"""The schedule and deadlines, against a simulated clock: who is refused, who goes first, who is given up."""

from collections import Counter

from hypothesis import given

from shoal.batching.fair_queue import DEFAULT_DEADLINE_S
from unit.batching.schedule_world import MAX_BATCH, Job, World, events, play


@given(script=events)
def test_what_is_answered_is_answered_in_time_when_the_model_is_right(script: list[tuple[object, ...]]) -> None:
    """But for a lone request that an idle slot tries though it should be hopeless."""
    world = World(exact=True)
    play(world, script)
    for job in world.jobs:
        if job.end == "answered" and job.deadline_s is not None and not job.trial:
            assert job.ended_s <= job.deadline_s + 1e-9


def test_the_earliest_deadline_goes_first_and_a_late_one_or_none_stands_at_its_patience() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    deadlines = (3 * DEFAULT_DEADLINE_S, DEFAULT_DEADLINE_S / 2, None)
    late, soon, never = [world.submit(rows=MAX_BATCH, within_s=seconds) for seconds in deadlines]
    world.advance()
    assert [batch.requests for batch in world.started[1:]] == [[soon], [late], [never]]


def test_a_request_with_much_time_is_not_starved_by_those_without_a_deadline() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    patient = world.submit(rows=MAX_BATCH, within_s=30 * DEFAULT_DEADLINE_S)
    while not patient.end:
        assert world.now_s < DEFAULT_DEADLINE_S + 4 * world.seconds(MAX_BATCH), "it starves"
        for _ in range(3):
            world.submit(rows=2)
        world.advance(world.seconds(MAX_BATCH) / 2)
    assert patient.end == "answered"


def test_a_request_without_a_deadline_is_not_starved_by_those_with_one() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    patient = world.submit(rows=MAX_BATCH)
    while not patient.end:
        assert world.now_s < DEFAULT_DEADLINE_S + 4 * world.seconds(MAX_BATCH), "it starves"
        for _ in range(3):
            world.submit(rows=2, within_s=4.5 * world.seconds(MAX_BATCH))
        world.advance(world.seconds(MAX_BATCH) / 2)
    assert patient.end == "answered"
    assert world.ends()["answered"] > 20


def test_a_request_that_cannot_make_its_deadline_is_refused_at_the_door_and_one_that_can_is_not() -> None:
    world = World(exact=True)
    full_s = world.seconds(MAX_BATCH)
    world.submit(rows=MAX_BATCH)
    world.submit(rows=MAX_BATCH, within_s=2 * full_s)
    assert world.submit(within_s=2 * full_s + world.seconds(1) * 0.99).end == "late"
    assert world.submit(within_s=3 * full_s).end == ""
    assert world.submit(within_s=-1.0).end == "late"


def test_a_free_slot_tries_what_the_model_thinks_hopeless_and_so_learns_that_it_is_wrong() -> None:
    world = World()
    world.queues["a"].latency.observe(1, 60.0, 0.0)  # somebody's first batch took a minute
    for _ in range(3):
        assert world.submit(within_s=0.1).end == ""
        world.advance()
    assert world.ends() == {"answered": 3}
    assert world.queues["a"].latency.seconds(1) < 0.1


def test_while_a_forward_hangs_a_short_deadline_is_refused_at_once() -> None:
    world = World(exact=True)
    world.submit()
    world.now_s += 5.0  # and it has not ended
    assert world.submit(within_s=3.0).end == "late"
    assert world.submit(within_s=6.0).end == ""


def test_admission_counts_other_queues_only_for_their_share() -> None:
    world = World(exact=True, weights={"a": 1.0, "b": 1.0})
    for _ in range(4):
        world.submit("b", rows=MAX_BATCH)
    # One forward in hand, and one of the other queue's may go first; not the three that wait.
    assert world.submit("a", within_s=2 * world.seconds(MAX_BATCH) + 2 * world.seconds(1)).end == ""
    world.advance()
    assert world.ends()["answered"] == 5


def test_a_batch_is_cut_for_its_earliest_deadline_when_the_rest_can_wait() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    world.submit(rows=MAX_BATCH)
    soon = world.submit(rows=1, within_s=0.065)
    others = [world.submit(rows=1, within_s=0.5) for _ in range(3)]
    world.advance()
    assert [len(batch.requests) for batch in world.started] == [1, 2, 2]
    assert world.ends([soon, *others]) == {"answered": 4}
    assert soon.ended_s <= soon.deadline_s  # type: ignore[operator]


def test_one_tight_deadline_is_given_up_when_saving_it_would_cost_the_others() -> None:
    world = World(exact=True, seconds_of=(0.04, 0.001))
    soon = Job("a", 1, 0.0, 0.0415, 0, "")
    others = [Job("a", 1, 0.0, 0.05, 0, "") for _ in range(3)]
    for job in (soon, *others):
        world.queues["a"].fair_queue.add(job)
    batch, late = world.schedule.take(0.0)
    assert late == [soon]
    assert batch is not None
    assert batch.requests == others


def test_who_stands_first_is_not_overtaken_by_a_tight_deadline_that_fits_no_batch_with_it() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    patient = Job("a", MAX_BATCH - 1, -DEFAULT_DEADLINE_S, None, 0, "")
    tight = Job("a", 1, 0.0, 0.025, 0, "")
    other = Job("a", 1, 0.0, None, 0, "")
    for job in (tight, other, patient):
        world.queues["a"].fair_queue.add(job)
    batch, late = world.schedule.take(0.0)
    assert batch is not None
    assert (batch.requests, late) == ([patient, other], [tight])


def test_requests_that_a_cut_puts_back_keep_their_place() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    jobs = [Job("a", 1, 0.0, deadline_s, 0, "") for deadline_s in (0.025, 0.9, 0.9, 0.9, 0.9)]
    for job in jobs:
        world.queues["a"].fair_queue.add(job)
    batches = [world.schedule.take(now_s)[0] for now_s in (0.0, 0.02)]
    assert [batch and batch.requests for batch in batches] == [jobs[:2], jobs[2:]]


def test_what_a_cut_puts_back_is_not_counted_as_served() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    for deadline_s in (0.025, 0.9, 0.9, 0.9):
        world.queues["a"].fair_queue.add(Job("a", 1, 0.0, deadline_s, 0, "x"))
    first, _ = world.schedule.take(0.0)
    assert first is not None
    assert first.rows == 2
    for _ in range(4):
        world.queues["a"].fair_queue.add(Job("a", 1, 0.0, 0.9, 0, "y"))
    second, _ = world.schedule.take(0.02)
    assert second is not None
    assert Counter(job.tenant for job in second.requests) == {"x": 1, "y": 3}


def test_what_expired_while_nobody_looked_is_given_up_and_not_computed() -> None:
    world = World()
    jobs = [Job("a", 1, 0.0, deadline_s, 0, "") for deadline_s in (1.0, 2.0, 30.0)]
    for job in jobs:
        world.queues["a"].fair_queue.add(job)
    batch, late = world.schedule.take(10.0)
    assert (late, batch and batch.requests) == (jobs[:2], jobs[2:])
