"""Actors that send observations and receive actions: each step is taken once, and its segment is in the books."""

import numpy as np
import pytest
from gateway_asking import Raw
from msgspec.structs import replace

from rl_setting import EXPERIENCE, TOKEN, segment, serving, weights
from shoal.rl.gateway import sessions
from shoal.wire import encode, pack_segment
from shoal.wire.messages import ActionMessage, ActMessage, ErrorMessage, Hello
from waiting import wait_for


def ask(raw: Raw, episode: int, step: int, value: float = 0.5, **fields: object) -> ActionMessage:
    """Send one observation, four times `value`, and return the answer."""
    frame = np.full(4, value, np.float32).tobytes()
    raw.socket.send_multipart([encode(ActMessage(episode, step, **fields)), frame])  # type: ignore[arg-type]
    answer = raw.hear(ActionMessage)
    assert isinstance(answer, ActionMessage)
    return answer


def test_a_session_does_what_its_hello_says() -> None:
    with serving() as parts, Raw(parts) as raw:
        assert raw.enter().inference == "local"
        raw.socket.send_multipart([encode(ActMessage(0, 0)), np.zeros(4, np.float32).tobytes()])
        assert raw.hear(ErrorMessage).code == "malformed"
        welcome = raw.enter(inference="remote")
        assert (welcome.inference, welcome.send_limit) == ("remote", welcome.next_seq)  # it needs no credit
        raw.socket.send_multipart(pack_segment(segment(), 0))
        assert raw.hear(ErrorMessage).code == "malformed"


def test_a_policy_that_is_unknown_here_refuses_the_session_for_good() -> None:
    with serving() as parts, Raw(parts) as raw:
        parts.gateway._inference._experience = replace(
            EXPERIENCE, policy=replace(EXPERIENCE.policy, kind="of_tomorrow")
        )
        raw.say(Hello(1, TOKEN, "raw", 1, inference="remote"))
        error = raw.hear(ErrorMessage)
        assert (error.code, error.fatal) == ("no_remote_inference", True)


@pytest.mark.parametrize("timeout_s", [60.0, 0.1])
def test_an_episode_that_no_one_continues_expires_and_is_counted_also_of_a_vanished_actor(timeout_s: float) -> None:
    with serving(heartbeat_s=0.05, timeout_s=timeout_s, episode_timeout_s=0.2) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        ask(raw, 0, 0)
        wait_for(lambda: parts.ledger.get_totals().dropped["expired"] == 1, what="the end of the episode")
        assert parts.gateway.stats()["remote_inference"]["open_episodes"] == 0
        if timeout_s > 1.0:
            assert ask(raw, 0, 1).reason == "ended_episode"
            return
        wait_for(lambda: not parts.gateway._inference.start()._clients, what="an actor that is forgotten")


def test_a_segment_older_than_the_permitted_lag_is_dropped() -> None:
    with serving(max_version_lag=1) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        ask(raw, 0, 0)
        for version in (2, 3):
            parts.store.publish(weights(version))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 3, what="new weights")
        ask(raw, 0, 1, terminated=True)
        assert parts.ledger.get_totals().dropped == {"stale_admission": 1}


def test_new_weights_serve_from_the_next_batch_on() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        first = ask(raw, 0, 0)
        parts.store.publish(weights(2))
        step, answer = 0, first
        while answer.version == 1:
            step += 1
            answer = ask(raw, 0, step)
        assert (first.version, answer.version) == (1, 2)


def test_a_completed_segment_waits_for_room_and_takes_no_credit_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "NEW_LAPSE_S", 600.0)
    monkeypatch.setattr(sessions, "LAPSE_S", 600.0)
    with serving(queue_capacity=4, max_credits=1) as parts, Raw(parts) as local, Raw(parts) as raw:
        limit = local.enter("local").send_limit
        raw.enter(inference="remote")
        for seq in range(100, 104 - limit):
            parts.queue.put(("other", 1), seq, segment())
        ask(raw, 0, 0)
        end = [encode(ActMessage(0, 1, 1.0, terminated=True)), np.zeros(4, np.float32).tobytes()]
        for _ in range(2):  # sent again, it waits once
            raw.socket.send_multipart(end)
        assert not [each for each in raw.rest(0.3) if isinstance(each, ActionMessage)]
        assert len(parts.queue) == 4 - limit
        assert local.send(0, segment()).status == "accepted"
        parts.take()
        assert raw.hear(ActionMessage).reason == ""
        assert parts.ledger.get_account(("raw", 1)).received == 1
        assert not parts.ledger.get_totals().dropped
