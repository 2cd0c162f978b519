"""Replicas and the weight store are killed under load: every request gets an answer or a code, and service recovers."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from endpoint_process import Client, EndpointProcess, Load
from serving.faulty_models import FINE, HANG, SIGNATURE, factory, weights
from shoal.cluster.ingress.serve_environment import BUFFER_BYTES
from shoal.registry import Registry
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
HELD_S = 400.0
NUM_SMALL, NUM_LARGE = 8, 4
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    # A request that is held is in hand for as long as the test takes to see where it is: the survivor can be asked only
    # when the other one has been replaced, which takes a busy machine more than a minute.
    with EndpointProcess(answer_s=HELD_S, num_replicas=2, hang_s=HELD_S) as process:
        process.publish(1)
        wait_for(lambda: versions(process) == [1, 1], STATE_TIMEOUT_S)
        yield process


def versions(endpoint: EndpointProcess) -> list[int]:
    return [replica["version"] for replica in endpoint.stats()]


def pids(endpoint: EndpointProcess) -> set[int]:
    return {replica["pid"] for replica in endpoint.stats()}


def test_killing_one_of_two_replicas_loses_no_request_silently(endpoint: EndpointProcess) -> None:
    """Nor does it change who answers: the endpoint is pinned to a version that the run's store no longer has."""
    client = Client(endpoint.url)
    endpoint.publish(2)
    wait_for(lambda: versions(endpoint) == [2, 2], STATE_TIMEOUT_S)
    client.change(action="rollback", model="linear")
    endpoint.publish(3)
    before = pids(endpoint)
    victim = min(before)
    with Load(endpoint.url, num_clients=8) as load:
        wait_for(lambda: load.counts["answered"] > 200, STATE_TIMEOUT_S)
        os.kill(victim, signal.SIGKILL)
        at_kill = load.counts["answered"]
        wait_for(lambda: load.counts["answered"] > at_kill + 500, STATE_TIMEOUT_S)
        wait_for(lambda: len(now := recovered(endpoint)) == 2 and victim not in now, STATE_TIMEOUT_S)
        wait_for(lambda: versions(endpoint) == [1, 1], STATE_TIMEOUT_S)
        after_recovery = load.counts["answered"]
        wait_for(lambda: load.counts["answered"] > after_recovery + 200, STATE_TIMEOUT_S)
    assert load.versions == {1}
    client.change(action="promote", model="linear")
    wait_for(lambda: versions(endpoint) == [3, 3], STATE_TIMEOUT_S)
    client.close()
    assert [event for event in endpoint.command("events") if "linear" in event] == ["pin linear", "follow linear"]
    assert load.hung == 0
    # What the victim had in hand was asked of the other, and a small answer leaves a replica in one piece.
    assert list(load.counts) == ["answered"], load.surprises[:3]


