"""The waiting requests of one model, ordered by deadline and shared fairly between tenants.

Owns the order of waiting requests. Guarded by the scheduler or by the simulation; knows no clock and no thread. A
request without a deadline, or with a later one, is ordered as if its deadline were `PATIENCE_S` after its arrival. So
every request becomes the earliest at some time and none starves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort, insort_left
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from shoal.batching.latency_model import LatencyModel

DEFAULT_DEADLINE_S = 1.0


class QueuedRequest:
    """A waiting request, with the fields that decide its order. Compared by identity.

    charged_rows: rows of the queue that it takes; 0: as many as its own
    """

    __slots__ = ("arrived_s", "charged_rows", "deadline_s", "group", "num_rows", "order_s", "tenant")

    def __init__(
        self,
        num_rows: int,
        arrived_s: float,
        deadline_s: float | None,
        group: Hashable = None,
        tenant: str = "",
        charged_rows: int = 0,
    ) -> None:
        self.num_rows = num_rows
        self.arrived_s = arrived_s
        self.group = group
        self.tenant = tenant
        self.deadline_s, self.charged_rows = deadline_s, charged_rows or num_rows
        patient_s = arrived_s + DEFAULT_DEADLINE_S
        self.order_s = patient_s if deadline_s is None or deadline_s > patient_s else deadline_s


QueuedT = TypeVar("QueuedT", bound=QueuedRequest)
Lane = list[QueuedT]  # sorted by `order_s`, and equal ones by arrival


class _Tenant(Generic[QueuedT]):
    """One tenant's waiting requests, a lane for each group, and its virtual time: the number of rows served."""

    __slots__ = ("charged_rows", "lanes", "rows", "served")

    def __init__(self, served: float) -> None:
        self.lanes: dict[Hashable, Lane[QueuedT]] = {}
        self.rows = self.charged_rows = 0
        self.served = served


