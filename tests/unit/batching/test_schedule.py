"""The schedule's promises, against a simulated clock: what is taken and refused, in which order, and nothing lost."""

import math
import pickle
import weakref
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.batching.fair_queue import DEFAULT_DEADLINE_S, QueuedRequest
from shoal.batching.scheduler import BatchScheduler, DeadlineExceeded, QueueFull
from shoal.errors import ConfigError
from unit.batching.schedule_world import MAX_BATCH, MAX_QUEUE, QUEUES, Job, World, events, play


@settings(max_examples=60)
@given(script=events, slots=st.integers(1, 3), exact=st.booleans())
def test_nothing_is_lost_nothing_idles_and_limits_hold(
    script: list[tuple[object, ...]], slots: int, exact: bool
) -> None:
    """in = answered + refused + cancelled + given up; the other rules are checked by the world after every event."""
    world = World(slots=slots, exact=exact)
    play(world, script)
    assert not world.schedule.has_work
    assert not world.schedule.running
    ends = world.ends()
    assert sum(ends.values()) == len(world.jobs)
    assert set(ends) <= {"answered", "full", "late", "cancelled", "given up"}
    assert world.ends(job for job in world.jobs if job.deadline_s is None).keys() <= {"answered", "full", "cancelled"}
    in_batches = Counter(id(job) for batch in world.started for job in batch.requests)
    assert set(in_batches.values()) <= {1}
    assert {id(job) for job in world.jobs if job.end == "answered"} == set(in_batches)


def test_everything_compatible_goes_into_one_batch_and_the_rest_waits() -> None:
    world = World()
    world.submit()
    jobs = [world.submit(group=group) for group in (0, 1, 0, 1, 0)]
    world.advance()
    assert [batch.rows for batch in world.started] == [1, 3, 2]
    assert world.started[1].requests == [jobs[0], jobs[2], jobs[4]]


@settings(max_examples=20)
@given(
    weights=st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)),
    rows=st.tuples(st.integers(1, MAX_BATCH), st.integers(1, MAX_BATCH)),
    slots=st.integers(1, 2),
    exact=st.booleans(),
)
def test_busy_queues_get_time_by_their_weights(
    weights: tuple[float, float], rows: tuple[int, int], slots: int, exact: bool
) -> None:
    """Never further apart than what the slots may hold at once, however unequal the forwards are."""
    world = World(slots=slots, exact=exact, weights=dict(zip(QUEUES, weights, strict=True)))
    longest_s = world.seconds(MAX_BATCH)
    for step in range(120):
        for name, num_rows in zip(QUEUES, rows, strict=True):
            while world.queues[name].fair_queue.rows + num_rows <= MAX_QUEUE:
                world.submit(name, num_rows)
        if step > 5:
            a, b = (world.used_s[name] / world.weights[name] for name in QUEUES)
            bound = (slots + 1) * longest_s * (1 / weights[0] + 1 / weights[1])
            assert abs(a - b) <= bound
        world.advance(longest_s)


