"""One actor's client in several threads, and in a process that was forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq

from rl_setting import TOKEN, Parts, segment, serving
from shoal.actor import ActorClient
from shoal.errors import Closed
from shoal.rl.experience.queue import BatchRequest

LONG_S = 60.0


@contextmanager
def connected(parts: Parts) -> Iterator[ActorClient]:
    with ActorClient(parts.address, TOKEN, "one", timeout_s=LONG_S) as actor:
        yield actor


def test_a_thread_that_waits_is_waited_for_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, may_go_on, poll = threading.Event(), threading.Event(), zmq.Poller.poll

    def stand_still(poller: zmq.Poller, timeout: int | None = None) -> list[tuple[object, int]]:
        if threading.current_thread().name.startswith("waiter"):
            waits.set()
            may_go_on.wait(LONG_S)
        return poll(poller, timeout)

    with (
        serving() as parts,
        connected(parts) as actor,
        ThreadPoolExecutor(1, "waiter") as waiter,
        ThreadPoolExecutor(1, "other") as other,
    ):
        actor.wait_for_weights()
        monkeypatch.setattr(zmq.Poller, "poll", stand_still)
        waiting = waiter.submit(actor.wait_for_weights, 10**9, 0.1)
        try:
            assert waits.wait(LONG_S)
            assert other.submit(actor.newer_weights, 10**9).result(timeout=600) is None
            assert other.submit(actor.send, segment()).result(timeout=600) == 0
        finally:
            may_go_on.set()
        assert waiting.exception(LONG_S) is not None


def test_threads_that_share_a_client_send_what_each_has_to_say() -> None:
    with serving(queue_capacity=4) as parts, connected(parts) as actor, ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(actor.send, segment(), LONG_S) for _ in range(40)]
        while not all(each.done() for each in sent):
            parts.queue.take("learner", BatchRequest(1, 64, 4, 0.05))
        assert sorted(each.result() for each in sent) == list(range(40))
        assert actor.drain(LONG_S)
        assert actor.acknowledged == {"accepted": 40, "dropped": 0, "duplicate": 0}


def test_a_forked_process_is_told_that_the_client_is_not_its_own() -> None:
    with serving() as parts, connected(parts) as actor:
        if (child := os.fork()) == 0:
            signal.alarm(int(LONG_S))  # ends it if it waits for what cannot come
            told = 0
            for ask in (actor.connect, lambda: actor.newer_weights(0), lambda: actor.send(segment(), 1.0)):
                try:
                    ask()
                except Closed as error:
                    told += "make one in each" in str(error)
            actor.close()
            os._exit(told)  # nothing of pytest's may run here
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        actor.send(segment())
        assert actor.drain(LONG_S)