class FairQueue(Generic[QueuedT]):
    """Adds, withdraws and takes requests. Tenants get equal rows while they have requests waiting.

    A returning tenant starts at the virtual time of the tenant served last, unless it is still ahead of it: an unused
    share is lost.
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
        self._count(tenant, waiting, 1)

    def withdraw(self, waiting: QueuedT) -> bool:
        """Remove one request; False when it is no longer here."""
        tenant = self._tenants.get(waiting.tenant)
        lane = tenant.lanes.get(waiting.group) if tenant else None
        if not tenant or not lane:
            return False
        for index in range(bisect_left(lane, waiting.order_s, key=_order), len(lane)):
            if lane[index] is waiting:
                self._remove(tenant, waiting, index)
                return True
            if lane[index].order_s > waiting.order_s:
                break
        return False

    def take(self, now_s: float) -> tuple[list[QueuedT], list[QueuedT]]:
        """Take the next batch, of one group; also returns the requests removed because they can no longer meet their
        deadline.

        The batch is empty only when the queue ends up empty. When no request can meet its deadline by the latency
        model, the unexpired one closest to it is tried: the slot would idle otherwise, and the model may be wrong.
        """
        late: list[QueuedT] = []
        batch: list[QueuedT]
        if not self._num_deadlines and len(self._tenants) == 1 and self.rows <= self._max_batch_rows:
            (tenant,) = self._tenants.values()
            if len(tenant.lanes) == 1:  # the usual case, at a third of the cost
                (batch,) = tenant.lanes.values()
                tenant.lanes.clear()
                self._served = tenant.served
                tenant.served += self.rows
                tenant.rows = self.rows = tenant.charged_rows = self.charged_rows = 0
                return batch, late
        batch = []
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
            self._tenants.clear()  # no request waits, so no tenant is behind another
        return batch, late

    def may_displace_largest_tenant(self, waiting: QueuedT, charged_rows: int) -> bool:
        """Whether the largest tenant, less `charged_rows`, would still have as many as this tenant with the new
        request."""
        tenant = self._tenants.get(waiting.tenant)
        own = waiting.charged_rows + (tenant.charged_rows if tenant is not None else 0)
        return own <= max([each.charged_rows for each in self._tenants.values()], default=0) - charged_rows

    def evict(self, charged_rows: int) -> list[QueuedT]:
        """Remove the last requests of the largest tenant, until at least `charged_rows` are free."""
        tenant = max(self._tenants.values(), key=attrgetter("charged_rows"))
        evicted: list[QueuedT] = []
        while charged_rows > 0:
            lane = max(tenant.lanes.values(), key=lambda each: each[-1].order_s)
            evicted.append(lane[-1])
            charged_rows -= lane[-1].charged_rows
            self._remove(tenant, lane[-1], len(lane) - 1)
        return evicted

    def estimate_wait(self, waiting: QueuedT) -> tuple[float, float]:
        """Estimate, for a request not yet added, the seconds of the forwards before its own, and the rows of its
        own."""
        rows, most = self._count_rows_before(waiting), self._max_batch_rows
        if not rows:
            return 0.0, waiting.num_rows
        counts = self._counts()
        company = rows * counts.get(waiting.group, 0) / sum(counts.values()) % most
        return self._estimate_s(rows - company, counts), min(most, company + waiting.num_rows)

    def estimate_total_s(self) -> float:
        """Estimate the seconds of the forwards over all waiting requests."""
        return self._estimate_s(self.rows, self._counts())

    # Helpers.

    def _select_next(self) -> QueuedT:
        """The earliest request of the tenant that has been served least."""
        busy = [tenant for tenant in self._tenants.values() if tenant.rows]
        if len(busy) != len(self._tenants):
            # An idle tenant is retained only while it is ahead of the others; else it counts as new.
            self._tenants = {n: t for n, t in self._tenants.items() if t.rows or t.served > self._served}
        tenant = min(busy, key=_served_rows) if len(busy) > 1 else busy[0]
        return min([lane[0] for lane in tenant.lanes.values()], key=_order)

    def _fill_batch(self, group: Hashable, now_s: float, late: list[QueuedT]) -> list[QueuedT]:
        """Take as many requests of a group as the batch limit and its earliest deadline allow.

        A batch too large for its earliest deadline is cut if the remaining requests still meet their deadlines after
        the smaller batch. Otherwise the request with the earliest deadline is given up and the batch is filled: saving
        it would cost others, or an earlier request.
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
            if ends_s <= behind_s:  # never true for a cut that retains no request
                for waiting in reversed(batch[num_kept:]):
                    self._put_back(waiting)
                return batch[:num_kept]
            given_up = min(batch, key=_deadline_or_inf)
            batch.remove(given_up)
            self._tenants[given_up.tenant].served -= given_up.num_rows
            late.append(given_up)

    def _fill_from_group(self, batch: list[QueuedT], group: Hashable, now_s: float, late: list[QueuedT]) -> int:
        """Fill a batch from a group, the tenants taking turns by rows served; returns its rows.

        A request that does not fit ends its tenant's turns: no request overtakes another of its tenant and group.
        """
        rows = sum([waiting.num_rows for waiting in batch])
        turns = [tenant for tenant in self._tenants.values() if group in tenant.lanes]
        least_s = now_s + self._latency.seconds(1)
        while turns:
            tenant = min(turns, key=_served_rows) if len(turns) > 1 else turns[0]
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
        """Restore a request to its former position."""
        tenant = self._tenants[waiting.tenant]
        insort_left(tenant.lanes.setdefault(waiting.group, []), waiting, key=_order)
        tenant.served -= waiting.num_rows
        self._count(tenant, waiting, 1)

    def _remove(self, tenant: _Tenant[QueuedT], waiting: QueuedT, index: int) -> None:
        lane = tenant.lanes[waiting.group]
        del lane[index]
        if not lane:
            del tenant.lanes[waiting.group]  # a group may keep a model's version in memory
        self._count(tenant, waiting, -1)

    def _count(self, tenant: _Tenant[QueuedT], waiting: QueuedT, sign: int) -> None:
        rows, charged_rows = sign * waiting.num_rows, sign * waiting.charged_rows
        tenant.rows += rows
        tenant.charged_rows += charged_rows
        self.rows += rows
        self.charged_rows += charged_rows
        if waiting.deadline_s is not None:
            self._num_deadlines += sign

    def _count_rows_before(self, waiting: QueuedT) -> float:
        """Rows served before this request: its tenant's earlier ones, and as many of each other tenant."""
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
        """The number of waiting requests of each group."""
        counts: dict[Hashable, int] = {}
        for tenant in self._tenants.values():
            for group, lane in tenant.lanes.items():
                counts[group] = counts.get(group, 0) + len(lane)
        return counts

    def _estimate_s(self, rows: float, counts: dict[Hashable, int]) -> float:
        """Estimate the forwards over `rows` rows, spread over the groups like the waiting requests."""
        if rows < 1:
            return 0.0
        total = 0.0
        num_requests = sum(counts.values())
        most = self._max_batch_rows
        for count in counts.values():
            batches, rest = divmod(rows * count / num_requests, most)
            total += batches * self._latency.seconds(most)
            if rest:
                total += self._latency.seconds(rest)
        return total


_order, _served_rows = attrgetter("order_s"), attrgetter("served")


def _fit_prefix(batch: Sequence[QueuedRequest], capacity: float) -> tuple[int, int]:
    """The number of requests from the front that fit into so many rows, and their rows."""
    rows = 0
    for count, waiting in enumerate(batch):
        if rows + waiting.num_rows > capacity:
            return count, rows
        rows += waiting.num_rows
    return len(batch), rows


def _deadline_or_inf(waiting: QueuedRequest) -> float:
    return math.inf if waiting.deadline_s is None else waiting.deadline_s
