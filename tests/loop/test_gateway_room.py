"""How a gateway shares its room, passes on weights, tells who lives, and counts; over real sockets on loopback."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from loop.gateway_asking import Raw, client, connected
from rl_setting import TOKEN, Parts, segment, serving, weights
from shoal.errors import ConnectionLost
from shoal.rl.experience.queue import BatchRequest
from shoal.rl.gateway import sessions
from shoal.rl.gateway.sessions import grant_credit
from shoal.wire import MessageLimits, decode, encode
from shoal.wire.messages import Hello, Welcome
from waiting import wait_for


def test_a_full_queue_stops_the_actor_and_room_lets_it_go_on() -> None:
    with serving(queue_capacity=4) as parts, client(parts) as actor:
        for _ in range(4):
            actor.send(segment())
        with pytest.raises(ConnectionLost, match="credit"):
            actor.send(segment(), timeout_s=0.3)
        assert len(parts.queue) == 4
        parts.queue.take("learner", BatchRequest(2, 2, 2, 1))
        actor.send(segment(), timeout_s=60)
        assert actor.drain(60)
        assert actor.acknowledged["dropped"] == 0


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
        parts.gateway._handle_message(bytes([number]), [encode(Hello(1, TOKEN, f"actor-{number}", 1))])
    parts.gateway._send_round()
    welcomes = [decode([*answer.frames], MessageLimits()) for answer in said]
    assert (len(welcomes), shared) == (40, [40])
    assert {type(welcome) for welcome in welcomes} == {Welcome}
    assert {welcome.send_limit for welcome in welcomes if isinstance(welcome, Welcome)} == {1}
    parts.gateway.close()
    parts.ledger.close()


def test_what_is_sent_beyond_the_limit_is_dropped_and_counted() -> None:
    with serving(queue_capacity=2) as parts, Raw(parts) as raw:
        raw.enter()
        statuses = [raw.send(seq, segment()).status for seq in range(3)]
        assert statuses == ["accepted", "accepted", "dropped"]
        assert parts.ledger.get_account(("raw", 1)).dropped == {"over_credit": 1}


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
        assert (idle.num_unacknowledged, idle.reconnects, idle.has_credit) == (1, 1, False)
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


def test_closing_as_finished_tells_the_actors_that_the_run_is_over() -> None:
    with serving() as parts:
        actor = client(parts)
        actor.connect()
        parts.gateway.close(finished=True)
        parts.gateway.close()
        wait_for(lambda: actor.newer_weights(10**9) is None and actor.finished)
        actor.close()


def test_progress_is_solved_when_a_hundred_episodes_reach_the_target() -> None:
    with serving(queue_capacity=200) as parts, client(parts) as actor:
        for _ in range(99):
            actor.send(segment(2, terminated=True, episode_return=500.0, episode_length=500))
        assert actor.drain(60)
        assert parts.gateway.stats()["solved_s"] is None
        actor.send(segment(2, truncated=True, episode_return=480.0, episode_length=480))
        assert actor.drain(60)
        stats = parts.gateway.stats()
        assert stats["solved_s"] is not None
        assert (stats["episodes"], stats["steps"], stats["solved_steps"]) == (100, 200, 200)
        assert stats["mean_return"] == pytest.approx(499.8)
