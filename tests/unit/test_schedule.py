"""The schedule's promises, against a simulated clock: what is taken and refused, in which order, and nothing lost."""

import heapq
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.serve.schedule import Batch, QueueFull, QueuePolicy, Schedule, TooLate
from shoal.serve.waiting import PATIENCE_S, Waiting

MAX_BATCH = 4
MAX_QUEUE = 12
QUEUES = ("a", "b")


class Job(Waiting):
    """A request that knows its queue and how it ended."""

    __slots__ = ("end", "ended_s", "queue", "trial")

    def __init__(self, queue: str, rows: int, now_s: float, deadline_s: float | None, group: int, tenant: str) -> None:
        super().__init__(rows, now_s, deadline_s, group, tenant)
        self.queue, self.end, self.ended_s, self.trial = queue, "", math.nan, False


@dataclass
class World:
    """A clock, slots that run, and the rules that hold after every event."""

    slots: int = 1
    seconds_of: tuple[float, float] = (0.02, 0.001)  # a forward takes the first, plus the second for each row
    exact: bool = False  # the latency model knows that from the start; else it learns
    weights: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 1.0))

    def __post_init__(self) -> None:
        self.schedule: Schedule[Job] = Schedule(self.slots)
        self.queues: dict[str, QueuePolicy[Job]] = {
            name: self.schedule.add_queue(
                name, max_batch_rows=MAX_BATCH, max_queue_rows=MAX_QUEUE, weight=self.weights[name]
            )
            for name in QUEUES
        }
        for queue in self.queues.values() if self.exact else ():
            for rows in range(1, MAX_BATCH + 1):
                queue.latency.observe(rows, self.seconds(rows))
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self.running: list[tuple[float, int, Batch[Job]]] = []
        self.started: list[Batch[Job]] = []
        self.served: Counter[str] = Counter()  # rows by tenant
        self.used_s: dict[str, float] = defaultdict(float)  # seconds by queue

    def seconds(self, rows: int) -> float:
        return self.seconds_of[0] + self.seconds_of[1] * rows

    def submit(
        self, queue: str = "a", rows: int = 1, within_s: float | None = None, group: int = 0, tenant: str = ""
    ) -> Job:
        deadline_s = None if within_s is None else self.now_s + within_s
        job = Job(queue, rows, self.now_s, deadline_s, group, tenant)
        self.jobs.append(job)
        refusal = self.schedule.admit(self.queues[queue], job, self.now_s)
        if refusal is not None:
            self.settle(job, "full" if isinstance(refusal, QueueFull) else "late")
        self.fill_slots()
        return job

    def cancel(self, job: Job) -> None:
        if self.queues[job.queue].line.withdraw(job):
            self.settle(job, "cancelled")
        self.check()

    def advance(self, seconds: float = math.inf) -> None:
        """Let time pass, or all that runs and waits end."""
        until_s = self.now_s + seconds
        while self.running and self.running[0][0] <= until_s:
            self.now_s, _, batch = heapq.heappop(self.running)
            forwards = [] if self.exact else [(batch.rows, self.seconds(batch.rows))]
            self.schedule.finished(batch, self.now_s, forwards)
            for job in batch.requests:
                self.settle(job, "answered")
            self.fill_slots()
        self.now_s = until_s if seconds < math.inf else self.now_s

    def fill_slots(self) -> None:
        while len(self.running) < self.slots:
            batch, late = self.schedule.take(self.now_s)
            for job in late:
                assert job.deadline_s is not None
                self.settle(job, "given up")
            if batch is None:
                # No slot idles beside work.
                assert not self.schedule.has_work
                break
            self.check_batch(batch)
            self.started.append(batch)
            seconds = self.seconds(batch.rows)
            self.used_s[batch.queue.name] += seconds
            for job in batch.requests:
                self.served[job.tenant] += job.num_rows
            heapq.heappush(self.running, (self.now_s + seconds, len(self.started), batch))
        self.check()

    def settle(self, job: Job, end: str) -> None:
        assert job.end == "", "every request ends once"
        job.end, job.ended_s = end, self.now_s

    def check(self) -> None:
        for queue in self.queues.values():
            assert queue.line.rows == sum(job.num_rows for job in queue.line) <= MAX_QUEUE

    def check_batch(self, batch: Batch[Job]) -> None:
        assert 1 <= batch.rows == sum(job.num_rows for job in batch.requests) <= MAX_BATCH
        assert {(job.queue, job.group) for job in batch.requests} == {(batch.queue.name, batch.group)}
        assert all(job.end == "" for job in batch.requests)
        for left in batch.queue.line:
            if left.group == batch.group:
                taken = [job.order_s for job in batch.requests if job.tenant == left.tenant]
                assert max(taken, default=-math.inf) <= left.order_s, (
                    "within a tenant, the earliest deadline goes first"
                )
        for job in batch.requests:
            job.trial = len(batch.requests) == 1

    def ends(self, jobs: Iterable[Job] | None = None) -> Counter[str]:
        return Counter(job.end for job in (self.jobs if jobs is None else jobs))


