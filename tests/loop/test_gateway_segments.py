"""What a gateway accepts, and what it drops with which reason; over real sockets on loopback."""

import msgpack
import numpy as np
import pytest

from loop.gateway_asking import Raw
from rl_setting import segment, serving, weights
from shoal.wire import DropReason, pack_segment
from shoal.wire.messages import ErrorMessage
from waiting import wait_for


def test_who_sends_what_breaks_the_spec_is_told_of_once_for_each_reason() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        for seq in range(3):
            raw.send(seq, segment(2, version=99))
        raw.send(3, segment(17))
        (actor,) = parts.gateway.stats()["actors"]
        assert (actor["steps"], actor["invalid"]) == (0, {"invalid_range": 3, "invalid_shape": 1})
        told = [details for _, kind, details in parts.gateway.take_events() if kind == "invalid_segment"]
        assert [each["reason"] for each in told] == ["invalid_range", "invalid_shape"]
        assert told[0] == {
            "actor_id": "raw", "reason": "invalid_range", "detail": "versions: 99 was never published"
        }  # fmt: skip


def test_who_sends_what_only_the_learner_can_reject_is_named_too() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        for seq in range(2):
            raw.send(seq, segment())
        batch = parts.take(1, 10_000, 1_000, 10.0)
        parts.queue.acknowledge(batch.lease_id, [None, DropReason.NON_FINITE])
        wait_for(lambda: parts.gateway.stats()["actors"][0]["invalid"] == {"non_finite": 1})
        (told,) = [details for _, kind, details in parts.gateway.take_events() if kind == "invalid_segment"]
        assert (told["actor_id"], told["reason"]) == ("raw", "non_finite")
        assert "lower algorithm.learning_rate" in told["detail"]  # for then it is no actor's fault


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"terminated": 1}, "terminated"),
        ({"episode_length": 2.5}, "episode_length"),
        ({"seq": -1}, "counted from 0"),
        ({"seq": 5}, "segment 5 came, 0 was expected"),
    ],
)
def test_who_sends_nothing_but_bad_segments_is_seen(changes: dict[str, object], words: str) -> None:
    frames = pack_segment(segment(), 0)
    header = msgpack.packb({**msgpack.unpackb(frames[0]), **changes})
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        for _ in range(30):
            raw.socket.send_multipart([header, *frames[1:]])
            code = raw.hear(ErrorMessage).code
        (actor,) = parts.gateway.stats()["actors"]
        assert actor["invalid"] == {code: 30}
        (told,) = [details for _, kind, details in parts.gateway.take_events() if kind == "invalid_segment"]
        assert (told["actor_id"], told["reason"]) == ("raw", code)
        assert words in told["detail"]


def test_a_segment_that_comes_twice_counts_once_and_one_beyond_the_credit_is_dropped() -> None:
    with serving(queue_capacity=2) as parts, Raw(parts) as raw:
        raw.enter()
        assert [raw.send(seq, segment()).status for seq in (0, 0, 1)] == ["accepted", "duplicate", "accepted"]
        assert raw.send(2, segment()).reason == "over_credit"
        totals = parts.ledger.get_totals()
        assert (totals.received, totals.duplicates, totals.dropped) == (3, 1, {"over_credit": 1})


def test_experience_that_is_too_old_is_dropped_at_admission() -> None:
    with serving(max_version_lag=3) as parts, Raw(parts) as raw:
        raw.enter()
        parts.store.publish(weights(4))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 4)
        assert raw.send(0, segment(version=1)).status == "accepted"
        parts.store.publish(weights(5))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 5)
        mixed = segment(2, versions=np.array([1, 5]))  # the oldest step counts
        ack = raw.send(1, mixed)
        assert (ack.status, ack.reason) == ("dropped", "stale_admission")
        assert raw.send(2, segment(version=2)).status == "accepted"
