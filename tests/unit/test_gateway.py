"""The gateway over real sockets on loopback, without a learner: who may enter, what is accepted, how room is shared."""

from __future__ import annotations

import socket as network
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import zmq

from rl_setting import EXPERIENCE, TOKEN, Parts, segment, serving, weights
from shoal.actor import ActorClient
from shoal.errors import ConfigError, ConnectionLost, Refused
from shoal.rl.gateway import Gateway
from shoal.rl.listener import UNREAD_MESSAGES, listen
from shoal.rl.progress import MAX_GONE_ACTORS, REFUSALS_INTERVAL_S, Progress, Roster
from shoal.rl.queue import BatchRequest
from shoal.rl.spec import GatewaySpec, RLSpec, experience_spec
from shoal.wire import DropReason, Limits, Segment, decode, encode, pack_segment
from shoal.wire.messages import Ack, Error, Hello, Message, Ping, Pong, SegmentMessage, Welcome
from waiting import wait_for


class Raw:
    """A DEALER socket that says what it is told to."""

    def __init__(self, parts: Parts) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(parts.address)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def hear(self, kind: type, timeout_s: float = 5.0) -> Message:
        """The next message of this kind; others are passed over."""
        while self.socket.poll(int(timeout_s * 1000)):
            message = decode(self.socket.recv_multipart(), Limits())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def enter(self, actor_id: str = "raw", incarnation: int = 1) -> Welcome:
        self.say(Hello(1, TOKEN, actor_id, incarnation))
        welcome = self.hear(Welcome)
        assert isinstance(welcome, Welcome)
        return welcome

    def send(self, seq: int, value: Segment) -> Ack:
        self.socket.send_multipart(pack_segment(value, seq))
        ack = self.hear(Ack)
        assert isinstance(ack, Ack)
        return ack


def client(parts: Parts, actor_id: str = "one", **options: object) -> ActorClient:
    return ActorClient(parts.address, TOKEN, actor_id, timeout_s=5.0, **options)  # type: ignore[arg-type]


# -- who may enter ------------------------------------------------------------------------------------------------


def test_an_actor_is_welcomed_with_the_spec_and_gets_the_weights() -> None:
    with serving() as parts, client(parts) as actor:
        assert actor.spec == EXPERIENCE
        assert actor.run_id == "run-1"
        version, arrays = actor.wait_for_weights()
        assert version == 1
        np.testing.assert_array_equal(arrays["policy.0.weight"], np.ones((2, 4)))


def test_a_wrong_token_is_refused_and_counted() -> None:
    with serving() as parts:
        with (
            pytest.raises(Refused, match="bad_token"),
            ActorClient(parts.address, "guess", "one", timeout_s=5),
        ):
            pass
        assert parts.gateway.stats()["protocol_errors"] == {"bad_token": 1}
        assert parts.gateway.stats()["actors"] == []


def test_a_flood_of_wrong_tokens_is_counted_and_leaves_the_other_events_alone() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter("honest")
        for number in range(1500):
            raw.say(Hello(1, "guess", f"guest {number}", 1))
        wait_for(lambda: parts.gateway.stats()["protocol_errors"].get("bad_token") == 1500)
        events = [(kind, details["actor_id"]) for _, kind, details in parts.gateway.take_events()]
        assert events == [("actor_joined", "honest"), ("actor_refused", "guest 0")]


def test_the_next_word_on_refusals_says_how_many_there_were() -> None:
    progress = Progress()
    for number in range(1, 8):
        progress.protocol_errors["bad_token"] = number
        progress.refused("guest")
    progress._refusals_told_at -= REFUSALS_INTERVAL_S
    progress.refused("guest")
    assert [details["count"] for _, _, details in progress.events] == [1, 7]


def test_a_connection_may_have_only_a_few_messages_waiting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, _ = listen(context, GatewaySpec())
    try:
        assert socket.getsockopt(zmq.RCVHWM) == UNREAD_MESSAGES <= 16
    finally:
        socket.close()
        context.term()


def test_a_wrong_protocol_version_is_refused() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.say(Hello(99, TOKEN, "one", 1))
        error = raw.hear(Error)
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("bad_version", True)
        assert "protocol 1" in error.message


@pytest.mark.parametrize(("actor_id", "incarnation"), [("", 1), ("x" * 65, 1), ("one", -1), ("one", 2**63)])
def test_a_hello_out_of_range_is_refused(actor_id: str, incarnation: int) -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.say(Hello(1, TOKEN, actor_id, incarnation))
        error = raw.hear(Error)
        assert isinstance(error, Error)
        assert error.code == "malformed"