arrivals = st.tuples(
    st.just("submit"),
    st.sampled_from(QUEUES),
    st.integers(1, MAX_BATCH),
    st.none() | st.floats(0.001, 0.3),
    st.integers(0, 1),
    st.sampled_from(["", "x", "y"]),
)
events = st.lists(
    arrivals | st.tuples(st.just("cancel"), st.integers(0, 99)) | st.tuples(st.just("pass"), st.floats(0.0, 0.05)),
    max_size=60,
)


def play(world: World, script: list[tuple[object, ...]]) -> None:
    for kind, *words in script:
        if kind == "submit":
            world.submit(*words)  # type: ignore[arg-type]
        elif kind == "cancel" and world.jobs:
            world.cancel(world.jobs[words[0] % len(world.jobs)])  # type: ignore[operator]
        elif kind == "pass":
            world.advance(words[0])  # type: ignore[arg-type]
    world.advance()


@settings(max_examples=150, deadline=None)
@given(script=events, slots=st.integers(1, 3), exact=st.booleans())
def test_nothing_is_lost_nothing_idles_and_limits_hold(
    script: list[tuple[object, ...]], slots: int, exact: bool
) -> None:
    """in = answered + refused + cancelled + given up; the other rules are checked by the world after every event."""
    world = World(slots=slots, exact=exact)
    play(world, script)
    assert not world.schedule.has_work
    assert not world.schedule.in_hand
    ends = world.ends()
    assert sum(ends.values()) == len(world.jobs)
    assert set(ends) <= {"answered", "full", "late", "cancelled", "given up"}
    assert world.ends(job for job in world.jobs if job.deadline_s is None).keys() <= {"answered", "full", "cancelled"}
    in_batches = Counter(id(job) for batch in world.started for job in batch.requests)
    assert set(in_batches.values()) <= {1}
    assert {id(job) for job in world.jobs if job.end == "answered"} == set(in_batches)


@settings(max_examples=100, deadline=None)
@given(script=events)
def test_what_is_answered_is_answered_in_time_when_the_model_is_right(script: list[tuple[object, ...]]) -> None:
    """But for a lone request that an idle slot tries though it should be hopeless."""
    world = World(exact=True)
    play(world, script)
    for job in world.jobs:
        if job.end == "answered" and job.deadline_s is not None and not job.trial:
            assert job.ended_s <= job.deadline_s + 1e-9


def test_everything_compatible_goes_into_one_batch_and_the_rest_waits() -> None:
    world = World()
    world.submit()
    jobs = [world.submit(group=group) for group in (0, 1, 0, 1, 0)]
    world.advance()
    assert [batch.rows for batch in world.started] == [1, 3, 2]
    assert world.started[1].requests == [jobs[0], jobs[2], jobs[4]]


def test_the_earliest_deadline_goes_first_and_no_deadline_stands_at_its_patience() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    deadlines = (3 * PATIENCE_S, PATIENCE_S / 2, None)
    late, soon, never = [world.submit(rows=MAX_BATCH, within_s=seconds) for seconds in deadlines]
    world.advance()
    assert [batch.requests for batch in world.started[1:]] == [[soon], [never], [late]]


def test_a_request_without_a_deadline_is_not_starved_by_those_with_one() -> None:
    world = World(exact=True)
    world.submit(rows=MAX_BATCH)
    patient = world.submit(rows=MAX_BATCH)
    while not patient.end:
        assert world.now_s < PATIENCE_S + 4 * world.seconds(MAX_BATCH), "it starves"
        for _ in range(3):
            world.submit(rows=2, within_s=4.5 * world.seconds(MAX_BATCH))
        world.advance(world.seconds(MAX_BATCH) / 2)
    assert patient.end == "answered"
    assert world.ends()["answered"] > 20


@settings(max_examples=40, deadline=None)
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
            while world.queues[name].line.rows + num_rows <= MAX_QUEUE:
                world.submit(name, num_rows)
        if step > 5:
            a, b = (world.used_s[name] / world.weights[name] for name in QUEUES)
            bound = (slots + 1) * longest_s * (1 / weights[0] + 1 / weights[1])
            assert abs(a - b) <= bound
        world.advance(longest_s)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, MAX_BATCH), st.integers(1, MAX_BATCH)),
    groups=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_busy_tenants_get_equal_rows(sizes: tuple[int, int], groups: tuple[int, int]) -> None:
    world = World()
    for _ in range(60):
        for tenant, rows, group in zip("xy", sizes, groups, strict=True):
            for _ in range(2):
                if sum(job.num_rows for job in world.queues["a"].line if job.tenant == tenant) < MAX_QUEUE // 3:
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
    assert len(world.queues["a"].line._tenants) <= 1


