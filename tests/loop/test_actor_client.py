"""The actor's client against what a gateway may do to it: full queues, other runs, gaps, silence and nonsense."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from loop.gateway_asking import Raw
from rl_setting import EXPERIENCE, TOKEN, Parts, segment, serving, weights
from shoal.actor import ActorClient, play
from shoal.actor.exchange import ReceivedWeights
from shoal.channel.memory import MemoryAddress, map_memory
from shoal.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    InvalidSegment,
    ProtocolViolation,
    RunChanged,
    ShoalError,
    WeightsError,
)
from shoal.rl.experience.queue import BatchRequest
from shoal.weights import shared_memory
from shoal.wire import PackedSegment
from shoal.wire.messages import Bye, Hello, Ping, WeightsMessage
from waiting import start_thread, wait_for


@contextmanager
def client(parts: Parts, actor_id: str = "one", **options: Any) -> Iterator[ActorClient]:
    actor = ActorClient(parts.address, TOKEN, actor_id, timeout_s=60, **options)
    actor.connect()
    try:
        yield actor
    finally:
        actor.finished = True  # the tests leave things unacknowledged on purpose: do not wait for them
        actor.close()


def test_a_reconnect_into_a_full_queue_waits_for_room_and_drops_nothing() -> None:
    with serving(queue_capacity=2) as parts, client(parts, "slow") as slow:
        slow._send_message(Bye("its session ends, as after a time-out"))
        wait_for(lambda: not parts.gateway.stats()["actors"][0]["connected"])
        for _ in range(2):
            slow._outbox.add(PackedSegment.from_segment(segment()))
        slow._send_pending()  # answered with hello_required
        with client(parts, "busy") as busy:
            for _ in range(2):
                busy.send(segment())
            assert busy.drain(60)
            assert not slow.drain(0.3)  # reconnected, and waits for room
            busy.close()  # with a word: credit of one who is gone without is free when its session times out
        for _ in range(2):
            parts.take(1, 1, 1)
        assert slow.drain(60)
        assert slow.acknowledged == {"accepted": 2, "dropped": 0, "duplicate": 0}


def test_another_run_on_the_same_port_is_joined_and_told() -> None:
    with serving() as parts:
        port = parts.gateway.port
        with client(parts) as actor:
            actor.send(segment())
            assert actor.drain(60)
            parts.gateway.close()
            with serving(port=port, run_id="run-2") as other:
                with pytest.raises(RunChanged, match="run-2"):
                    wait_for(lambda: actor.newer_weights(10**9))
                assert actor.run_id == "run-2"
                assert actor.wait_for_weights()[0] == 1
                actor.send(segment())
                assert actor.drain(60)
                assert other.ledger.get_totals().received == 1
                assert actor.reconnects < 10


@pytest.mark.parametrize("run_id", ["run-1", "run-2"])
def test_who_connects_again_after_a_run_has_ended_plays_for_the_next_one(run_id: str) -> None:
    with serving() as parts, client(parts) as actor:
        actor.wait_for_weights()
        parts.gateway.close(finished=True)
        wait_for(lambda: actor.newer_weights(10**9) or actor.finished)
        with serving(port=parts.gateway.port, queue_capacity=2, run_id=run_id):
            assert actor.connect() == EXPERIENCE
            assert (actor.run_id, actor.finished) == (run_id, False)
            for _ in range(2):
                actor.send(segment())
            with pytest.raises(ConnectionLost, match="credit"):
                actor.send(segment(), timeout_s=0.1)
            assert actor.drain(60)
            posted = record_posted(actor)
            wait_for(lambda: Ping() in posted)  # by its keeper: nothing else is done


def record_posted(actor: ActorClient) -> list[object]:
    """What it sends from now on."""
    posted: list[object] = []
    post = actor._send_message
    actor._send_message = lambda message: (posted.append(message), post(message))[1]  # type: ignore[method-assign]
    return posted


def test_a_segment_that_an_error_names_is_discarded_and_the_others_arrive() -> None:
    with serving() as parts, client(parts) as actor:
        bad = PackedSegment.from_segment(segment())
        actor._outbox.add(PackedSegment.from_segment(segment()))
        actor._outbox.add(bad._replace(header=msgspec.structs.replace(bad.header, terminated="no")))
        for _ in range(2):
            actor._outbox.add(PackedSegment.from_segment(segment()))
        actor._send_pending()  # all four are in flight: the two after the bad one are answered with a gap
        assert actor.drain(20)
        assert (actor.reconnects, actor.drops) == (1, {"malformed": 1})
        assert actor.send(segment()) == 3
        assert actor.drain(20)
        totals = parts.ledger.get_totals()
        assert (totals.received, totals.duplicates, totals.dropped.total()) == (4, 0, 0)


class Endless:
    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 1.0, False, False, {}


def test_the_ready_loop_begins_anew_with_another_run() -> None:
    with serving(queue_capacity=200, max_credits=200) as parts, client(parts) as actor:
        port = parts.gateway.port
        assert play(Endless(), actor, max_steps=32) == 32
        assert actor.drain(60)
        parts.gateway.close()
        with serving(queue_capacity=200, max_credits=200, port=port, run_id="run-2") as other:
            assert play(Endless(), actor, max_steps=64) == 64
            assert actor.drain(60)
            assert other.ledger.get_totals().queued > 0


def test_the_ready_loop_waits_for_a_busy_learner_as_long_as_the_gateway_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = 0.2
    monkeypatch.setattr(ActorClient.send, "__defaults__", (limit_s,))
    steps: list[int] = []
    with serving(queue_capacity=2) as parts, client(parts) as actor:
        length = EXPERIENCE.segment_length
        player = start_thread(lambda: steps.append(play(Endless(), actor, max_steps=3 * length)))
        wait_for(lambda: len(parts.queue) == 2)
        player.join(4 * limit_s)
        assert player.is_alive()
        parts.take(1, 1, 1)
        player.join(SOON_S)
        assert actor.drain(60)
        assert (steps, actor.acknowledged["accepted"], actor.reconnects) == ([3 * length], 3, 0)


def test_a_run_that_ends_before_its_weights_have_come_ends_the_actor_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as parts, client(parts) as actor:
        monkeypatch.setattr(actor._weights, "take", lambda message, frames: None)  # they are on their way
        actor._weights.latest = None
        steps: list[int] = []
        player = start_thread(lambda: steps.append(play(Endless(), actor)))
        parts.gateway.close(finished=True)
        player.join(20.0)  # for 30 s they would be waited for
        assert (steps, actor.finished) == ([0], True)
        with pytest.raises(Closed, match="the run is over"):
            actor.wait_for_weights()


def test_a_segment_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with serving(max_message_bytes=8192) as parts, client(parts) as actor:
        with pytest.raises(InvalidSegment, match="8192"):
            actor.send(segment(600))
        actor.send(segment())
        assert actor.drain(60)
        assert actor.reconnects == 0


def test_what_is_sent_again_is_what_was_sent_though_its_arrays_hold_the_next_steps_by_now() -> None:
    """The gap is mended even when other messages follow the gateway's error."""
    with serving() as parts, client(parts) as actor:
        actor.wait_for_weights()
        rewards = np.ones(8, np.float32)
        with actor._lock:
            real, actor._send_frames = actor._send_frames, lambda frames: None  # type: ignore[method-assign]
            actor.send(segment(rewards=rewards))  # lost on its way
            actor._send_frames = real  # type: ignore[method-assign]
            rewards[:] = 7.0
            actor.send(segment())
            actor._send_message(Ping(1))
            wait_for(lambda: parts.gateway.stats()["protocol_errors"].get("sequence_gap"))
        assert actor.drain(60)
        assert parts.take(16).rewards.tolist() == [1.0] * 16


