"""A schedule with a simulated clock and slots that run, and the rules that hold after every event; for its tests."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from shoal.batching.fair_queue import QueuedRequest
from shoal.batching.scheduler import Batch, BatchScheduler, QueueFull, QueueState

MAX_BATCH = 4
MAX_QUEUE = 12
QUEUES = ("a", "b")


class Job(QueuedRequest):
    """A request that knows its queue and how it ended."""

    __slots__ = ("end", "ended_s", "queue", "trial")

    def __init__(
        self, queue: str, rows: int, now_s: float, deadline_s: float | None, group: int, tenant: str, places: int = 0
    ) -> None:
        super().__init__(rows, now_s, deadline_s, group, tenant, places)
        self.queue = queue
        self.end = ""
        self.ended_s = math.nan
        self.trial = False


@dataclass
class World:
    """A clock, slots that run, and the rules that hold after every event."""

    slots: int = 1
    seconds_of: tuple[float, float] = (0.02, 0.001)  # a forward takes the first, plus the second for each row
    exact: bool = False  # the latency model knows that from the start; else it learns
    weights: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 1.0))

    def __post_init__(self) -> None:
        self.schedule: BatchScheduler[Job] = BatchScheduler(self.slots)
        self.queues: dict[str, QueueState[Job]] = {
            name: self.schedule.add_queue(
                name, max_batch_rows=MAX_BATCH, max_queue_rows=MAX_QUEUE, weight=self.weights[name]
            )
            for name in QUEUES
        }
        for queue in self.queues.values() if self.exact else ():
            for rows in range(1, MAX_BATCH + 1):
                queue.latency.observe(rows, self.seconds(rows), 0.0)
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self.running: list[tuple[float, int, Batch[Job]]] = []
        self.started: list[Batch[Job]] = []
        self.served: Counter[str] = Counter()  # rows by tenant
        self.used_s: dict[str, float] = defaultdict(float)  # seconds by queue

    def seconds(self, rows: int) -> float:
        return self.seconds_of[0] + self.seconds_of[1] * rows

    def submit(
        self,
        queue: str = "a",
        rows: int = 1,
        within_s: float | None = None,
        group: int = 0,
        tenant: str = "",
        places: int = 0,
    ) -> Job:
        deadline_s = None if within_s is None else self.now_s + within_s
        job = Job(queue, rows, self.now_s, deadline_s, group, tenant, places)
        self.jobs.append(job)
        refusal, evicted = self.schedule.admit(self.queues[queue], job, self.now_s)
        assert refusal is None or not evicted
        for other in evicted:
            assert other.tenant != tenant
            self.settle(other, "full")
        if refusal is not None:
            self.settle(job, "full" if isinstance(refusal, QueueFull) else "late")
        self.fill_slots()
        return job

    def cancel(self, job: Job) -> None:
        if self.queues[job.queue].fair_queue.withdraw(job):
            self.settle(job, "cancelled")
        self.check()

    def advance(self, seconds: float = math.inf) -> None:
        """Let time pass, or all that runs and waits end."""
        until_s = self.now_s + seconds
        while self.running and self.running[0][0] <= until_s:
            self.now_s, _, batch = heapq.heappop(self.running)
            forwards = [] if self.exact else [(batch.rows, self.seconds(batch.rows))]
            self.schedule.finish_batch(batch, self.now_s, forwards)
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
            assert queue.fair_queue.rows == sum(job.num_rows for job in queue.fair_queue)
            assert queue.fair_queue.charged_rows == sum(job.charged_rows for job in queue.fair_queue) <= MAX_QUEUE

    def check_batch(self, batch: Batch[Job]) -> None:
        assert 1 <= batch.rows == sum(job.num_rows for job in batch.requests) <= MAX_BATCH
        assert {(job.queue, job.group) for job in batch.requests} == {(batch.queue.name, batch.requests[0].group)}
        assert all(job.end == "" for job in batch.requests)
        for left in batch.queue.fair_queue:
            if left.group == batch.requests[0].group:
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
    st.sampled_from([0, 0, MAX_BATCH, MAX_QUEUE]),
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
