"""Who may enter a gateway over real sockets on loopback, who comes back, and which segments it accepts."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from loop.gateway_asking import Raw, client, connected
from rl_setting import EXPERIENCE, TOKEN, Parts, segment, serving, weights
from shoal.actor import ActorClient
from shoal.errors import ConfigError, ConnectionLost
from shoal.rl.experience.queue import BatchRequest
from shoal.rl.gateway import sessions
from shoal.rl.gateway.sessions import USERS_ACTOR_ID, grant_credit
from shoal.wire import DropReason, encode, pack_segment
from shoal.wire.messages import ErrorMessage, Hello, Ping, Welcome
from waiting import wait_for


def test_a_flood_of_wrong_tokens_is_counted_and_leaves_the_other_events_alone() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter("honest")
        for number in range(1500):
            raw.say(Hello(1, "guess", f"guest {number}", 1))
        wait_for(lambda: parts.gateway.stats()["protocol_errors"].get("bad_token") == 1500)
        events = [(kind, details["actor_id"]) for _, kind, details in parts.gateway.take_events()]
        assert events == [("actor_joined", "honest"), ("actor_refused", "guest 0")]


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (Hello(99, TOKEN, "one", 1), "bad_version", "protocol 1"),
        # of a later protocol, whose other fields are of other types
        ({"kind": "hello", "protocol": 2, "token": b"other", "actor": {}}, "bad_version", "not 2"),
        (Hello(1, "guess", "one", 1), "bad_token", "not the one"),
        (Hello(1, TOKEN, "", 1), "malformed", "actor_id"),
        (Hello(1, TOKEN, "x" * 65, 1), "malformed", "actor_id"),
        (Hello(1, TOKEN, "one", -1), "malformed", "incarnation"),
        (Hello(1, TOKEN, "one", 2**63), "malformed", "incarnation"),
        (Hello(1, TOKEN, "one", 1, acknowledged=2**64 - 1), "malformed", "acknowledged"),
        (Hello(1, TOKEN, USERS_ACTOR_ID, 2**62), "malformed", "is the endpoint's"),
        (Hello(1, TOKEN, "one", 1, inference="elsewhere"), "malformed", "inference"),
        (Ping(1), "hello_required", ""),
    ],
)
def test_what_does_not_begin_with_a_right_hello_is_refused_with_a_code(message: Any, code: str, words: str) -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.socket.send(encode(message) if not isinstance(message, dict) else msgpack.packb(message))
        error = raw.hear(ErrorMessage)
        assert (error.code, error.fatal) == (code, code in ("bad_version", "bad_token"))
        assert words in error.message


def test_an_actor_that_died_comes_back_as_a_new_incarnation_with_an_account_of_its_own() -> None:
    with serving() as parts, Raw(parts) as dead, Raw(parts) as again:
        for raw, incarnation in ((dead, 5), (again, 6)):
            assert raw.enter("phoenix", incarnation).next_seq == 0
            assert raw.send(0, segment()).status == "accepted"
        (actor,) = parts.gateway.stats()["actors"]
        assert (actor["incarnation"], actor["connected"]) == (6, True)
        assert [parts.ledger.get_account(("phoenix", each)).received for each in (5, 6)] == [1, 1]
        kinds = [kind for _, kind, _ in parts.gateway.take_events()]
        assert (kinds.count("actor_joined"), kinds.count("actor_restarted")) == (2, 1)


def test_an_encrypted_gateway_serves_who_knows_its_key_and_nobody_else() -> None:
    public, secret = zmq.curve_keypair()
    with pytest.raises(ConfigError, match="curve_keys"):
        Parts(curve=True)
    with serving(curve=True, setting={"curve_keys": (public, secret)}) as parts:
        with ActorClient(parts.address, TOKEN, "one", server_key=public.decode(), timeout_s=5) as actor:
            assert actor.spec == EXPERIENCE
            assert actor.wait_for_weights()[0] == 1
        with pytest.raises(ConnectionLost), ActorClient(parts.address, TOKEN, "two", timeout_s=0.5):
            pass
    with pytest.raises(ConfigError, match="token"):
        replace(parts.gateway.setting, token="")


def test_many_actors_that_come_at_once_share_the_credit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is welcomed by itself looks at all the others: 3,000 that come back took half a minute."""
    shared: list[int] = []

    def share(open_credit: dict[bytes, int], *words: int) -> dict[bytes, int]:
        shared.append(len(open_credit))
        return grant_credit(open_credit, *words)

    monkeypatch.setattr(sessions, "grant_credit", share)
    parts, said = Parts(), []
    parts.gateway._state.weights = parts.store.latest()
    monkeypatch.setattr(parts.gateway, "_send_all", lambda: said.extend(parts.gateway._send_queue.take(True)))
    for number in range(40):
        parts.gateway._handle_message(bytes([number]), Hello(1, TOKEN, f"actor-{number}", 1), ())
    parts.gateway._send_round()
    welcomes = [answer.message for answer in said]
    assert (len(welcomes), shared) == (40, [40])
    assert {type(welcome) for welcome in welcomes} == {Welcome}
    assert {welcome.send_limit for welcome in welcomes if isinstance(welcome, Welcome)} == {1}
    parts.gateway.close()
    parts.ledger.close()