def test_a_group_that_nobody_waits_for_is_let_go() -> None:
    """It may hold a version's weights."""

    class Version:
        pass

    schedule: Schedule[Waiting] = Schedule()
    queue = schedule.add_queue("a", max_batch_rows=4, max_queue_rows=4)
    for deadline_s in (None, 1.0):
        version = Version()
        gone = weakref.ref(version)
        assert schedule.admit(queue, Waiting(1, 0.0, deadline_s, version), 0.0) is None
        batch, _ = schedule.take(0.0)
        assert batch is not None
        schedule.finished(batch, 0.0, [])
        del version, batch
        assert gone() is None


def test_a_queue_that_was_away_gets_no_credit_for_it() -> None:
    world = World()
    for _ in range(20):
        world.submit("a", rows=MAX_BATCH)
        world.advance()
    world.submit("a", rows=MAX_BATCH)
    for name in "abababab":
        if world.queues[name].line.rows + MAX_BATCH <= MAX_QUEUE:
            world.submit(name, rows=MAX_BATCH)
    world.advance()
    assert "".join(batch.queue.name for batch in world.started[-6:]) in ("ababab", "bababa")


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
    world.queues["a"].latency.observe(1, 60.0)  # somebody's first batch took a minute
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


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(exact=True)
    for _ in range(4):
        world.submit(rows=MAX_BATCH)
    job = Job("a", 1, world.now_s, None, 0, "")
    refusal = world.schedule.admit(world.queues["a"], job, world.now_s)
    assert isinstance(refusal, QueueFull)
    assert refusal.status == 429
    assert refusal.retry_after_s == pytest.approx(4 * world.seconds(MAX_BATCH))


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
        world.queues["a"].line.add(job)
    batch, late = world.schedule.take(0.0)
    assert late == [soon]
    assert batch is not None
    assert batch.requests == others


def test_who_stands_first_is_not_overtaken_by_a_tight_deadline_that_fits_no_batch_with_it() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    patient = Job("a", MAX_BATCH - 1, -PATIENCE_S, None, 0, "")
    tight = Job("a", 1, 0.0, 0.025, 0, "")
    other = Job("a", 1, 0.0, None, 0, "")
    for job in (tight, other, patient):
        world.queues["a"].line.add(job)
    batch, late = world.schedule.take(0.0)
    assert batch is not None
    assert (batch.requests, late) == ([patient, other], [tight])


def test_requests_that_a_cut_puts_back_keep_their_place() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    jobs = [Job("a", 1, 0.0, deadline_s, 0, "") for deadline_s in (0.025, 0.9, 0.9, 0.9, 0.9)]
    for job in jobs:
        world.queues["a"].line.add(job)
    batches = [world.schedule.take(now_s)[0] for now_s in (0.0, 0.02)]
    assert [batch and batch.requests for batch in batches] == [jobs[:2], jobs[2:]]


def test_what_a_cut_puts_back_is_not_counted_as_served() -> None:
    world = World(exact=True, seconds_of=(0.0, 0.01))
    for deadline_s in (0.025, 0.9, 0.9, 0.9):
        world.queues["a"].line.add(Job("a", 1, 0.0, deadline_s, 0, "x"))
    first, _ = world.schedule.take(0.0)
    assert first is not None
    assert first.rows == 2
    for _ in range(4):
        world.queues["a"].line.add(Job("a", 1, 0.0, 0.9, 0, "y"))
    second, _ = world.schedule.take(0.02)
    assert second is not None
    assert Counter(job.tenant for job in second.requests) == {"x": 1, "y": 3}


def test_what_expired_while_nobody_looked_is_given_up_and_not_computed() -> None:
    world = World()
    jobs = [Job("a", 1, 0.0, deadline_s, 0, "") for deadline_s in (1.0, 2.0, 30.0)]
    for job in jobs:
        world.queues["a"].line.add(job)
    batch, late = world.schedule.take(10.0)
    assert (late, batch and batch.requests) == (jobs[:2], jobs[2:])


@pytest.mark.parametrize(
    ("words", "field_name"),
    [
        ((0, 8, 1.0), "max_batch_rows"),
        ((8, 4, 1.0), "max_queue_rows"),
        ((8, 8, 0.0), "weight"),
        ((8, 8, math.nan), "weight"),
    ],
)
def test_limits_that_do_not_fit_are_refused(words: tuple[int, int, float], field_name: str) -> None:
    schedule: Schedule[Job] = Schedule()
    with pytest.raises(ConfigError) as caught:
        schedule.add_queue("a", max_batch_rows=words[0], max_queue_rows=words[1], weight=words[2])
    assert caught.value.field == field_name


def test_a_schedule_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots = 0"):
        Schedule(0)


def test_the_refusals_survive_a_pickle() -> None:
    import pickle

    for error in (QueueFull(8, 0.25), TooLate("never")):
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.status, str(copy), copy.retry_after_s) == (error.status, str(error), error.retry_after_s)