@pytest.mark.parametrize(
    "changes", [{"episode_return": "high"}, {"episode_length": float("nan")}, {"actions": np.zeros(8, np.complex64)}]
)
def test_a_segment_of_nonsense_does_not_stay_in_the_way_of_others(changes: dict[str, Any]) -> None:
    with serving() as parts, client(parts) as actor:
        with pytest.raises((ValueError, InvalidSegment)):
            actor.send(segment(terminated=True, **changes))
        actor.send(segment())
        assert actor.drain(60)
        assert (actor.acknowledged["accepted"], actor.reconnects) == (1, 0)


def test_a_message_of_an_unknown_kind_is_ignored() -> None:
    """As docs/protocol.md says: a newer gateway may send it."""
    ActorClient("tcp://127.0.0.1:1", TOKEN)._handle_message([msgspec.msgpack.encode({"kind": "telepathy"})])


def test_clients_of_one_process_that_have_no_names_do_not_end_each_other() -> None:
    one, other = (ActorClient("tcp://127.0.0.1:1", TOKEN) for _ in range(2))
    assert one.actor_id != other.actor_id


def test_a_gateway_that_refuses_over_and_over_is_asked_ever_more_slowly() -> None:
    """A session that begins and is lost at once must not become a busy loop."""
    first_pause_s, num_refusals = 0.005, 5
    with serving() as parts, client(parts, first_pause_s=first_pause_s) as actor:
        began = time.monotonic()
        for _ in range(num_refusals):
            actor._is_session_lost = True
            actor.newer_weights(0)
        assert actor.reconnects == num_refusals
        # Without an acknowledgement in between, each pause is twice the one before.
        assert time.monotonic() - began >= 0.9 * first_pause_s * (2**num_refusals - 1)


