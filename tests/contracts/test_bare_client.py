"""A client written from docs/protocol.md alone works with the real gateway: the page is enough."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bare_client
import numpy as np
import pytest
from bare_client import BareClient, Refused, pack_tensor

from rl_setting import EXPERIENCE, TOKEN, Parts, serving, weights
from shoal.actor import MlpPolicy
from shoal.rl.experience.queue import BatchRequest
from waiting import wait_for

Tensors = list[tuple[dict[str, Any], bytes]]


def tensors(num_steps: int = 3, version: int = 1, log_probabilities: list[float] | None = None) -> Tensors:
    """The five tensors of a valid segment."""
    return [
        pack_tensor("observations", "float32", [num_steps + 1, 4], [0.5] * 4 * (num_steps + 1)),
        pack_tensor("actions", "int64", [num_steps], [1] * num_steps),
        pack_tensor("rewards", "float32", [num_steps], [1.0] * num_steps),
        pack_tensor("log_probabilities", "float32", [num_steps], log_probabilities or [-0.7] * num_steps),
        pack_tensor("versions", "int64", [num_steps], [version] * num_steps),
    ]


@contextmanager
def joined(
    address: str, actor_id: str = "robot", incarnation: int = 1, token: str = TOKEN, key: bytes = b""
) -> Iterator[BareClient]:
    client = BareClient(address, token, actor_id, incarnation, key)
    try:
        client.connect()
        yield client
    finally:
        client.close()


def book(parts: Parts) -> dict[str, Any]:
    return parts.ledger.get_totals().to_dict()


def statuses(client: BareClient) -> list[str]:
    return [ack["status"] for ack in client.acks]


# -- independence -----------------------------------------------------------------------------------------------------


def test_the_bare_client_imports_nothing_of_the_platform() -> None:
    tree = ast.parse(Path(bare_client.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name not in sys.stdlib_module_names} == {"msgpack", "zmq"}


# -- playing ----------------------------------------------------------------------------------------------------------


def test_it_acts_as_the_platform_s_own_policy_does() -> None:
    rng = np.random.default_rng(3)
    with serving() as parts, joined(parts.address) as client:
        client.wait_for_weights(0)
        policy = MlpPolicy(EXPERIENCE.policy)
        policy.load(1, weights(1).tensors())
        for observation in rng.normal(size=(20, 4)).astype(np.float32):
            action, log_probability = client.act(observation.tolist(), random.Random(1))
            ours = [policy.act(observation) for _ in range(40)]
            assert log_probability == pytest.approx(dict(ours).get(action, log_probability), abs=1e-6)


def test_segments_are_acknowledged_and_counted() -> None:
    with serving() as parts, joined(parts.address) as client:
        assert client.welcome["run_id"] == "run-1"
        for number in range(5):
            assert client.send_segment({}, tensors(num_steps=number + 1)) == number
        client.wait_for_acks()
        assert [ack["seq"] for ack in client.acks] == [0, 1, 2, 3, 4]
        assert statuses(client) == ["accepted"] * 5
        assert (book(parts)["received"], book(parts)["queued"]) == (5, 5)


def test_an_open_pull_brings_newer_weights_and_skips_those_in_between() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.wait_for_weights(0)
        for version in (2, 3, 9):
            parts.store.publish(weights(version))
        client.wait_for_weights(8)
        assert client.tensors["policy.0.weight"] == ([2, 4], [9.0] * 8)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_bad_segment_is_dropped_with_a_reason_and_the_next_is_welcome() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.send_segment({}, tensors(log_probabilities=[-1.0, float("nan"), -1.0]))
        client.send_segment({}, tensors(version=7))
        client.send_segment({}, tensors()[1:])
        client.send_segment({}, tensors(num_steps=17))
        client.send_segment({}, [pack_tensor("future", "bool", [2], [True, False]), *tensors()])
        client.wait_for_acks()
        assert [ack["reason"] for ack in client.acks] == [
            "non_finite",
            "invalid_range",
            "invalid_frames",
            "invalid_shape",
            "",
        ]
        assert "log_probabilities" in client.acks[0]["detail"]
        assert book(parts)["balanced"]


def test_a_gap_is_refused_and_closed_by_reconnecting() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.num_sent = 1  # pretend: the first one never leaves
        client.send_segment({}, tensors())
        client.send_segment({}, tensors())
        assert client.wait_for_error()["code"] == "sequence_gap"
        client.wait_for_acks()
        assert (book(parts)["received"], book(parts)["duplicates"]) == (2, 0)


def test_what_was_on_its_way_when_the_connection_broke_is_counted_exactly_once() -> None:
    with serving() as parts, joined(parts.address) as client:
        for _ in range(3):
            client.send_segment({}, tensors())
        wait_for(lambda: book(parts)["received"] == 3, what="three segments in the book")
        client.drop_connection()
        client.connect()
        assert not client.kept, "welcome settles what was counted"
        client.send_segment({}, tensors())
        client.wait_for_acks()
        assert (client.acks[-1]["seq"], book(parts)["received"], book(parts)["duplicates"]) == (3, 4, 0)


def test_it_starts_anew_when_another_run_answers_on_the_same_port() -> None:
    with serving() as parts:
        port = parts.gateway.port
        client = BareClient(parts.address, TOKEN, "robot", 1)
        client.connect()
        client.wait_for_weights(0)
        client.send_segment({}, tensors())
        client.wait_for_acks()
    other = Parts(port=port)
    other.gateway._handshake.run_id = "run-2"
    other.gateway.start()
    client.wait_for_bye()
    client.wait_for_weights(0)
    assert client.welcome["run_id"] == "run-2"
    assert client.send_segment({}, tensors()) == 0
    client.wait_for_acks()
    client.close()
    other.gateway.close()
    assert book(other)["received"] == 1


def test_credit_holds_it_back_and_lets_it_go_on() -> None:
    with serving(queue_capacity=4) as parts, joined(parts.address) as client:
        for _ in range(8):
            client.send_segment({}, tensors())
        client.wait_for_acks_of(4)
        assert (client.num_sent, len(client.kept), client.send_limit) == (0, 4, 4)
        parts.queue.take("learner", BatchRequest(1000, 1000, 4, 1.0))
        client.wait_for_acks()
        assert statuses(client) == ["accepted"] * 8


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_older_incarnation_is_fatal_and_so_is_being_superseded() -> None:
    with serving() as parts, joined(parts.address, incarnation=1) as old, joined(parts.address, incarnation=2) as new:
        with pytest.raises(Refused, match="superseded"):
            old.wait_for_bye()
        with pytest.raises(Refused, match="stale_incarnation"):
            old.connect()
        assert new.welcome["next_seq"] == 0


@pytest.mark.parametrize(
    ("header", "num_frames", "code"),
    [
        ({"kind": "telepathy"}, 0, "unknown_kind"),
        ({"kind": "pull"}, 0, "malformed"),
        ({"kind": "ping", "nonce": 1.5}, 0, "malformed"),
        ({"kind": "credit", "send_limit": 99}, 0, "malformed"),
        ({"kind": "ping", "padding": "x" * 65536}, 0, "too_large"),
        ({"kind": "ping"}, 32, "too_large"),
        ({"kind": "hello", "protocol": 2, "token": TOKEN, "actor_id": "robot", "incarnation": 1}, 0, "bad_version"),
        ({"kind": "hello", "protocol": 1, "token": TOKEN, "actor_id": "", "incarnation": 1}, 0, "malformed"),
    ],
)
def test_an_error_is_answered_and_the_session_goes_on(header: dict[str, Any], num_frames: int, code: str) -> None:
    with serving() as parts, joined(parts.address) as client:
        client.post(header, *[b""] * num_frames)
        if code == "bad_version":
            with pytest.raises(Refused, match=code):
                client.wait_for_error()
        else:
            assert client.wait_for_error()["code"] == code
        client.post({"kind": "ping", "nonce": 2**63, "unknown": {"field": 1}})
        client.wait_for_pong(2**63)
        assert parts.gateway.stats()["protocol_errors"] == {code: 1}
