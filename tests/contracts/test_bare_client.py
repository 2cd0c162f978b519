"""A client written from docs/protocol.md alone works with the real gateway: the page is enough."""

from __future__ import annotations

import ast
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bare_client
import numpy as np
import pytest
import zmq
from bare_client import BareClient, Refused, pack_tensor

from rl_setting import EXPERIENCE, TOKEN, Parts, serving, weights
from shoal.actor import MlpPolicy
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import GatewaySpec, RLSpec
from shoal.weights import WeightStore
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


def test_a_learner_learns_from_it(tmp_path: Path) -> None:
    spec = RLSpec.parse({"segment_length": 16, "hidden": [], "learner": {"batch_steps": 64, "publish_interval_s": 0}})
    loop = LocalLoop(spec, EXPERIENCE, tmp_path / "run", TOKEN)
    noise = random.Random(5)
    give_up = time.monotonic() + 30
    with loop, joined(loop.address) as client:
        client.wait_for_weights(0)
        while client.version < 3 and time.monotonic() < give_up:
            acted = [client.act([0.5, 0.5, 0.5, 0.5], noise) for _ in range(16)]
            played = tensors(16, client.version, [log_probability for _, log_probability in acted])
            played[1] = pack_tensor("actions", "int64", [16], [action for action, _ in acted])
            client.send_segment({"terminated": True, "episode_return": 16, "episode_length": 16}, played)
            client.wait_for_acks()
        assert set(statuses(client)) == {"accepted"}
        assert loop.gateway.stats()["episodes"] == len(client.acks)
        loop.close()
        assert client.version >= 3
        assert loop.gateway.stats()["segments"]["consumed"] >= 8
        client.wait_for_bye()
        assert client.finished


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


def test_a_segment_sent_twice_is_counted_once() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.send_segment({}, tensors())
        header, frames = client.kept[0][1], client.kept[0][2]
        client.post({**header, "seq": 0}, *frames)
        client.wait_for_acks_of(2)
        assert statuses(client) == ["accepted", "duplicate"]
        assert (book(parts)["received"], book(parts)["duplicates"]) == (1, 1)


def test_a_gap_is_refused_and_closed_by_reconnecting() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.num_sent = 1  # pretend: the first one never leaves
        client.send_segment({}, tensors())
        client.send_segment({}, tensors())
        assert client.wait_for_error()["code"] == "sequence_gap"
        client.wait_for_acks()
        assert (book(parts)["received"], book(parts)["duplicates"]) == (2, 0)


def test_a_segment_that_an_error_names_is_discarded_and_those_behind_it_arrive() -> None:
    with serving() as parts, joined(parts.address) as client:
        client.send_segment({}, tensors())
        client.send_segment({"terminated": 1}, tensors())
        client.send_segment({}, tensors())
        assert client.wait_for_error()["seq"] == 1
        client.wait_for_acks()
        assert (client.next_seq, book(parts)["received"], book(parts)["duplicates"]) == (2, 2, 0)


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


def test_it_finds_a_gateway_that_was_restarted_and_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as parts:
        client = BareClient(parts.address, TOKEN, "robot", 1)
        client.connect()
        client.send_segment({}, tensors())
        client.wait_for_acks()
    with serving(tmp_path) as parts:
        client.send_segment({}, tensors())  # into the void: the connection is gone
        client.wait_for_acks()
        client.close()
        assert (client.next_seq, book(parts)["received"]) == (2, 2)
        assert book(parts)["dropped"] == {"shutdown": 1}


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


def test_sending_beyond_the_limit_is_dropped_and_the_sequence_goes_on() -> None:
    with serving(queue_capacity=2) as parts, joined(parts.address) as client:
        for _ in range(2):
            client.send_segment({}, tensors())
            client.wait_for_acks()
        client.send_limit = 3
        client.send_segment({}, tensors())
        client.wait_for_acks()
        assert [ack["reason"] for ack in client.acks] == ["", "", "over_credit"]
        assert book(parts)["dropped"] == {"over_credit": 1}


def test_coming_back_to_a_full_queue_drops_nothing() -> None:
    with serving(queue_capacity=2) as parts:
        with joined(parts.address, "slow") as slow:
            slow.post({"kind": "bye"})
            slow.send_limit = 0  # what it plays now stays with it
            slow.send_segment({}, tensors())
            slow.send_segment({}, tensors())
            with joined(parts.address, "busy") as busy:
                busy.send_segment({}, tensors())
                busy.send_segment({}, tensors())
                busy.wait_for_acks()
                slow.connect()
                assert (slow.num_sent, slow.send_limit) == (0, 0), "the queue is full: welcome gives no credit"
            parts.queue.take("learner", BatchRequest(1000, 1000, 2, 1.0))
            slow.wait_for_acks()
            assert statuses(slow) == ["accepted"] * 2
        assert not book(parts)["dropped"]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_fatal() -> None:
    with serving() as parts, pytest.raises(Refused, match="bad_token"), joined(parts.address, token="guess"):
        pass


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


def test_curve_with_the_server_key_of_the_gateway() -> None:
    public, secret = zmq.curve_keypair()
    store, ledger = WeightStore(), Ledger()
    store.publish(weights(1))
    queue = ExperienceQueue(8, ledger)
    gateway = Gateway(
        GatewaySetting(GatewaySpec(curve=True), EXPERIENCE, TOKEN, curve_keys=(public, secret)), queue, store
    )
    gateway.start()
    try:
        with joined(gateway.address, key=public) as client:
            client.wait_for_weights(0)
            client.send_segment({}, tensors())
            client.wait_for_acks()
            assert statuses(client) == ["accepted"]
    finally:
        gateway.close()
        ledger.close()
