"""The queue between gateway and learner, the batch it hands out, and the sharing of its room as credit."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abandoned_ledgers import ledgers_may_stay_open  # noqa: F401
from rl_setting import segment
from shoal.errors import Closed, LedgerUnwritable
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.sessions import Session, Sessions, grant_credit
from waiting import start_thread, wait_for

pytestmark = pytest.mark.usefixtures("ledgers_may_stay_open")
A = ("a", 1)


def filled(capacity: int, *lengths: int) -> ExperienceQueue:
    queue = ExperienceQueue(capacity, Ledger())
    for seq, length in enumerate(lengths):
        assert queue.put(A, seq, segment(length, version=seq + 1))
    return queue


def test_a_full_queue_takes_nothing_and_counts_nothing() -> None:
    queue = filled(2, 3, 3)
    assert not queue.put(A, 2, segment())
    assert queue.ledger.get_account(A).received == 2


def test_a_batch_holds_the_oldest_segments_with_enough_steps() -> None:
    queue = filled(10, 4, 5, 6, 7)
    batch = queue.take("learner", BatchRequest(8, 8, 10, 0))
    assert batch is not None
    assert batch.lengths.tolist() == [4, 5]
    assert (batch.num_steps, len(batch.observations)) == (9, 11)
    assert batch.oldest_versions().tolist() == [1, 2]
    assert len(queue) == 2


def test_a_batch_is_limited_in_segments_and_a_smaller_one_comes_after_the_timeout() -> None:
    queue = filled(10, 4, 5, 6)
    first = queue.take("learner", BatchRequest(1000, 1000, 2, 0))
    rest = queue.take("learner", BatchRequest(1000, 1000, 2, 0.01))
    assert first is not None
    assert rest is not None
    assert (first.lengths.tolist(), rest.lengths.tolist()) == ([4, 5], [6])
    assert queue.take("learner", BatchRequest(1, 1, 2, 0.01)) is None


def test_who_is_patient_gets_enough_or_nothing() -> None:
    queue = filled(10, 4, 5)
    assert queue.take("learner", BatchRequest(10, 20, 10, 0, 1, is_patient=True)) is None
    assert len(queue) == 2
    batch = queue.take("learner", BatchRequest(9, 20, 10, 0, 2, is_patient=True))
    assert batch is not None
    assert batch.lengths.tolist() == [4, 5]


def test_a_learner_that_has_fallen_behind_gets_all_there_is_up_to_its_limit() -> None:
    batch = filled(10, 4, 5, 6, 7, 8).take(
        "learner", BatchRequest(min_steps=4, max_steps=20, max_segments=10, timeout_s=0)
    )
    assert batch is not None
    assert batch.lengths.tolist() == [4, 5, 6, 7]  # the segment that reaches the limit is the last


def test_take_waits_for_put() -> None:
    queue = filled(10)
    taken: list[ExperienceBatch | None] = []
    thread = start_thread(lambda: taken.append(queue.take("learner", BatchRequest(8, 8, 10, 10))))
    queue.put(A, 0, segment(4))
    queue.put(A, 1, segment(4))
    thread.join(10)
    assert taken[0] is not None
    assert taken[0].num_steps == 8


def test_a_request_that_was_given_up_takes_nothing_when_a_newer_one_waits() -> None:
    queue = filled(10)
    taken: dict[int, ExperienceBatch | None] = {}

    def take(number: int) -> None:
        taken[number] = queue.take("learner", BatchRequest(4, 4, 10, 10, number))

    threads = [threading.Thread(target=take, args=(number,)) for number in (1, 2)]
    threads[0].start()
    wait_for(lambda: queue._newest_take == ("learner", 1))
    threads[1].start()
    wait_for(lambda: queue._newest_take == ("learner", 2))
    for seq in range(2):  # `put` wakes one waiter: whichever it is, the older one must take nothing
        queue.put(A, seq, segment(4))
    for thread in threads:
        thread.join(15)
    assert taken[1] is None
    assert taken[2] is not None
    assert queue.ledger.get_account(A).queued == 2


def test_a_request_that_comes_after_a_newer_one_of_the_same_learner_leaves_its_batch_alone() -> None:
    """Both may wait for the lock while the gateway stalls, and get it in any order."""
    queue = filled(10, 4, 4)
    batch = queue.take("learner", BatchRequest(4, 4, 10, 0, number=6))
    assert batch is not None
    assert queue.take("learner", BatchRequest(4, 4, 10, 0, number=5)) is None
    assert queue.acknowledge(batch.lease_id, [None])
    assert (queue.ledger.get_account(A).consumed, len(queue)) == (1, 1)


def test_close_wakes_take_drops_the_rest_with_a_reason_and_refuses_more() -> None:
    queue = filled(10, 4, 4)
    results: list[object] = []
    thread = start_thread(lambda: results.append(queue.take("learner", BatchRequest(100, 100, 10, 30))))
    queue.close()
    queue.close()
    thread.join(10)
    assert results == [None]
    assert queue.ledger.get_account(A).dropped == {"shutdown": 2}
    with pytest.raises(Closed):
        queue.put(A, 2, segment())


def test_room_is_announced_after_a_batch_has_left() -> None:
    queue = filled(10, 4, 4)
    heard: list[int] = []
    queue.on_space_freed = lambda: heard.append(len(queue))
    queue.take("learner", BatchRequest(4, 4, 10, 0))
    assert heard == [1]


def test_select_keeps_whole_segments() -> None:
    batch = ExperienceBatch.from_segments(1, [segment(2, 1), segment(3, 5), segment(1, 9)])
    kept = batch.select(np.array([True, False, True]))
    assert kept.lengths.tolist() == [2, 1]
    assert kept.versions.tolist() == [1, 1, 9]
    assert len(kept.observations) == 5
    np.testing.assert_array_equal(kept.observations[3:], segment(1).observations)


@given(
    st.dictionaries(st.integers(), st.integers(0, 20), max_size=12),
    st.integers(0, 40),
    st.integers(1, 200),
    st.integers(1, 16),
)
def test_credit_never_promises_more_than_there_is_room(
    open_credit: dict[int, int], queued: int, capacity: int, max_credits: int
) -> None:
    grants = grant_credit(open_credit, queued, capacity, max_credits)
    promised = queued + sum(open_credit.values())
    assert all(grant > 0 for grant in grants.values())
    assert promised + sum(grants.values()) <= max(capacity, promised)
    for session, grant in grants.items():
        assert open_credit[session] + grant <= max_credits


def test_the_poorest_session_comes_first_and_one_place_is_always_given() -> None:
    assert grant_credit({"rich": 1, "poor": 0}, queued=4, capacity=6, max_credits=16) == {"poor": 1}
    assert grant_credit({"a": 0, "b": 0, "c": 0}, queued=0, capacity=2, max_credits=16) == {"a": 1, "b": 1}
    assert grant_credit({}, queued=0, capacity=2, max_credits=16) == {}


def test_who_comes_later_finds_credit_although_others_do_not_use_theirs() -> None:
    credit: dict[int, int] = {}
    for session in range(24):
        credit[session] = 0
        for _ in range(5):
            for other, grant in grant_credit(credit, queued=0, capacity=96, max_credits=16).items():
                credit[other] += grant
        assert credit[session] >= 1


def test_a_session_with_most_of_its_window_is_not_topped_up() -> None:
    assert grant_credit({"a": 9}, queued=0, capacity=100, max_credits=16) == {}
    assert grant_credit({"a": 8}, queued=0, capacity=100, max_credits=16) == {"a": 8}


def test_a_batch_comes_out_of_its_bytes_as_it_went_in() -> None:
    batch = ExperienceBatch.from_segments(7, [segment(3, version=2, terminated=True), segment(5)], position=9)
    again = ExperienceBatch.from_bytes(batch.to_bytes())
    assert (again.lease_id, again.position) == (7, 9)
    for name, array in vars(batch).items():
        if name not in ("lease_id", "position", "extras"):
            assert getattr(again, name).dtype == array.dtype
            np.testing.assert_array_equal(getattr(again, name), array)


def test_a_learner_that_is_slower_than_its_actors_leaves_none_of_them_waiting_for_ever() -> None:
    queue = ExperienceQueue(96, Ledger())
    sessions = Sessions(queue)
    for number in range(64):
        sessions[bytes([number])] = Session((f"a{number}", 1), ActorProgress(f"a{number}", 1), send_limit=0)
    for number in range(40):
        sessions.grant_credit(max_credits=16)
        for session in list(sessions.values()):
            for seq in range(queue.ledger.get_account(session.key).next_seq, session.send_limit):
                assert queue.put(session.key, seq, segment(1))
        assert queue.take("learner", BatchRequest(16, 16, 16, 0, number))
    received = [queue.ledger.get_account(session.key).received for session in sessions.values()]
    assert max(received) - min(received) <= 2


@pytest.mark.parametrize("length", [1, 3, 20, 256])
def test_a_batch_fills_whatever_the_lengths_of_segments_were_before(length: int) -> None:
    """Segments of 256 steps, and then shorter ones, while the learner waits for 64 steps."""
    queue = ExperienceQueue(2000, Ledger())
    sessions = Sessions(queue, steps_ahead=64)
    for number in range(2):
        sessions[bytes([number])] = Session((f"a{number}", 1), ActorProgress(f"a{number}", 1), 0)
    for seq in range(40):
        assert queue.put(("other", 1), seq, segment(256))
    assert queue.take("learner", BatchRequest(1, 10**6, 2000, 0.0, 1))
    queue.is_awaited = True
    for _ in range(200):
        sessions.grant_credit(max_credits=8)
        for session in sessions.values():
            seq = queue.ledger.get_account(session.key).next_seq
            if seq < session.send_limit:
                assert queue.put(session.key, seq, segment(length))
        if queue.num_steps >= 64:
            return
    raise AssertionError(f"{queue.num_steps} steps, and no credit")


@pytest.mark.parametrize(("length", "num_actors", "expected"), [(16, 2, 8), (2, 2, 64), (16, 12, 12), (100, 2, 2)])
def test_credit_is_paced_in_steps_and_leaves_one_segment_to_each_actor(
    length: int, num_actors: int, expected: int
) -> None:
    """128 steps ahead: 8 segments of 16, 64 of 2; two of 100 are more, but there are two actors."""
    queue = ExperienceQueue(200, Ledger())
    for seq in range(40):
        assert queue.put(("a0", 1), seq, segment(length))
    queue.take("learner", BatchRequest(1, 10**6, 200, 0.0, 1))
    sessions = Sessions(queue, steps_ahead=128)
    for number in range(num_actors):
        next_seq = queue.ledger.get_account((f"a{number}", 1)).next_seq
        sessions[bytes([number])] = Session((f"a{number}", 1), ActorProgress(f"a{number}", 1), next_seq)
    for _ in range(40):
        sessions.grant_credit(max_credits=100)
    assert sessions.count_free() + sum(sessions.compute_open_credit().values()) == expected
    assert all(sessions.compute_open_credit().values())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["send", "send", "send", "wait", "take"]), st.integers(0, 7)), max_size=80))
def test_lapsed_credit_never_promises_more_than_there_is_room(moves: list[tuple[str, int]]) -> None:
    """Each segment that is sent within the limit is queued, or its actor keeps it and begins another session."""
    queue = ExperienceQueue(6, Ledger())
    sessions = Sessions(queue)

    def begin(number: int) -> None:
        sessions.remove(bytes([number]))
        next_seq = queue.ledger.get_account((f"a{number}", 1)).next_seq
        sessions[bytes([number])] = Session((f"a{number}", 1), ActorProgress(f"a{number}", 1), next_seq)

    for number in range(8):
        begin(number)
    for turn, (move, number) in enumerate(moves):
        sessions.grant_credit(max_credits=4)
        assert len(queue) + sum(sessions.compute_open_credit().values()) <= queue.capacity
        session = sessions[bytes([number])]
        seq = queue.ledger.get_account(session.key).next_seq
        if move == "wait":
            session.credit_at -= 10.0
        elif move == "take":
            queue.take("learner", BatchRequest(1, 3, 3, 0.0, turn))
        elif seq < session.send_limit:
            if sessions.claim_slot(bytes([number]), seq):
                assert queue.put(session.key, seq, segment(1))
            else:
                begin(number)
    queue.ledger.close()


def test_an_actor_whose_segment_found_no_slot_keeps_the_next_one_until_it_sends() -> None:
    """Though its way is long: otherwise the segment could be turned away again and again."""
    queue = filled(2, 1, 1)
    sessions = Sessions(queue)
    key, progress = ("slow", 1), ActorProgress("slow", 1)
    sessions[b"first"] = Session(key, progress, send_limit=1)
    assert not sessions.claim_slot(b"first", 0)
    sessions.remove(b"first")
    sessions[b"second"] = Session(key, progress, send_limit=0)
    queue.take("learner", BatchRequest(1, 1, 1, 0.0))
    sessions.grant_credit(max_credits=1)
    sessions[b"second"].credit_at -= 60.0
    sessions.grant_credit(max_credits=1)
    assert sessions.compute_open_credit() == {b"second": 1}
    assert sessions.claim_slot(b"second", 0)
    sessions[b"second"].send_limit += 1
    sessions[b"second"].credit_at -= 60.0
    sessions.grant_credit(max_credits=1)
    assert sessions.compute_open_credit() == {}
    queue.ledger.close()


def test_a_batch_that_the_ledger_cannot_note_stays_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = filled(4, 2, 3)
    monkeypatch.setattr("shoal.rl.experience.queue.UNWRITABLE_PAUSE_S", 0.0)

    def refuse() -> None:
        raise LedgerUnwritable("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(queue.ledger, "commit", refuse)
        assert queue.take("learner", BatchRequest(1, 9, 9, 0.0, 1)) is None
        assert len(queue) == 2
    batch = queue.take("learner", BatchRequest(5, 9, 9, 0.0, 2))
    assert batch is not None
    assert batch.lengths.tolist() == [2, 3]
    assert queue.acknowledge(batch.lease_id, [None, None])
    totals = queue.ledger.get_totals()
    assert (totals.consumed, totals.queued, totals.is_balanced) == (2, 0, True)
