"""An actor's outbox: what may be sent now, what is settled, and what a new session sends again."""

from __future__ import annotations

from rl_setting import segment
from shoal.actor.exchange import Outbox
from shoal.wire import PackedSegment


def filled(num_segments: int, send_limit: int) -> Outbox:
    outbox = Outbox()
    outbox.begin_session(0, send_limit)
    for _ in range(num_segments):
        outbox.add(PackedSegment.from_segment(segment()))
    return outbox


def numbers(outbox: Outbox) -> list[int]:
    return [seq for seq, _ in outbox.take_sendable()]


def test_nothing_is_sent_beyond_the_limit_and_nothing_twice() -> None:
    outbox = filled(5, send_limit=3)
    assert numbers(outbox) == [0, 1, 2]
    assert numbers(outbox) == []
    assert not outbox.has_credit
    outbox.raise_send_limit(2)
    outbox.raise_send_limit(6)
    assert numbers(outbox) == [3, 4]
    assert outbox.has_credit


def test_an_acknowledgement_settles_everything_before_it() -> None:
    outbox = filled(5, send_limit=5)
    numbers(outbox)
    outbox.acknowledge(2)
    outbox.acknowledge(1)
    assert len(outbox) == 2
    assert outbox.add(PackedSegment.from_segment(segment())) == 5


def test_a_new_session_sends_again_what_the_gateway_does_not_have_as_far_as_there_is_credit() -> None:
    outbox = filled(6, send_limit=6)
    numbers(outbox)
    outbox.begin_session(next_seq=2, send_limit=4)
    assert numbers(outbox) == [2, 3]
    assert outbox.next_seq == 6


def test_a_gateway_that_lost_its_record_gets_the_rest_under_its_own_numbers() -> None:
    outbox = filled(4, send_limit=4)
    numbers(outbox)
    outbox.acknowledge(1)
    outbox.begin_session(next_seq=0, send_limit=9)
    assert numbers(outbox) == [0, 1]
    assert outbox.next_seq == 2
