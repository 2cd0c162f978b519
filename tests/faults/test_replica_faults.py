"""Replicas and the weight store are killed under load: every request gets an answer or a code, and service recovers."""

import os
import signal
from collections.abc import Iterator

import pytest

from endpoint_process import EndpointProcess, Load
from waiting import wait_for

STATE_TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    process = EndpointProcess(num_replicas=2)
    process.publish(1)
    wait_for(lambda: versions(process) == [1, 1], STATE_TIMEOUT_S)
    yield process
    process.close()


def versions(endpoint: EndpointProcess) -> list[int]:
    return [replica["version"] for replica in endpoint.stats()]


def pids(endpoint: EndpointProcess) -> set[int]:
    return {replica["pid"] for replica in endpoint.stats()}


def test_killing_one_of_two_replicas_loses_no_request_silently(endpoint: EndpointProcess) -> None:
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
    assert load.hung == 0
    assert load.counts["mixed"] == load.counts["no answer"] == 0, load.surprises[:3]
    refused = sum(count for kind, count in load.counts.items() if kind.startswith("refused 503"))
    # An answer may be cut short when its replica dies between head and body; the client sees that by Content-Length.
    cut_short = load.counts["cut short"]
    assert load.counts["answered"] + refused + cut_short == sum(load.counts.values()), load.surprises[:3]
    # What the victim had in hand was asked of the other: at most each client's one request may be lost, and it knows.
    assert refused + cut_short <= load.num_clients, load.surprises[:3]


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