def test_an_actor_that_waits_for_room_gets_credit_when_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LAPSE_S", 600.0)
    with serving(queue_capacity=2, heartbeat_s=0.1, timeout_s=0.6) as parts, Raw(parts) as first:
        first.enter("first")
        first.send(0, segment())  # one place is taken, and the other is the first one's
        with client(parts, "second") as second:
            with pytest.raises(ConnectionLost, match="credit"):
                second.send(segment(), timeout_s=0.1)
            second.send(segment(), timeout_s=60)  # the first one, silent, is given up meanwhile
            assert second.drain(60)


def test_actors_that_do_not_play_keep_none_from_playing() -> None:
    """Five times as many as the queue has places, and they were there first."""
    with serving(queue_capacity=8) as parts, ExitStack() as idle:
        for number in range(40):
            idle.enter_context(Raw(parts)).say(Hello(1, TOKEN, f"idle-{number}", 1))
        wait_for(lambda: len(connected(parts)) == 40)
        with client(parts, "busy") as actor:
            for _ in range(30):
                actor.send(segment(), timeout_s=60)
                if len(parts.queue) > 3:
                    assert parts.queue.take("learner", BatchRequest(1, 1000, 100, 0.0))
            assert actor.drain(60)
            assert (actor.acknowledged["accepted"], actor.drops) == (30, {})


def test_a_segment_whose_slot_others_have_is_kept_and_taken_later() -> None:
    """The credit of the idle actor has lapsed, which it does not know: it says hello, and waits like a new one."""
    with (
        serving(queue_capacity=4, max_credits=1) as parts,
        client(parts, "idle") as idle,
        client(parts, "busy") as busy,
    ):
        wait_for(lambda: parts.gateway._sessions._idle)
        assert idle.has_credit
        while len(parts.queue) < 4:
            parts.queue.put(("other", 1), 1 + len(parts.queue), segment())
        idle.send(segment())
        idle.drain(0.5)
        assert (len(idle._outbox), idle.reconnects, idle.has_credit) == (1, 1, False)
        assert parts.queue.take("learner", BatchRequest(1, 1000, 100, 0.0))
        assert idle.drain(60)
        busy.send(segment())
        assert busy.drain(60)
        assert idle.acknowledged == {"accepted": 1, "dropped": 0, "duplicate": 0}
        [reason] = [details["reason"] for _, kind, details in parts.gateway.take_events() if kind == "actor_left"]
        assert reason == "its credit has lapsed"


def test_an_event_names_who_waits_for_credit_and_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "CREDIT_WAIT_S", 0.1)
    with serving(queue_capacity=2) as parts, client(parts, "one") as actor, client(parts, "two"):
        for _ in range(2):
            actor.send(segment(), timeout_s=60)
        assert actor.drain(60)
        events: list[dict[str, object]] = []

        def take() -> bool:
            events.extend(details for _, kind, details in parts.gateway.take_events() if kind == "credit_exhausted")
            return bool(events)

        wait_for(take)
        [event] = events
        assert (event["queued"], event["capacity"], event["credit"]) == (2, 2, {})
        assert "one" in event["actors"]  # type: ignore[operator]


def test_newer_weights_come_by_themselves_and_only_the_newest() -> None:
    with serving() as parts, client(parts) as actor:
        assert actor.wait_for_weights()[0] == 1
        parts.store.publish(weights(2))
        assert actor.wait_for_weights(than=1)[0] == 2
        for version in range(3, 60):
            parts.store.publish(weights(version))
        wait_for(lambda: (actor.newer_weights(2) or (0,))[0] == 59)


def test_a_silent_actor_is_lost_and_a_slow_one_is_not() -> None:
    with serving(heartbeat_s=0.1, timeout_s=0.6) as parts, Raw(parts) as silent, client(parts, "slow"):
        silent.enter("silent")
        wait_for(lambda: connected(parts) == {"slow"})  # its keeper thread pings; nothing else does
        kinds = [(kind, details["actor_id"]) for _, kind, details in parts.gateway.take_events()]
        assert ("actor_lost", "silent") in kinds
        assert ("actor_lost", "slow") not in kinds


def test_an_actor_that_left_does_not_lag() -> None:
    with serving() as parts:
        with client(parts, "gone") as actor:
            actor.send(segment())
            assert actor.drain(60)
        wait_for(lambda: not connected(parts))
        with client(parts, "here"):
            parts.store.publish(weights(7))
            wait_for(lambda: parts.gateway.stats()["weights_version"] == 7)
            lags = {actor["actor_id"]: actor["lag"] for actor in parts.gateway.stats()["actors"]}
        assert lags == {"gone": 0, "here": 7}


# -- what is accepted, and what is dropped with which reason


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
