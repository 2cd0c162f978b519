"""Who may enter a gateway over real sockets on loopback, and who comes back."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
import zmq

from loop.gateway_asking import Raw, client
from rl_setting import EXPERIENCE, TOKEN, Parts, segment, serving
from shoal.actor import ActorClient
from shoal.errors import ConfigError, ConnectionLost, Refused
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.zmq_listener import MAX_UNREAD_MESSAGES, bind_router
from shoal.rl.spec import GatewaySpec
from shoal.wire import pack_segment
from shoal.wire.messages import ErrorMessage, Hello
from waiting import wait_for


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


def test_a_connection_may_have_only_a_few_messages_waiting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, _ = bind_router(context, GatewaySpec())
    try:
        assert socket.getsockopt(zmq.RCVHWM) == MAX_UNREAD_MESSAGES <= 16
    finally:
        socket.close()
        context.term()


def test_a_wrong_protocol_version_is_refused() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.say(Hello(99, TOKEN, "one", 1))
        error = raw.hear(ErrorMessage)
        assert isinstance(error, ErrorMessage)
        assert (error.code, error.fatal) == ("bad_version", True)
        assert "protocol 1" in error.message


def test_the_protocol_version_is_decided_before_any_other_field() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.socket.send(msgpack.packb({"kind": "hello", "protocol": 2, "token": b"other", "actor": {}}))
        error = raw.hear(ErrorMessage)
        assert isinstance(error, ErrorMessage)
        assert (error.code, error.fatal) == ("bad_version", True)
        assert "not 2" in error.message


@pytest.mark.parametrize(("actor_id", "incarnation"), [("", 1), ("x" * 65, 1), ("one", -1), ("one", 2**63)])
def test_a_hello_out_of_range_is_refused(actor_id: str, incarnation: int) -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.say(Hello(1, TOKEN, actor_id, incarnation))
        error = raw.hear(ErrorMessage)
        assert isinstance(error, ErrorMessage)
        assert error.code == "malformed"


def test_nothing_is_accepted_before_hello() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.socket.send_multipart(pack_segment(segment(), 0))
        error = raw.hear(ErrorMessage)
        assert isinstance(error, ErrorMessage)
        assert error.code == "hello_required"
        assert parts.ledger.get_totals().received == 0


def test_a_new_incarnation_takes_over_and_the_old_one_is_told() -> None:
    with serving() as parts, Raw(parts) as old, Raw(parts) as new:
        old.enter("twin", 5)
        old.send(0, segment())
        assert new.enter("twin", 6).next_seq == 0
        error = old.hear(ErrorMessage)
        assert isinstance(error, ErrorMessage)
        assert (error.code, error.fatal) == ("superseded", True)
        with Raw(parts) as late:
            late.say(Hello(1, TOKEN, "twin", 5))
            error = late.hear(ErrorMessage)
            assert isinstance(error, ErrorMessage)
            assert error.code == "stale_incarnation"
        assert parts.ledger.get_account(("twin", 5)).received == 1
        assert parts.ledger.get_account(("twin", 6)).received == 0


def test_the_same_incarnation_comes_back_where_it_was() -> None:
    with serving() as parts, Raw(parts) as before, Raw(parts) as after:
        before.enter("one", 5)
        before.send(0, segment())
        before.send(1, segment())
        assert after.enter("one", 5).next_seq == 2
        assert after.send(1, segment()).status == "duplicate"
        assert after.send(2, segment()).status == "accepted"
        assert len(parts.gateway.stats()["actors"]) == 1


def test_an_encrypted_gateway_serves_who_knows_its_key_and_nobody_else() -> None:
    public, secret = zmq.curve_keypair()
    parts = Parts()
    spec = GatewaySpec(curve=True)
    with pytest.raises(ConfigError, match="curve_keys"):
        GatewaySetting(spec, EXPERIENCE, TOKEN)
    gateway = Gateway(GatewaySetting(spec, EXPERIENCE, TOKEN, curve_keys=(public, secret)), parts.queue, parts.store)
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
        GatewaySetting(parts.spec, EXPERIENCE, "")
