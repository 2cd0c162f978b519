"""The policy of flow control: how many slots of the queue each actor has, as one pure function.

Promise: queued segments plus open credit never exceed the queue's capacity, so a segment sent within its credit always
fits, and a slow learner stops its actors instead of filling memory. Called by `sessions`, which takes credit back.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def grant_credit(open_credit: Mapping[K, int], queued: int, capacity: int, max_credits: int) -> dict[K, int]:
    """How many more segments each session may send; `open_credit` is its present credit.

    Sessions with the least credit come first, equal ones in the order of `open_credit`. A session is topped up only
    when half of its window is used, since not every freed slot is worth a message. The window is a quarter of an equal
    share of the queue, at least 1 and at most `max_credits`: later sessions must find some left before unused credit
    lapses.
    """
    grants: dict[K, int] = {}
    if not open_credit:
        return grants
    free = capacity - queued - sum(open_credit.values())
    window = max(1, min(max_credits, capacity // (4 * len(open_credit))))
    needy = [(session, credit) for session, credit in open_credit.items() if credit <= window // 2]
    for session, credit in sorted(needy, key=lambda each: each[1]):
        if free <= 0:
            break
        grants[session] = min(window - credit, free)
        free -= grants[session]
    return grants


def grant_round_credit(open_credit: Mapping[K, int], num_missing: int, max_credits: int) -> dict[K, int]:
    """The same where actors pause between batches: credit for the `num_missing` segments of this batch, and no more.

    `open_credit` is what each session may still send of this batch. Segments are shared out one by one, each to a
    session with the least credit; of equal ones, the first in the order of `open_credit`.
    """
    grants: dict[K, int] = {}
    waiting = [(credit, order, session) for order, (session, credit) in enumerate(open_credit.items())]
    heapq.heapify(waiting)
    for _ in range(num_missing):
        if not waiting or waiting[0][0] >= max_credits:
            break
        credit, order, session = waiting[0]
        grants[session] = grants.get(session, 0) + 1
        heapq.heapreplace(waiting, (credit + 1, order, session))
    return grants