def test_what_cannot_be_an_address_is_refused_and_an_empty_one_is_given_up() -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        ActorClient("127.0.0.1:5", TOKEN)
    actor = ActorClient("tcp://127.0.0.1:1", TOKEN, timeout_s=0.2)
    with pytest.raises(ConnectionLost, match="no gateway answers"):
        actor.connect()
    actor.close()
    actor.close()
    with pytest.raises(Closed):
        actor.send(segment())


@pytest.mark.parametrize(
    ("address", "server_key", "field"),
    [
        ("tcp://127.0.0.1", "", "connect"),
        ("tcp://127.0.0.1:port", "", "connect"),
        ("tcp://127.0.0.1:5", "short", "server-key"),
        ("tcp://127.0.0.1:5", "x" * 32, "server-key"),  # a key in binary, for ZeroMQ
        ("tcp://127.0.0.1:5", " " * 40, "server-key"),
    ],
)
def test_an_address_or_a_key_that_is_none_is_named(address: str, server_key: str, field: str) -> None:
    with (
        pytest.raises(ConfigError, match="as the job prints it") as raised,
        ActorClient(address, TOKEN, server_key=server_key, timeout_s=5),
    ):
        pass
    assert raised.value.field == field


# -- deadlines, with nobody there: far below the 600 s for which the client itself would go on trying -----------------

SOON_S = 60.0


@contextmanager
def deserted(folder: Path | None = None) -> Iterator[tuple[ActorClient, int]]:
    """A client with an unacknowledged segment whose gateway has gone, and the gateway's port."""
    with serving(folder) as parts:
        actor = ActorClient(parts.address, TOKEN, "one", timeout_s=600)
        actor.connect()
        actor.wait_for_weights()
        port = parts.gateway.port
    actor._outbox.add(PackedSegment.from_segment(segment()))
    began = time.monotonic()
    try:
        yield actor, port
        assert time.monotonic() - began < SOON_S
    finally:
        actor.close(0.1)


def test_close_does_not_look_for_a_gateway_that_is_gone() -> None:
    with deserted() as (actor, _):
        actor.close(0.2)
        assert len(actor._outbox) == 1
        assert actor.reconnects == 0


def test_close_ends_the_search_of_another_thread() -> None:
    with deserted() as (actor, _):
        ended: list[ShoalError] = []

        def look() -> None:
            try:
                actor.newer_weights(0)
            except ShoalError as error:
                ended.append(error)

        with actor._lock:
            thread = start_thread(look)
        wait_for(lambda: actor._is_session_lost)
        actor.close(0.2)
        thread.join(SOON_S)
        assert isinstance(ended[0], Closed)