def test_what_a_killed_replica_had_in_hand_is_asked_of_the_other(endpoint: EndpointProcess, tmp_path: Path) -> None:
    """As long as no byte of the answer was there. What is too large to be kept by HAProxy is a 503, to come again."""
    hold = tmp_path / "hold"
    hold.touch()
    Registry(endpoint.registry).register("faulty", weights(1), model=factory(str(hold)), signature=SIGNATURE)
    client = Client(endpoint.url)
    status, _, body = client.request("POST", "/v2/repository/models/faulty/load", "{}")
    assert status == 200, body
    client.close()
    wait_for(lambda: both_are_asked(endpoint), STATE_TIMEOUT_S, "answer of each replica")
    with ThreadPoolExecutor(NUM_SMALL + NUM_LARGE) as pool, let_go(hold):
        small = [pool.submit(infer, endpoint) for _ in range(NUM_SMALL)]
        wait_for(lambda: sorted(in_hand(endpoint).values()) == [NUM_SMALL // 2] * 2, STATE_TIMEOUT_S)
        large = [pool.submit(infer, endpoint, padding=" " * BUFFER_BYTES) for _ in range(NUM_LARGE)]
        wait_for(lambda: sorted(in_hand(endpoint).values()) == [(NUM_SMALL + NUM_LARGE) // 2] * 2, STATE_TIMEOUT_S)
        victim = min(in_hand(endpoint))
        os.kill(victim, signal.SIGKILL)
        survivors = NUM_SMALL + NUM_LARGE // 2
        wait_for(lambda: survivors in in_hand(endpoint).values(), STATE_TIMEOUT_S)
        hold.unlink()
        assert [each.result(STATE_TIMEOUT_S) for each in small] == [(200, None)] * NUM_SMALL
        become = sorted(each.result(STATE_TIMEOUT_S) for each in large)
        assert become == [(200, None)] * (NUM_LARGE // 2) + [(503, "1")] * (NUM_LARGE // 2)
    wait_for(lambda: len(now := recovered(endpoint)) == 2 and victim not in now, STATE_TIMEOUT_S)
    wait_for(lambda: len(set(versions(endpoint))) == 1, STATE_TIMEOUT_S)


@contextmanager
def let_go(hold: Path) -> Iterator[None]:
    """What it holds at last, so that nobody waits for that when the block fails."""
    try:
        yield
    finally:
        hold.unlink(missing_ok=True)


def both_are_asked(endpoint: EndpointProcess) -> bool:
    """Ask once, of two replicas; has HAProxy by now passed requests to both? It hears of a new one after Serve does."""
    assert infer(endpoint, FINE) == (200, None)
    answered = [each["models"]["faulty"]["batcher"]["answered"] for each in endpoint.stats()]
    return len(answered) == 2 and all(answered)


def infer(endpoint: EndpointProcess, value: float = HANG, padding: str = "") -> tuple[int, str | None]:
    """The status of an answer to a row, by default to one that hangs, and when to come again."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 1.0]}
    client = Client(endpoint.url, HELD_S)
    status, headers, _ = client.request("POST", "/v2/models/faulty/infer", json.dumps({"inputs": [tensor]}) + padding)
    client.close()
    return status, headers["retry-after"]


def in_hand(endpoint: EndpointProcess) -> dict[int, int]:
    """By replica, how many requests of the faulty model it has taken in and not answered; of those that say so."""
    try:
        counts = {each["pid"]: each["models"]["faulty"]["batcher"] for each in endpoint.stats()}
    except (RuntimeError, KeyError):  # one of them has just died, or is not as far
        return {}
    return {pid: count["submitted"] - count["answered"] for pid, count in counts.items()}


def recovered(endpoint: EndpointProcess) -> set[int]:
    """The replicas that answer; while one is being replaced, asking all of them may fail."""
    try:
        return pids(endpoint)
    except RuntimeError:
        return set()


def test_killing_the_weight_store_stops_neither_answers_nor_new_weights(endpoint: EndpointProcess) -> None:
    with Load(endpoint.url, num_clients=4) as load:
        os.kill(endpoint.command("store_pid"), signal.SIGKILL)
        newest = max(versions(endpoint))
        endpoint.publish(newest + 1)
        wait_for(lambda: versions(endpoint) == [newest + 1] * 2, STATE_TIMEOUT_S)
        wait_for(lambda: newest + 1 in load.versions, STATE_TIMEOUT_S)
    assert load.hung == 0
    assert list(load.counts) == ["answered"], load.surprises[:3]


def test_a_store_that_forgot_is_told_again(endpoint: EndpointProcess) -> None:
    """Nothing new is published: the publisher itself notices, so that a replica started later finds weights."""
    newest, victim = max(versions(endpoint)), endpoint.command("store_pid")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: store_pid(endpoint) not in (0, victim), STATE_TIMEOUT_S)
    wait_for(lambda: endpoint.command("stored_version") == newest, STATE_TIMEOUT_S)


def store_pid(endpoint: EndpointProcess) -> int:
    """0 while the store is away."""
    try:
        return int(endpoint.command("store_pid"))
    except RuntimeError:
        return 0