def test_nothing_is_accepted_before_hello() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.socket.send_multipart(pack_segment(segment(), 0))
        error = raw.hear(Error)
        assert isinstance(error, Error)
        assert error.code == "hello_required"
        assert parts.ledger.totals().received == 0


def test_a_new_incarnation_takes_over_and_the_old_one_is_told() -> None:
    with serving() as parts, Raw(parts) as old, Raw(parts) as new:
        old.enter("twin", 5)
        old.send(0, segment())
        assert new.enter("twin", 6).next_seq == 0
        error = old.hear(Error)
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("superseded", True)
        with Raw(parts) as late:
            late.say(Hello(1, TOKEN, "twin", 5))
            error = late.hear(Error)
            assert isinstance(error, Error)
            assert error.code == "stale_incarnation"
        assert parts.ledger.account(("twin", 5)).received == 1
        assert parts.ledger.account(("twin", 6)).received == 0


def test_the_same_incarnation_comes_back_where_it_was() -> None:
    with serving() as parts, Raw(parts) as before, Raw(parts) as after:
        before.enter("one", 5)
        before.send(0, segment())
        before.send(1, segment())
        assert after.enter("one", 5).next_seq == 2
        assert after.send(1, segment()).status == "duplicate"
        assert after.send(2, segment()).status == "accepted"
        assert len(parts.gateway.stats()["actors"]) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_a_host_beyond_loopback_needs_encryption(host: str) -> None:
    with pytest.raises(ConfigError, match="curve=true"):
        GatewaySpec.parse({"host": host})
    assert GatewaySpec.parse({"host": host, "curve": True}).curve


def test_an_encrypted_gateway_serves_who_knows_its_key_and_nobody_else() -> None:
    public, secret = zmq.curve_keypair()
    parts = Parts()
    spec = GatewaySpec(curve=True)
    with pytest.raises(ConfigError, match="curve_keys"):
        Gateway(spec, EXPERIENCE, parts.queue, parts.store, TOKEN)
    gateway = Gateway(spec, EXPERIENCE, parts.queue, parts.store, TOKEN, curve_keys=(public, secret))
    gateway.start()
    try:
        with ActorClient(gateway.address, TOKEN, "one", server_key=public.decode(), timeout_s=5) as actor:
            assert actor.wait_for_weights()[0] == 1
        with pytest.raises(ConnectionLost), ActorClient(gateway.address, TOKEN, "two", timeout_s=0.5):
            pass
    finally:
        gateway.close()


def test_a_gateway_without_a_token_does_not_start() -> None:
    parts = Parts()
    with pytest.raises(ConfigError, match="token"):
        Gateway(parts.spec, EXPERIENCE, parts.queue, parts.store, "")


def test_actions_that_do_not_count_from_zero_are_refused() -> None:
    box, spec = gymnasium.spaces.Box(-1, 1, (4,)), RLSpec()
    assert experience_spec(box, gymnasium.spaces.Discrete(3), spec).action.high == 2
    with pytest.raises(ConfigError, match="starts at 1"):
        experience_spec(box, gymnasium.spaces.Discrete(3, start=1), spec)


# -- what is accepted ---------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Segment], DropReason, str]] = {
    "nan": (
        lambda: segment(rewards=np.array([1.0, np.nan], np.float32), **_two()),
        DropReason.NON_FINITE,
        "rewards",
    ),
    "inf": (lambda: segment(2, observations=np.full((3, 4), np.inf, np.float32)), DropReason.NON_FINITE, "observ"),
    "dtype": (lambda: segment(2, observations=np.zeros((3, 4), np.float64)), DropReason.INVALID_DTYPE, "float32"),
    "shape": (lambda: segment(2, observations=np.zeros((3, 5), np.float32)), DropReason.INVALID_SHAPE, "[3, 4]"),
    "too few": (lambda: segment(2, observations=np.zeros((2, 4), np.float32)), DropReason.INVALID_SHAPE, "[3, 4]"),
    "range": (lambda: segment(2, actions=np.array([0, 2])), DropReason.INVALID_RANGE, "above 1"),
    "low": (lambda: segment(2, observations=np.full((3, 4), -11, np.float32)), DropReason.INVALID_RANGE, "below -10"),
    "log-probability": (
        lambda: segment(2, log_probabilities=np.array([-1.0, 0.5], np.float32)),
        DropReason.INVALID_RANGE,
        "log_probabilities",
    ),
    "too long": (lambda: segment(17), DropReason.INVALID_SHAPE, "≤ 16"),
    "version of the future": (lambda: segment(2, version=99), DropReason.INVALID_RANGE, "never published"),
    "version zero": (lambda: segment(2, version=0), DropReason.INVALID_RANGE, "below 1"),
}