@pytest.mark.parametrize("error", [WeightsError("damaged"), ProtocolViolation("malformed", "?"), RunChanged("other")])
def test_close_survives_what_the_last_messages_say(error: ShoalError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frames: list[bytes]) -> None:
        raise error

    with serving() as parts:
        actor = ActorClient(parts.address, TOKEN, "one", timeout_s=10)
        actor.connect()
        actor.send(segment())
        monkeypatch.setattr(actor, "_handle_message", fail)
        actor.close()
        assert actor._context is not None
        assert actor._context.closed


def test_a_callers_deadline_holds_while_nobody_answers() -> None:
    with deserted() as (actor, _):
        assert not actor.drain(0.2)
        with pytest.raises(ConnectionLost):
            actor.wait_for_weights(10**9, timeout_s=0.2)
        with pytest.raises(ConnectionLost):
            actor.send(segment(), timeout_s=0.2)


def test_short_calls_in_a_row_find_the_gateway_when_it_is_back(tmp_path: Path) -> None:
    with deserted(tmp_path) as (actor, port):
        for _ in range(5):
            assert not actor.drain(0.05)
        with serving(tmp_path) as again:
            assert again.gateway.port == port
            wait_for(lambda: actor.drain(0.1), SOON_S)
            assert actor.acknowledged["accepted"] == 1
            actor.close()


# -- and the gateway against what an actor may do to it ------------------------------------------------------------


def test_hello_under_another_name_on_the_same_connection_ends_the_first_session() -> None:
    with serving() as parts, Raw(parts) as raw:
        for name in ("a", "b"):
            raw.enter(name)
        connected = {actor["actor_id"]: actor["connected"] for actor in parts.gateway.stats()["actors"]}
        assert connected == {"a": False, "b": True}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "done"),
        (RuntimeError("motor burnt"), "failed: RuntimeError: motor burnt"),
        (SystemExit(0), "interrupted"),
    ],
)
def test_why_an_actor_leaves_is_told(error: BaseException | None, reason: str) -> None:
    with serving() as parts:
        with suppress(RuntimeError, SystemExit), ActorClient(parts.address, TOKEN, "a"):
            if error is not None:
                raise error
        events: list[Any] = []
        wait_for(lambda: events.extend(parts.gateway.take_events()) or "actor_left" in str(events))
    assert [details["message"] for _, kind, details in events if kind == "actor_left"] == [reason]


def test_what_an_actor_says_of_itself_is_cut_and_cleaned_before_it_is_logged() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.say(Hello(1, "guess", "\x1b[2J" + "x" * 1000, 1))
        raw.say(Hello(1, TOKEN, "\x1b[2Jevil", 1))  # refused: not printable
        raw.say(Hello(1, TOKEN, "fine", 1))
        raw.say(Bye("timed out\n" * 5000))
        events: list[Any] = []
        wait_for(lambda: events.extend(parts.gateway.take_events()) or "actor_left" in str(events))
        assert max(len(repr(event)) for event in events) < 300
        assert "\x1b" not in repr([list(event[2].values()) for event in events]).replace("\\x1b", "\x1b")
        assert not any(kind == "actor_lost" for _, kind, _ in events)


def test_a_client_that_waits_pings_whenever_it_has_heard_nothing_for_a_heartbeat() -> None:
    """Also when the beats before have been answered; a gateway may call it dead after two."""
    with serving(queue_capacity=2) as parts, client(parts) as actor:
        for _ in range(2):
            actor.send(segment())
        posted = record_posted(actor)
        with pytest.raises(ConnectionLost, match="credit"):
            actor.send(segment(), timeout_s=1.5)
        assert posted.count(Ping()) >= 3
        assert actor.reconnects == 0


