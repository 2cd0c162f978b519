"""The requests of one model that wait for a slot: in order of deadline, shared fairly between tenants.

Owns the order in which waiting requests are taken. Guarded by the schedule, or by whoever simulates one; knows no clock
and no thread. A request without a deadline, or with a later one, stands in the order as if it had one `PATIENCE_S`
after its arrival, so that everything is the earliest some day and nothing starves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort, insort_left
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from shoal.serve.batching.latency_model import LatencyModel

DEFAULT_DEADLINE_S = 1.0


class QueuedRequest:
    """One request that waits: what the order needs to know of it. Compared by identity.

    num_places: what it takes of the queue's room; 0: as much as its rows
    """

    __slots__ = ("arrived_s", "charged_rows", "deadline_s", "group", "num_rows", "order_s", "tenant")

    def __init__(
        self,
        num_rows: int,
        arrived_s: float,
        deadline_s: float | None,
        group: Hashable = None,
        tenant: str = "",
        num_places: int = 0,
    ) -> None:
        self.num_rows, self.arrived_s, self.group, self.tenant = num_rows, arrived_s, group, tenant
        self.deadline_s, self.charged_rows = deadline_s, num_places or num_rows
        patient_s = arrived_s + DEFAULT_DEADLINE_S
        self.order_s = patient_s if deadline_s is None or deadline_s > patient_s else deadline_s


QueuedT = TypeVar("QueuedT", bound=QueuedRequest)
Lane = list[QueuedT]  # sorted by `order_s`, and equal ones by arrival


class _Tenant(Generic[QueuedT]):
    """What one tenant has waiting, a lane for each group, and how many rows of its were served: its virtual time."""

    __slots__ = ("charged_rows", "lanes", "rows", "served")

    def __init__(self, served: float) -> None:
        self.lanes: dict[Hashable, Lane[QueuedT]] = {}
        self.rows = self.charged_rows = 0
        self.served = served


class FairQueue(Generic[QueuedT]):
    """Adds, withdraws and takes. Tenants are served equal rows while they have any waiting.

    A tenant that comes back starts where those who stayed are (`_lead` has forgotten it, unless it is ahead of them):
    what it did not use is gone.
    """

    def __init__(self, max_batch_rows: int, latency: LatencyModel) -> None:
        self.rows = self.charged_rows = 0
        self._max_batch_rows, self._latency = max_batch_rows, latency
        self._tenants: dict[str, _Tenant[QueuedT]] = {}
        self._served = 0.0  # the virtual time of the tenant that was served last
        self._num_deadlines = 0  # waiting requests that have one

    def __iter__(self) -> Iterator[QueuedT]:
        for tenant in self._tenants.values():
            for lane in tenant.lanes.values():
                yield from lane

    def add(self, waiting: QueuedT) -> None:
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self._tenants[waiting.tenant] = _Tenant(self._served)
        lane = tenant.lanes.get(waiting.group)
        if lane is None:
            lane = tenant.lanes[waiting.group] = []
        if lane and lane[-1].order_s > waiting.order_s:
            insort(lane, waiting, key=_order)
        else:
            lane.append(waiting)
        tenant.rows += waiting.num_rows
        tenant.charged_rows += waiting.charged_rows
        self.rows += waiting.num_rows
        self.charged_rows += waiting.charged_rows
        if waiting.deadline_s is not None:
            self._num_deadlines += 1

    def withdraw(self, waiting: QueuedT) -> bool:
        """Take one request out, wherever it stands; False when it is not here any more."""
        tenant = self._tenants.get(waiting.tenant)
        lane = tenant.lanes.get(waiting.group) if tenant else None
        if not tenant or not lane:
            return False
        for place in range(bisect_left(lane, waiting.order_s, key=_order), len(lane)):
            if lane[place] is waiting:
                self._remove(tenant, waiting, place)
                return True
            if lane[place].order_s > waiting.order_s:
                break
        return False

    def take(self, now_s: float) -> tuple[list[QueuedT], list[QueuedT]]:
        """The next batch, of one group, and the requests that left because their deadline cannot be made any more.

        The batch is empty only when the line is, in the end. When nobody could make it by the latency model, the
        least hopeless that has not expired is tried: the slot would idle, and the model may be wrong.
        """
        late: list[QueuedT] = []
        if not self._num_deadlines and len(self._tenants) == 1 and self.rows <= self._max_batch_rows:
            (tenant,) = self._tenants.values()
            if len(tenant.lanes) == 1:
                return self._take_all(tenant), late
        batch: list[QueuedT] = []
        while self.rows and not batch:
            lead = self._select_next()
            self._served = self._tenants[lead.tenant].served
            batch = self._fill_batch(lead.group, now_s, late)
        if late and not batch:
            best = max(late, key=_deadline_or_inf)
            if _deadline_or_inf(best) > now_s:
                late.remove(best)
                batch.append(best)
        if not self.rows and len(self._tenants) > 1:
            self._tenants.clear()  # nobody waits, so nobody is behind anybody
        return batch, late

    def can_evict(self, places: int, waiting: QueuedT) -> bool:
        """Whether the tenant that holds the most would hold as many without `places` of them as this one's with it."""
        tenant = self._tenants.get(waiting.tenant)
        held = waiting.charged_rows + (tenant.charged_rows if tenant is not None else 0)
        return held <= max([each.charged_rows for each in self._tenants.values()], default=0) - places

    def evict(self, places: int) -> list[QueuedT]:
        """Take `places` or more from the tenant that holds the most: the requests whose turn would come last."""
        tenant = max(self._tenants.values(), key=_charged_rows)
        evicted: list[QueuedT] = []
        while places > 0:
            lane = max(tenant.lanes.values(), key=_last_order)
            evicted.append(lane[-1])
            places -= lane[-1].charged_rows
            self._remove(tenant, lane[-1], len(lane) - 1)
        return evicted

    def estimate_wait(self, waiting: QueuedT) -> tuple[float, float]:
        """For a request that is not here yet: what forwards before its own should take, and the rows of its own."""
        rows, most = self._count_rows_before(waiting), self._max_batch_rows
        if not rows:
            return 0.0, waiting.num_rows
        counts = self._counts()
        company = rows * counts.get(waiting.group, 0) / sum(counts.values()) % most
        return self._estimate_s(rows - company, counts), min(most, company + waiting.num_rows)

    def estimate_total_s(self) -> float:
        """What forwards over everything that waits should take."""
        return self._estimate_s(self.rows, self._counts())

    # Below: parts of the above.

    def _take_all(self, tenant: _Tenant[QueuedT]) -> list[QueuedT]:
        """Everything, when it is one lane, fits one batch and has no deadlines: the usual case, at a third the cost."""
        (batch,) = tenant.lanes.values()
        tenant.lanes.clear()
        self._served = tenant.served
        tenant.served += self.rows
        tenant.rows = self.rows = tenant.charged_rows = self.charged_rows = 0
        return batch

    def _select_next(self) -> QueuedT:
        """The earliest request of the tenant that has been served least."""
        busy = [tenant for tenant in self._tenants.values() if tenant.rows]
        if len(busy) != len(self._tenants):
            # An idle tenant is remembered only while it is ahead of the others; else it is as good as new.
            self._tenants = {n: t for n, t in self._tenants.items() if t.rows or t.served > self._served}
        tenant = min(busy, key=_served) if len(busy) > 1 else busy[0]
        return min([lane[0] for lane in tenant.lanes.values()], key=_order)

    def _fill_batch(self, group: Hashable, now_s: float, late: list[QueuedT]) -> list[QueuedT]:
        """As many requests of a group as a batch holds and its earliest deadline allows.

        A batch that is too large for its earliest deadline is cut, if what stays behind can still make its own
        after the smaller batch. If not, saving the one would cost the others, or somebody who stands before it: it is
        given up, and the batch is filled.
        """
        batch: list[QueuedT] = []
        while True:
            rows = self._fill_from_group(batch, group, now_s, late)
            tightest_s = min([_deadline_or_inf(waiting) for waiting in batch], default=math.inf)
            room = self._latency.rows_within(tightest_s - now_s)
            if rows <= room:
                return batch
            batch.sort(key=_order)
            num_kept, kept_rows = _fit_prefix(batch, room)
            behind_s = min([_deadline_or_inf(waiting) for waiting in batch[num_kept:]], default=math.inf)
            next_rows = min(self._max_batch_rows, self.rows + rows - kept_rows)
            ends_s = now_s + self._latency.seconds(kept_rows) + self._latency.seconds(next_rows)
            if ends_s <= behind_s:  # never true for a cut that keeps nobody
                for waiting in reversed(batch[num_kept:]):
                    self._put_back(waiting)
                return batch[:num_kept]
            given_up = min(batch, key=_deadline_or_inf)
            batch.remove(given_up)
            self._tenants[given_up.tenant].served -= given_up.num_rows
            late.append(given_up)

    def _fill_from_group(self, batch: list[QueuedT], group: Hashable, now_s: float, late: list[QueuedT]) -> int:
        """Fill a batch from a group, the tenants taking turns by rows served; its rows.

        A request that does not fit ends the turns of its tenant: nobody overtakes within a tenant and a group.
        """
        rows = sum([waiting.num_rows for waiting in batch])
        turns = [tenant for tenant in self._tenants.values() if group in tenant.lanes]
        least_s = now_s + self._latency.seconds(1)
        while turns:
            tenant = min(turns, key=_served) if len(turns) > 1 else turns[0]
            waiting = tenant.lanes[group][0]
            num_rows, deadline_s = waiting.num_rows, waiting.deadline_s
            if deadline_s is not None and (
                deadline_s < least_s or (num_rows > 1 and deadline_s < now_s + self._latency.seconds(num_rows))
            ):
                late.append(waiting)
            elif rows + num_rows > self._max_batch_rows:
                turns.remove(tenant)
                continue
            else:
                rows += num_rows
                tenant.served += num_rows
                batch.append(waiting)
            self._remove(tenant, waiting, 0)
            if group not in tenant.lanes:
                turns.remove(tenant)
        return rows

    def _put_back(self, waiting: QueuedT) -> None:
        """Where it stood, as if it had never been taken."""
        tenant = self._tenants[waiting.tenant]
        insort_left(tenant.lanes.setdefault(waiting.group, []), waiting, key=_order)
        tenant.served -= waiting.num_rows
        tenant.rows += waiting.num_rows
        tenant.charged_rows += waiting.charged_rows
        self.rows += waiting.num_rows
        self.charged_rows += waiting.charged_rows
        if waiting.deadline_s is not None:
            self._num_deadlines += 1

    def _remove(self, tenant: _Tenant[QueuedT], waiting: QueuedT, place: int) -> None:
        lane = tenant.lanes[waiting.group]
        del lane[place]
        if not lane:
            del tenant.lanes[waiting.group]  # a group may hold on to a model's version
        tenant.rows -= waiting.num_rows
        tenant.charged_rows -= waiting.charged_rows
        self.rows -= waiting.num_rows
        self.charged_rows -= waiting.charged_rows
        if waiting.deadline_s is not None:
            self._num_deadlines -= 1

    def _count_rows_before(self, waiting: QueuedT) -> float:
        """Rows that are served before this request: its tenant's earlier ones, and of each other tenant as many."""
        own = 0
        tenant = self._tenants.get(waiting.tenant)
        if tenant is not None:
            own = tenant.rows
            for lane in tenant.lanes.values():
                for other in reversed(lane):
                    if other.order_s <= waiting.order_s:
                        break
                    own -= other.num_rows
        if len(self._tenants) == 1:
            return own
        others = [other.rows for other in self._tenants.values() if other is not tenant]
        return own + sum([min(rows, own + waiting.num_rows) for rows in others])

    def _counts(self) -> dict[Hashable, int]:
        """How many requests wait in each group."""
        counts: dict[Hashable, int] = {}
        for tenant in self._tenants.values():
            for group, lane in tenant.lanes.items():
                counts[group] = counts.get(group, 0) + len(lane)
        return counts

    def _estimate_s(self, rows: float, counts: dict[Hashable, int]) -> float:
        """Forwards over `rows` rows that are spread over the groups as the requests that wait are."""
        if rows < 1:
            return 0.0
        total, num_requests, most = 0.0, sum(counts.values()), self._max_batch_rows
        for count in counts.values():
            batches, rest = divmod(rows * count / num_requests, most)
            total += batches * self._latency.seconds(most)
            if rest:
                total += self._latency.seconds(rest)
        return total


_order = attrgetter("order_s")


def _fit_prefix(batch: Sequence[QueuedRequest], room: float) -> tuple[int, int]:
    """How many requests from the front fit into so many rows, and their rows."""
    rows = 0
    for count, waiting in enumerate(batch):
        if rows + waiting.num_rows > room:
            return count, rows
        rows += waiting.num_rows
    return len(batch), rows


def _served(tenant: _Tenant[QueuedT]) -> float:
    return tenant.served


def _charged_rows(tenant: _Tenant[QueuedT]) -> int:
    return tenant.charged_rows


def _last_order(lane: Lane[QueuedT]) -> float:
    return lane[-1].order_s


def _deadline_or_inf(waiting: QueuedRequest) -> float:
    return math.inf if waiting.deadline_s is None else waiting.deadline_s
