"""The requests of one model that wait for a slot: in order of deadline, shared fairly between tenants.

Owns the order in which waiting requests are taken. Used by the schedule only, which guards it; knows no clock and no
thread. A request without a deadline stands in the order as if it had one `PATIENCE_S` after its arrival, so that
everything is the earliest some day and nothing starves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from shoal.serve.latency import LatencyModel

PATIENCE_S = 1.0


class Waiting:
    """One request that waits: what the order needs to know of it. Compared by identity."""

    __slots__ = ("arrived_s", "deadline_s", "group", "num_rows", "number", "order_s", "queued", "tenant")

    def __init__(
        self, num_rows: int, arrived_s: float, deadline_s: float | None, group: Hashable = None, tenant: str = ""
    ) -> None:
        self.num_rows, self.arrived_s, self.group, self.tenant = num_rows, arrived_s, group, tenant
        self.deadline_s = deadline_s
        self.order_s = arrived_s + PATIENCE_S if deadline_s is None else deadline_s
        self.number = 0
        self.queued = False


WaitingT = TypeVar("WaitingT", bound=Waiting)


class _Tenant(Generic[WaitingT]):
    """What one tenant has waiting, by group, and how many rows of its were served: its virtual time."""

    __slots__ = ("groups", "rows", "served")

    def __init__(self, served: float) -> None:
        # Sorted by deadline, then by arrival; the number decides, so that two requests are never compared.
        self.groups: dict[Hashable, list[tuple[float, int, WaitingT]]] = {}
        self.rows = 0
        self.served = served


class WaitingLine(Generic[WaitingT]):
    """Adds, withdraws and takes. Tenants are served equal rows while they have any waiting.

    A tenant that comes back starts where those who stayed are: what it did not use is gone.
    """

    def __init__(self, max_batch_rows: int, latency: LatencyModel) -> None:
        self.rows = 0
        self._max_batch_rows, self._latency = max_batch_rows, latency
        self._tenants: dict[str, _Tenant[WaitingT]] = {}
        self._group_rows: dict[Hashable, int] = {}
        self._served = 0.0  # the virtual time of the tenant that was served last
        self._arrivals = 0

    def __iter__(self) -> Iterator[WaitingT]:
        for tenant in self._tenants.values():
            for line in tenant.groups.values():
                for _, _, waiting in line:
                    yield waiting

    def add(self, waiting: WaitingT) -> None:
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self._tenants[waiting.tenant] = _Tenant(self._served)
        elif not tenant.rows:
            tenant.served = max(tenant.served, self._served)
        line = tenant.groups.get(waiting.group)
        if line is None:
            line = tenant.groups[waiting.group] = []
        self._arrivals = waiting.number = self._arrivals + 1
        insort(line, (waiting.order_s, waiting.number, waiting))
        waiting.queued = True
        tenant.rows += waiting.num_rows
        self.rows += waiting.num_rows
        self._group_rows[waiting.group] = self._group_rows.get(waiting.group, 0) + waiting.num_rows

    def withdraw(self, waiting: WaitingT) -> bool:
        """Take one request out, wherever it stands; False when it is not here any more."""
        if not waiting.queued:
            return False
        tenant = self._tenants[waiting.tenant]
        line = tenant.groups[waiting.group]
        self._remove(tenant, waiting, bisect_left(line, (waiting.order_s, waiting.number)))
        return True

    def take(self, now_s: float) -> tuple[list[WaitingT], list[WaitingT]]:
        """The next batch, of one group, and the requests that left because their deadline cannot be made any more.

        The batch is empty only when the line is, in the end. When nobody could make it by the latency model, the
        least hopeless that has not expired is tried: the slot would idle, and the model may be wrong.
        """
        batch: list[WaitingT] = []
        late: list[WaitingT] = []
        while self.rows and not batch:
            lead = self._lead()
            self._served = self._tenants[lead.tenant].served
            batch = self._fill(lead, now_s, late)
        if late and not batch:
            best = max(late, key=_deadline)
            if _deadline(best) > now_s:
                late.remove(best)
                batch.append(best)
        return batch, late

    def seconds_before(self, waiting: WaitingT) -> float:
        """What forwards are expected to take that come before the one with this request, which is not here yet."""
        return self._seconds_of(self._rows_before(waiting), waiting.group)

    def seconds(self) -> float:
        """What forwards over everything that waits are expected to take."""
        return self._seconds_of(self.rows, None)

    # Below: parts of the above.

    def _lead(self) -> WaitingT:
        """The earliest request of the tenant that has been served least."""
        busy = [tenant for tenant in self._tenants.values() if tenant.rows]
        if len(busy) != len(self._tenants):
            # An idle tenant is remembered only while it is ahead of the others; else it is as good as new.
            self._tenants = {n: t for n, t in self._tenants.items() if t.rows or t.served > self._served}
        lines = min(busy, key=_served).groups.values() if len(busy) > 1 else busy[0].groups.values()
        return min([line[0] for line in lines])[2]

    def _fill(self, lead: WaitingT, now_s: float, late: list[WaitingT]) -> list[WaitingT]:
        """As many requests of the lead's group as a batch holds, the tenants taking turns by rows served.

        A request that does not fit ends the turns of its tenant: nobody overtakes within a tenant and a group.
        """
        batch: list[WaitingT] = []
        group, rows, room = lead.group, 0, float(self._max_batch_rows)
        lines = [tenant for tenant in self._tenants.values() if group in tenant.groups]
        while lines:
            tenant = min(lines, key=_served) if len(lines) > 1 else lines[0]
            waiting = tenant.groups[group][0][2]
            within = room
            if waiting.deadline_s is not None:
                within = min(room, self._latency.rows_within(waiting.deadline_s - now_s))
                if within < waiting.num_rows:
                    late.append(waiting)
                    self._remove(tenant, waiting, 0)
                    if group not in tenant.groups:
                        lines.remove(tenant)
                    continue
            if rows + waiting.num_rows > within:
                lines.remove(tenant)
                continue
            room = within
            rows += waiting.num_rows
            tenant.served += waiting.num_rows
            batch.append(waiting)
            self._remove(tenant, waiting, 0)
            if group not in tenant.groups:
                lines.remove(tenant)
        return batch

    def _remove(self, tenant: _Tenant[WaitingT], waiting: WaitingT, place: int) -> None:
        line = tenant.groups[waiting.group]
        del line[place]
        if not line:
            del tenant.groups[waiting.group]
        waiting.queued = False
        tenant.rows -= waiting.num_rows
        self.rows -= waiting.num_rows
        left = self._group_rows[waiting.group] - waiting.num_rows
        if left:
            self._group_rows[waiting.group] = left
        else:
            del self._group_rows[waiting.group]

    def _rows_before(self, waiting: WaitingT) -> float:
        """Rows that are served before this request: its tenant's earlier ones, and of each other tenant as many."""
        own = 0.0
        tenant = self._tenants.get(waiting.tenant)
        if tenant is not None:
            for line in tenant.groups.values():
                own += sum([other.num_rows for _, _, other in line[: bisect_left(line, (waiting.order_s, math.inf))]])
        others = [other.rows for other in self._tenants.values() if other is not tenant]
        return own + sum([min(rows, own + waiting.num_rows) for rows in others])

    def _seconds_of(self, rows: float, group: Hashable) -> float:
        """Forwards over `rows` of what waits, when they are spread over the groups as all that waits is."""
        if not rows:
            return 0.0
        share, total = rows / self.rows, 0.0
        for name, waiting_rows in self._group_rows.items():
            batches, rest = divmod(waiting_rows * share, self._max_batch_rows)
            total += batches * self._latency.seconds(self._max_batch_rows)
            if rest and name != group:
                total += self._latency.seconds(rest)
        return total


def _served(tenant: _Tenant[WaitingT]) -> float:
    return tenant.served


def _deadline(waiting: Waiting) -> float:
    return math.inf if waiting.deadline_s is None else waiting.deadline_s