@pytest.mark.parametrize("can_map", [True, False])
def test_an_actor_of_this_machine_maps_the_weights_and_another_one_gets_them_sent(
    can_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False: as of a gateway in another container, or at the other end of a tunnel."""
    monkeypatch.setattr(shared_memory, "LEAST_BYTES", 1)
    if not can_map:
        monkeypatch.setattr("shoal.actor.exchange.map_memory", lambda place: None)
    with serving() as parts, client(parts) as actor:
        for version in (2, 3, 4):
            parts.store.publish(weights(version))
            newest, arrays = actor.wait_for_weights(version - 1)
            assert newest == version
            np.testing.assert_array_equal(arrays["policy.0.weight"], weights(version).tensors()["policy.0.weight"])
            assert arrays["policy.0.weight"].flags.writeable != can_map
        assert actor._weights.shares_memory == can_map


def test_mapped_weights_have_the_limit_of_those_that_are_sent() -> None:
    received = ReceivedWeights(max_bytes=140)
    with pytest.raises(ProtocolViolation, match="too_large: weights 1: 141 bytes"):
        received.take(WeightsMessage(1, "", os.getpid(), 0, 0, size=141), [])


def test_an_actor_that_comes_too_late_to_map_a_version_gets_that_one_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[MemoryAddress] = []

    def map_all_but_the_second(address: MemoryAddress) -> object:
        opened.append(address)
        return None if len(opened) == 2 else map_memory(address)

    monkeypatch.setattr(shared_memory, "LEAST_BYTES", 1)
    monkeypatch.setattr("shoal.actor.exchange.map_memory", map_all_but_the_second)
    with serving() as parts, client(parts) as actor:
        for version in (1, 2, 3):
            parts.store.publish(weights(version)) if version > 1 else None
            found, arrays = actor.wait_for_weights(version - 1)
            assert found == version
            assert arrays["policy.0.weight"].flags.writeable == (version == 2)
    assert len(opened) == 3


def test_a_thread_that_waits_is_waited_for_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    may_go_on = threading.Event()
    poll = zmq.Poller.poll

    def stand_still(poller: zmq.Poller, timeout: int | None = None) -> list[tuple[object, int]]:
        if threading.current_thread().name.startswith("waiter"):
            waits.set()
            may_go_on.wait(SOON_S)
        return poll(poller, timeout)

    with (
        serving() as parts,
        client(parts) as actor,
        ThreadPoolExecutor(1, "waiter") as waiter,
        ThreadPoolExecutor(1, "other") as other,
    ):
        actor.wait_for_weights()
        monkeypatch.setattr(zmq.Poller, "poll", stand_still)
        waiting = waiter.submit(actor.wait_for_weights, 10**9, 0.1)
        try:
            assert waits.wait(SOON_S)
            assert other.submit(actor.newer_weights, 10**9).result(timeout=600) is None
            assert other.submit(actor.send, segment()).result(timeout=600) == 0
        finally:
            may_go_on.set()
        assert waiting.exception(SOON_S) is not None


def test_threads_that_share_a_client_send_what_each_has_to_say() -> None:
    with serving(queue_capacity=4) as parts, client(parts) as actor, ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(actor.send, segment(), SOON_S) for _ in range(40)]
        while not all(each.done() for each in sent):
            parts.queue.take("learner", BatchRequest(1, 64, 4, 0.05))
        assert sorted(each.result() for each in sent) == list(range(40))
        assert actor.drain(SOON_S)
        assert actor.acknowledged == {"accepted": 40, "dropped": 0, "duplicate": 0}


def test_a_forked_process_is_told_that_the_client_is_not_its_own() -> None:
    with serving() as parts, client(parts) as actor:
        if (child := os.fork()) == 0:
            signal.alarm(int(SOON_S))  # ends it if it waits for what cannot come
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
        assert actor.drain(SOON_S)


def test_a_signal_amid_a_pause_between_two_attempts_leaves_no_lock_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may raise at any instruction of the main thread; the client can be closed afterwards."""
    enter, sleep = threading.Condition.__enter__, time.sleep
    is_signalled = threading.local()

    def interrupt() -> None:
        if getattr(is_signalled, "awaits", False):
            is_signalled.awaits = False
            raise SystemExit

    def enter_condition(condition: threading.Condition) -> bool:
        entered = enter(condition)
        interrupt()
        return entered

    def interrupted_sleep(seconds: float) -> None:
        interrupt()
        sleep(seconds)

    client = ActorClient("tcp://127.0.0.1:1", TOKEN, timeout_s=600)
    monkeypatch.setattr(threading.Condition, "__enter__", enter_condition)
    monkeypatch.setattr(time, "sleep", interrupted_sleep)
    is_signalled.awaits = True
    with pytest.raises(SystemExit):
        client.connect()
    closing = start_thread(client.close)
    closing.join(30)
    assert not closing.is_alive()