def _two() -> dict[str, object]:
    whole = segment(2)
    return {name: getattr(whole, name) for name in ("observations", "actions", "log_probabilities", "versions")}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_segment_is_dropped_with_its_reason_and_the_next_good_one_accepted(name: str) -> None:
    make, reason, words = BAD[name]
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        ack = raw.send(0, make())
        assert (ack.status, ack.reason) == ("dropped", reason.value)
        assert words in ack.detail
        assert raw.send(1, segment()).status == "accepted"
        account = parts.ledger.account(("raw", 1))
        assert account.dropped == {reason.value: 1}
        assert (account.received, account.queued) == (2, 1)


def test_frames_that_do_not_fit_their_header_are_dropped_as_malformed() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        frames = pack_segment(segment(), 0)
        raw.socket.send_multipart([*frames[:-1], frames[-1][:-3]])
        ack = raw.hear(Ack)
        assert isinstance(ack, Ack)
        assert (ack.status, ack.reason) == ("dropped", "malformed")


def test_a_duplicate_is_acknowledged_and_trained_on_once() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        assert [raw.send(0, segment()).status for _ in range(3)] == ["accepted", "duplicate", "duplicate"]
        account = parts.ledger.account(("raw", 1))
        assert (account.received, account.queued, account.duplicates) == (1, 1, 2)


def test_a_gap_in_the_sequence_is_refused_with_the_number_that_was_expected() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        raw.socket.send_multipart(pack_segment(segment(), 3))
        error = raw.hear(Error)
        assert isinstance(error, Error)
        assert error.code == "sequence_gap"
        assert "0 was expected" in error.message
        assert parts.ledger.totals().received == 0


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


def test_unknown_kinds_are_answered_and_the_session_goes_on() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        raw.socket.send(b"\x81\xa4kind\xa6teapot")
        error = raw.hear(Error)
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("unknown_kind", False)
        raw.say(SegmentMessage(0, ()))
        ack = raw.hear(Ack)
        assert isinstance(ack, Ack)
        assert ack.reason == "malformed"
        raw.say(Ping(17))
        pong = raw.hear(Pong)
        assert isinstance(pong, Pong)
        assert pong.nonce == 17


# -- room, weights, liveness --------------------------------------------------------------------------------------


def test_a_full_queue_stops_the_actor_and_room_lets_it_go_on() -> None:
    with serving(queue_capacity=4) as parts, client(parts) as actor:
        for _ in range(4):
            actor.send(segment())
        with pytest.raises(ConnectionLost, match="credit"):
            actor.send(segment(), timeout_s=0.3)
        assert len(parts.queue) == 4
        parts.queue.take("learner", BatchRequest(2, 2, 2, 1))
        actor.send(segment(), timeout_s=5)
        assert actor.drain(5)
        assert actor.acknowledged["dropped"] == 0


def test_what_is_sent_beyond_the_limit_is_dropped_and_counted() -> None:
    with serving(queue_capacity=2) as parts, Raw(parts) as raw:
        raw.enter()
        statuses = [raw.send(seq, segment()).status for seq in range(3)]
        assert statuses == ["accepted", "accepted", "dropped"]
        assert parts.ledger.account(("raw", 1)).dropped == {"over_credit": 1}


def test_an_actor_that_waits_for_room_gets_credit_when_another_leaves() -> None:
    with serving(queue_capacity=2, heartbeat_s=0.1, timeout_s=0.6) as parts, Raw(parts) as first:
        first.enter("first")
        first.send(0, segment())  # one place is taken, and the other promised to the first one
        with client(parts, "second") as second:
            with pytest.raises(ConnectionLost, match="credit"):
                second.send(segment(), timeout_s=0.1)
            second.send(segment(), timeout_s=10)  # the first one, silent, is given up meanwhile
            assert second.drain(5)


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
        wait_for(lambda: _connected(parts) == {"slow"}, timeout_s=10)  # its keeper thread pings; nothing else does
        kinds = [(kind, details["actor_id"]) for _, kind, details in parts.gateway.take_events()]
        assert ("actor_lost", "silent") in kinds
        assert ("actor_lost", "slow") not in kinds


def test_actors_that_leave_say_so() -> None:
    with serving() as parts:
        with client(parts):
            assert _connected(parts) == {"one"}
        wait_for(lambda: not _connected(parts))
        assert [kind for _, kind, _ in parts.gateway.take_events()] == ["actor_joined", "actor_left"]


