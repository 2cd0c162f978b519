"""Who may send how much: the policy of flow control, as one pure function.

Promise: what is queued plus what may still be on its way never exceeds the queue's capacity, so an accepted credit
always finds room, and a learner that is slow stops its actors instead of filling memory. Called by the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def grant_credit(open_credit: Mapping[K, int], queued: int, capacity: int, max_credits: int) -> dict[K, int]:
    """How many more segments each session may send: `open_credit` is what each may send already.

    The poorest come first, in the order of `open_credit` where they are equally poor. A session is topped up only when
    half of its window is used, since not every freed place is worth a message. The window is a quarter of an equal
    share of the queue, at least 1 and at most `max_credits`: credit cannot be taken back, so those who come later must
    find some left although others sit on theirs.
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
