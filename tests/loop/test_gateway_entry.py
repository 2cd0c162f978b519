"""Who may enter a gateway over real sockets on loopback, and who comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq

from loop.gateway_asking import Raw
from rl_setting import EXPERIENCE, TOKEN, Parts, segment, serving
from shoal.actor import ActorClient
from shoal.errors import ConfigError, ConnectionLost, Refused
from shoal.rl.gateway.sessions import USERS_ACTOR_ID
from shoal.wire import encode
from shoal.wire.messages import ErrorMessage, Hello, Ping
from waiting import wait_for


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


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (Hello(99, TOKEN, "one", 1), "bad_version", "protocol 1"),
        # of a later protocol, whose other fields are of other types
        ({"kind": "hello", "protocol": 2, "token": b"other", "actor": {}}, "bad_version", "not 2"),
        (Hello(1, TOKEN, "", 1), "malformed", "actor_id"),
        (Hello(1, TOKEN, "x" * 65, 1), "malformed", "actor_id"),
        (Hello(1, TOKEN, "one", -1), "malformed", "incarnation"),
        (Hello(1, TOKEN, "one", 2**63), "malformed", "incarnation"),
        (Hello(1, TOKEN, USERS_ACTOR_ID, 2**62), "malformed", "is the endpoint's"),
        (Hello(1, TOKEN, "one", 1, inference="elsewhere"), "malformed", "inference"),
        (Ping(1), "hello_required", ""),
    ],
)
def test_what_does_not_begin_with_a_right_hello_is_refused_with_a_code(message: Any, code: str, words: str) -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.socket.send(encode(message) if not isinstance(message, dict) else msgpack.packb(message))
        error = raw.hear(ErrorMessage)
        assert (error.code, error.fatal) == (code, code == "bad_version")
        assert words in error.message


def test_a_new_incarnation_takes_over_and_the_old_one_is_told() -> None:
    with serving() as parts, Raw(parts) as old, Raw(parts) as new:
        old.enter("twin", 5)
        old.send(0, segment())
        assert new.enter("twin", 6).next_seq == 0
        error = old.hear(ErrorMessage)
        assert (error.code, error.fatal) == ("superseded", True)
        with Raw(parts) as late:
            late.say(Hello(1, TOKEN, "twin", 5))
            error = late.hear(ErrorMessage)
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
