"""The rules of trying again, told to a conversation without a socket, a clock or a wait."""

from __future__ import annotations

import asyncio
import json

import pytest

from shoal.client.retry import (
    ConnectionBroken,
    EndpointRequest,
    NotSent,
    Reply,
    RetryPolicy,
    RetrySteps,
    Send,
    SendOutcome,
    Sleep,
    TimedOut,
    request_with_retries,
)
from shoal.client.transport import AsyncTransport, Transport
from shoal.errors import Closed, ConnectionLost, InferenceError

REQUEST = EndpointRequest("POST", "/v2/models/m/infer", body=b"{}")
FULL = Reply(429, {"retry-after": "2"}, json.dumps({"error": "the queue is full"}).encode())
DONE = Reply(200, {}, b"{}")


class Talk:
    """Plays the outside: a clock that a Wait, and `send_s` for each attempt, moves on."""

    def __init__(self, patience: RetryPolicy, send_s: float = 0.01) -> None:
        self.now_s, self._send_s = 100.0, send_s
        self.sent: list[Send] = []
        self.waits: list[float] = []
        self._talk: RetrySteps = request_with_retries(REQUEST, patience, clock=lambda: self.now_s, jitter=lambda: 0.0)

    def answer(self, *outcomes: SendOutcome) -> Reply:
        """What the conversation returns or raises when its attempts end so, one after the other."""
        script = iter(outcomes)
        try:
            asked = next(self._talk)
            while True:
                if isinstance(asked, Sleep):
                    self.waits.append(asked.seconds)
                    self.now_s += asked.seconds
                    asked = self._talk.send(None)
                else:
                    self.sent.append(asked)
                    self.now_s += self._send_s
                    asked = self._talk.send(next(script))
        except StopIteration as ended:
            reply: Reply = ended.value
            return reply


def test_what_is_answered_is_asked_once() -> None:
    talk = Talk(RetryPolicy(5.0))
    assert talk.answer(DONE) is DONE
    assert (len(talk.sent), talk.waits) == (1, [])


def test_without_a_connection_it_is_tried_again_and_waits_longer_each_time() -> None:
    talk = Talk(RetryPolicy(5.0))
    assert talk.answer(NotSent("refused"), NotSent("refused"), NotSent("refused"), DONE) is DONE
    assert talk.waits == [0.05, 0.1, 0.2]


def test_it_gives_up_after_so_many_attempts() -> None:
    talk = Talk(RetryPolicy(5.0, num_retries=1))
    with pytest.raises(ConnectionLost, match="cannot be reached: refused"):
        talk.answer(NotSent("refused"), NotSent("refused"))


def test_a_full_queue_is_asked_again_when_it_says() -> None:
    talk = Talk(RetryPolicy(5.0))
    assert talk.answer(FULL, DONE) is DONE
    assert talk.waits == [2.0]


def test_what_would_be_too_late_is_not_waited_for() -> None:
    talk = Talk(RetryPolicy(1.5))
    with pytest.raises(InferenceError, match="the queue is full") as refused:
        talk.answer(FULL)
    assert (refused.value.status, refused.value.retry_after_s, talk.waits) == (429, 2.0, [])


@pytest.mark.parametrize("status", [400, 404, 422, 500, 504])
def test_other_refusals_are_final(status: int) -> None:
    talk = Talk(RetryPolicy(5.0))
    with pytest.raises(InferenceError, match="no") as refused:
        talk.answer(Reply(status, {"retry-after": "0"}, b'{"error": "no"}'))
    assert (refused.value.status, refused.value.retry_after_s) == (status, None)


def test_a_refusal_without_a_time_is_final() -> None:
    with pytest.raises(InferenceError):
        Talk(RetryPolicy(5.0)).answer(Reply(503, {}, b'{"error": "closing"}'))


def test_a_lost_answer_is_not_asked_for_again_unless_told() -> None:
    with pytest.raises(ConnectionLost, match="before the answer was complete"):
        Talk(RetryPolicy(5.0)).answer(ConnectionBroken("reset"))
    assert Talk(RetryPolicy(5.0, retry_lost=True)).answer(ConnectionBroken("reset"), DONE) is DONE