def test_an_actor_that_left_does_not_lag() -> None:
    with serving() as parts:
        with client(parts, "gone") as actor:
            actor.send(segment())
            assert actor.drain(5)
        wait_for(lambda: not _connected(parts))
        with client(parts, "here"):
            parts.store.publish(weights(7))
            wait_for(lambda: parts.gateway.stats()["weights_version"] == 7)
            lags = {actor["actor_id"]: actor["lag"] for actor in parts.gateway.stats()["actors"]}
        assert lags == {"gone": 0, "here": 7}


def test_of_the_actors_that_left_only_the_last_ones_are_remembered() -> None:
    roster = Roster()
    here, back = ("here", 1), ("back", 1)
    roster.join(here)
    roster.join(back).steps = 5
    roster.leave(back)
    assert roster.join(back).steps == 5
    for number in range(MAX_GONE_ACTORS + 50):
        roster.join((f"guest {number}", 1))
        roster.leave((f"guest {number}", 1))
    names = [actor.actor_id for actor in roster]
    assert names == ["here", "back", *(f"guest {number}" for number in range(50, MAX_GONE_ACTORS + 50))]
    assert [actor.actor_id for actor in roster.forget_older(("guest 60", 2))] == ["guest 60"]
    assert roster.forget_older(("guest 0", 2)) == []


def test_closing_as_finished_tells_the_actors_that_the_run_is_over() -> None:
    with serving() as parts:
        actor = client(parts)
        actor.connect()
        parts.gateway.close(finished=True)
        parts.gateway.close()
        wait_for(lambda: actor.newer_weights(10**9) is None and actor.finished)
        actor.close()


def _connected(parts: Parts) -> set[str]:
    return {actor["actor_id"] for actor in parts.gateway.stats()["actors"] if actor["connected"]}


# -- coming back --------------------------------------------------------------------------------------------------


def test_a_gateway_that_died_is_found_where_it_was_and_gets_what_it_did_not_acknowledge(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        port = first.gateway.port
        actor = client(first)
        actor.connect()
        for _ in range(3):
            actor.send(segment())
        assert actor.drain(5)
        first.gateway.close()
        sender = threading.Thread(target=lambda: [actor.send(segment()) for _ in range(2)])
        sender.start()  # nobody is there
        with serving(tmp_path) as second:
            assert second.gateway.port == port
            sender.join(10)
            assert actor.drain(15)
            account = second.ledger.account((actor.actor_id, actor.incarnation))
            assert (account.received, account.queued) == (5, 2)
            assert account.dropped == {"shutdown": 3}
            assert actor.reconnects >= 1
            actor.close()


@contextmanager
def taken(port: int = 0) -> Iterator[int]:
    """A port on which something else listens."""
    with network.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


def test_a_port_of_before_that_another_process_has_taken_is_given_up_for_a_free_one(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        before = first.gateway.port
    with taken(before), serving(tmp_path) as second, client(second):
        assert second.gateway.port != before
        moved = second.gateway.port
    with serving(tmp_path) as third:
        assert third.gateway.port == moved


def test_a_port_that_was_asked_for_and_is_taken_is_named_with_what_to_do() -> None:
    with taken() as port:
        parts = Parts(port=port)
        with pytest.raises(ConfigError, match=r"end the process .*, choose another port, or 0"):
            parts.gateway.start()
        parts.gateway.close()
        parts.ledger.close()


def test_progress_is_solved_when_a_hundred_episodes_reach_the_target() -> None:
    with serving(queue_capacity=200) as parts, client(parts) as actor:
        for _ in range(99):
            actor.send(segment(2, terminated=True, episode_return=500.0, episode_length=500))
        assert actor.drain(10)
        assert parts.gateway.stats()["solved_s"] is None
        actor.send(segment(2, truncated=True, episode_return=480.0, episode_length=480))
        assert actor.drain(10)
        stats = parts.gateway.stats()
        assert stats["solved_s"] is not None
        assert (stats["episodes"], stats["steps"], stats["solved_steps"]) == (100, 200, 200)
        assert stats["mean_return"] == pytest.approx(499.8)


def test_a_gateways_next_life_goes_on_counting(tmp_path: Path) -> None:
    with serving(tmp_path) as first, client(first) as actor:
        actor.send(segment(2, terminated=True, episode_return=7.0, episode_length=2))
        assert actor.drain(5)
    with serving(tmp_path) as second, client(second, "two") as actor:
        actor.send(segment(3, terminated=True, episode_return=9.0, episode_length=3))
        assert actor.drain(5)
        stats = second.gateway.stats()
        assert (stats["steps"], stats["episodes"], stats["mean_return"]) == (5, 2, 8.0)