@settings(max_examples=30)
@given(
    sizes=st.tuples(st.integers(1, MAX_BATCH), st.integers(1, MAX_BATCH)),
    groups=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_busy_tenants_get_equal_rows(sizes: tuple[int, int], groups: tuple[int, int]) -> None:
    world = World()
    for _ in range(60):
        for tenant, rows, group in zip("xy", sizes, groups, strict=True):
            for _ in range(2):
                if sum(job.num_rows for job in world.queues["a"].fair_queue if job.tenant == tenant) < MAX_QUEUE // 3:
                    world.submit("a", rows, group=group, tenant=tenant)
        assert abs(world.served["x"] - world.served["y"]) <= 2 * MAX_BATCH
        world.advance(world.seconds(MAX_BATCH))
    assert world.served["x"] > 50


def test_a_tenant_that_was_away_gets_no_credit_for_it() -> None:
    world = World()
    for _ in range(20):
        world.submit(rows=MAX_BATCH, tenant="x")
        world.advance()
    world.submit(rows=MAX_BATCH, tenant="x")
    for tenant in "xxxxyyyyyyyy":
        world.submit(tenant=tenant)
    world.advance()
    shares = ["".join(sorted(job.tenant for job in batch.requests)) for batch in world.started[-3:]]
    assert shares == ["yyyy", "xxyy", "xxyy"]  # a batch ahead, since x has one in hand, and no more


def test_tenants_that_nobody_waits_for_are_forgotten() -> None:
    world = World()
    for number in range(100):
        world.submit(tenant=f"key-{number}")
        if number % 5 == 4:
            world.advance()
    assert len(world.queues["a"].fair_queue._tenants) <= 1


def test_a_group_that_nobody_waits_for_is_let_go() -> None:
    """It may hold a version's weights."""

    class Version:
        pass

    schedule: BatchScheduler[QueuedRequest] = BatchScheduler()
    queue = schedule.add_queue("a", max_batch_rows=4, max_queue_rows=4)
    for deadline_s in (None, 1.0):
        version = Version()
        gone = weakref.ref(version)
        assert schedule.admit(queue, QueuedRequest(1, 0.0, deadline_s, version), 0.0) == (None, ())
        batch, _ = schedule.take(0.0)
        assert batch is not None
        schedule.finish_batch(batch, 0.0, [])
        del version, batch
        assert gone() is None


def test_a_queue_that_was_away_gets_no_credit_for_it() -> None:
    world = World()
    for _ in range(20):
        world.submit("a", rows=MAX_BATCH)
        world.advance()
    world.submit("a", rows=MAX_BATCH)
    for name in "abababab":
        if world.queues[name].fair_queue.rows + MAX_BATCH <= MAX_QUEUE:
            world.submit(name, rows=MAX_BATCH)
    world.advance()
    assert "".join(batch.queue.name for batch in world.started[-6:]) in ("ababab", "bababa")


def test_who_fills_the_queue_makes_room_for_others_until_all_hold_as_much() -> None:
    world = World()
    world.submit(rows=MAX_BATCH)
    flood = [world.submit(tenant="x") for _ in range(MAX_QUEUE + 5)]
    assert world.ends(flood) == {"": MAX_QUEUE, "full": 5}
    first = world.submit(tenant="y", rows=2)
    assert first.end == ""
    assert world.ends(flood[: MAX_QUEUE - 2]) == {"": MAX_QUEUE - 2}, "the newest leave"
    for _ in range(MAX_QUEUE):
        for tenant in "xyz":
            world.submit(tenant=tenant)
    held = Counter(job.tenant for job in world.queues["a"].fair_queue for _ in range(job.num_rows))
    assert held == {"x": 4, "y": 4, "z": 4}
    world.advance()
    assert world.ends([first, *flood[:4]]) == {"answered": 5}


def test_nobody_leaves_for_a_request_that_is_refused_all_the_same() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    for _ in range(MAX_QUEUE):
        world.submit(tenant="x")
    assert world.submit(tenant="y", rows=MAX_BATCH, within_s=0.03).end == "late"
    assert world.queues["a"].fair_queue.rows == MAX_QUEUE


def test_a_queue_is_full_of_bytes_too() -> None:
    schedule: BatchScheduler[QueuedRequest] = BatchScheduler()
    queue = schedule.add_queue("a", max_batch_rows=4, max_queue_rows=8, max_queue_bytes=8000)
    taken = []
    for rows, size_bytes in ((4, 3200), (1, 3000), (2, 100), (1, 0), (1, 1)):
        waiting = QueuedRequest(rows, 0.0, None, charged_rows=queue.compute_charged_rows(rows, size_bytes))
        refusal, _ = schedule.admit(queue, waiting, 0.0)
        taken.append(waiting.charged_rows if refusal is None else refusal.status)
    assert taken == [4, 3, 429, 1, 429]
    assert str(refusal).startswith("the queue is full (it holds 8 rows, or 8000 bytes)")


@pytest.mark.parametrize(("retry_after_s", "when"), [(0.0, "at once"), (0.0123456, "in 0.0123 s"), (2.5, "in 2.5 s")])
def test_a_refusal_says_when_to_come_again(retry_after_s: float, when: str) -> None:
    assert str(QueueFull(8, retry_after_s)) == f"the queue is full (it holds 8 rows); try again {when}"


def test_a_request_that_is_larger_than_the_queue_may_wait_alone() -> None:
    schedule: BatchScheduler[QueuedRequest] = BatchScheduler()
    queue = schedule.add_queue("a", max_batch_rows=4, max_queue_rows=8, max_queue_bytes=8000)
    large, small = (
        QueuedRequest(1, 0.0, None, charged_rows=queue.compute_charged_rows(1, 50_000)),
        QueuedRequest(1, 0.0, None),
    )
    assert schedule.admit(queue, large, 0.0) == (None, ())
    refusal, _ = schedule.admit(queue, small, 0.0)
    assert isinstance(refusal, QueueFull)


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(exact=True)
    for _ in range(4):
        world.submit(rows=MAX_BATCH)
    job = Job("a", 1, world.now_s, None, 0, "")
    refusal, _ = world.schedule.admit(world.queues["a"], job, world.now_s)
    assert isinstance(refusal, QueueFull)
    assert refusal.status == 429
    assert refusal.retry_after_s == pytest.approx(4 * world.seconds(MAX_BATCH))


@pytest.mark.parametrize(
    ("words", "field_name"),
    [
        ((0, 8, 1.0), "max_batch_rows"),
        ((8, 4, 1.0), "max_queue_rows"),
        ((8, 8, 0.0), "weight"),
        ((8, 8, math.nan), "weight"),
        ((8, 8, 1.0, 0), "max_queue_bytes"),
    ],
)
def test_limits_that_do_not_fit_are_refused(words: tuple[int, int, float], field_name: str) -> None:
    schedule: BatchScheduler[Job] = BatchScheduler()
    names = ("max_batch_rows", "max_queue_rows", "weight", "max_queue_bytes")
    with pytest.raises(ConfigError) as caught:
        schedule.add_queue("a", **dict(zip(names, words, strict=False)))  # type: ignore[arg-type]
    assert caught.value.field == field_name
    with pytest.raises(ConfigError, match="slots = 0"):
        BatchScheduler(0)


def test_the_refusals_survive_a_pickle() -> None:
    for error in (QueueFull(8, 0.25), QueueFull(8, 0.25, 800), DeadlineExceeded("never")):
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.status, str(copy), copy.retry_after_s) == (error.status, str(error), error.retry_after_s)


# -- the schedule and deadlines, against a simulated clock: who is refused, who goes first, who is given up


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


@pytest.mark.parametrize(("patience_s", "num_batches"), [(30 * DEFAULT_DEADLINE_S, None), (None, 4.5)])
def test_neither_who_has_much_time_nor_who_has_no_deadline_is_starved_by_the_other(
    patience_s: float | None, num_batches: float | None
) -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    patient = world.submit(rows=MAX_BATCH, within_s=patience_s)
    within_s = num_batches and num_batches * world.seconds(MAX_BATCH)
    while not patient.end:
        assert world.now_s < DEFAULT_DEADLINE_S + 4 * world.seconds(MAX_BATCH), "it starves"
        for _ in range(3):
            world.submit(rows=2, within_s=within_s)
        world.advance(world.seconds(MAX_BATCH) / 2)
    assert patient.end == "answered"
    assert num_batches is None or world.ends()["answered"] > 20


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