@pytest.mark.parametrize("outcome", [FULL, Reply(503, {"retry-after": "1"}, b"{}"), ConnectionBroken("reset")])
def test_a_change_that_was_sent_is_not_asked_for_again(outcome: SendOutcome) -> None:
    """Whatever the answer says: who gave it need not know what became of the change."""
    patience = RetryPolicy(5.0, retry_lost=True, is_change=True)
    with pytest.raises((InferenceError, ConnectionLost)):
        Talk(patience).answer(outcome)
    assert Talk(patience).answer(NotSent("refused"), DONE) is DONE


def test_the_time_of_the_caller_is_for_all_attempts_together() -> None:
    talk = Talk(RetryPolicy(1.0), send_s=0.4)
    with pytest.raises(ConnectionLost):
        talk.answer(NotSent("refused"), NotSent("refused"), NotSent("refused"))
    assert [round(send.timeout_s, 2) for send in talk.sent] == [1.0, 0.55, 0.05]


def test_the_time_of_the_caller_may_have_begun_before() -> None:
    talk = Talk(RetryPolicy(1.0, sends_deadline=True, end_s=100.6))
    assert talk.answer(NotSent("refused"), DONE) is DONE
    assert [send.request.headers["shoal-deadline-ms"] for send in talk.sent] == ["600.000", "540.000"]
    late = Talk(RetryPolicy(1.0, end_s=99.9))
    with pytest.raises(InferenceError, match=r"no answer within 1 s"):
        late.answer(DONE)
    assert late.sent == []


def test_a_wait_that_takes_longer_than_the_time_tells_what_was_found_before_it() -> None:
    """On a busy machine; that nobody listens says more than that there was no answer."""
    talk = Talk(RetryPolicy(0.2))
    asked = next(talk._talk)
    assert isinstance(asked, Send)
    assert isinstance(talk._talk.send(NotSent("refused")), Sleep)
    talk.now_s += 1.0
    with pytest.raises(ConnectionLost, match="cannot be reached: refused"):
        talk._talk.send(None)


def test_no_answer_in_time_is_what_the_endpoint_would_say_too() -> None:
    with pytest.raises(InferenceError, match=r"no answer within 0.5 s") as late:
        Talk(RetryPolicy(0.5)).answer(TimedOut())
    assert late.value.status == 504


def test_a_deadline_is_told_as_what_is_left_of_it() -> None:
    talk = Talk(RetryPolicy(1.0, sends_deadline=True))
    talk.answer(NotSent("refused"), DONE)
    assert [send.request.headers["shoal-deadline-ms"] for send in talk.sent] == ["1000.000", "940.000"]
    assert REQUEST.headers == {}


def test_words_that_are_not_the_protocols_are_kept() -> None:
    with pytest.raises(InferenceError, match="Bad Gateway") as refused:
        Talk(RetryPolicy(1.0)).answer(Reply(502, {}, b"<h1>Bad Gateway</h1>"))
    assert refused.value.status == 502
    with pytest.raises(InferenceError, match="HTTP status 500"):
        Talk(RetryPolicy(1.0)).answer(Reply(500, {}, b""))


def test_a_client_that_is_closed_while_a_call_waits_to_be_tried_again_says_so() -> None:
    transport = Transport("http://127.0.0.1:1", "", 1)

    def closed_meanwhile() -> RetrySteps:
        yield Sleep(0.0)
        transport.close()
        yield Send(REQUEST, 5.0)
        raise AssertionError("it was sent")

    with pytest.raises(Closed):
        transport.run(closed_meanwhile())


def test_so_does_an_asynchronous_one() -> None:
    is_closed: list[bool] = []

    def waiting() -> RetrySteps:
        while not is_closed:
            yield Sleep(0.001)
        yield Send(REQUEST, 5.0)
        raise AssertionError("it was sent")

    async def close_meanwhile() -> None:
        transport = AsyncTransport("http://127.0.0.1:1", "", 1)
        asked = asyncio.create_task(transport.run(waiting()))
        await asyncio.sleep(0)
        await transport.close()
        is_closed.append(True)
        await asked

    with pytest.raises(Closed):
        asyncio.run(close_meanwhile())
