"""Games whose agents act in one message, at a gateway: reconnects, a restart, a full queue, masks, mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from gateway_asking import Raw
from msgspec.structs import replace

from rl_setting import EXPERIENCE, segment, serving
from shoal.wire import MessageLimits, decode, encode
from shoal.wire.action_masks import describe_masks
from shoal.wire.messages import ActionMessage, ActionsMessage, ActMessage, ActsMessage, ErrorMessage, RefusedRow
from waiting import wait_for

MASKED = replace(EXPERIENCE, extras=(describe_masks(EXPERIENCE.action, ()),))


def say(raw: Raw, episodes: Sequence[int], steps: Sequence[int], flags: Sequence[int] = (), *masks: bytes) -> None:
    """Send rows with rewards of 1; the observations tell the episode."""
    values = np.repeat(np.array(episodes, np.float32), 4) / 8
    rewards = np.ones(len(episodes), np.float32).tobytes()
    columns = [values.tobytes(), rewards, bytes(flags or len(episodes)), *masks]
    raw.socket.send_multipart([encode(ActsMessage(tuple(episodes), tuple(steps))), *columns])


def hear(raw: Raw) -> tuple[ActionsMessage, list[int]]:
    assert raw.socket.poll(60_000)
    frames = raw.socket.recv_multipart()
    message = decode(frames, MessageLimits())
    assert isinstance(message, ActionsMessage), message
    return message, np.frombuffer(frames[1], np.int64).tolist()


def ask(raw: Raw, *columns: Sequence[int]) -> tuple[ActionsMessage, list[int]]:
    say(raw, *columns)
    return hear(raw)


def test_each_row_is_a_step_of_the_ledger_and_survives_a_reconnect() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        first, actions = ask(raw, (1, 0, 2), (0, 0, 0))
        assert first == ActionsMessage((1, 0, 2), (0, 0, 0), 1)
        ask(raw, (1, 0, 2), (1, 1, 1))
        with Raw(parts) as again:
            again.enter(inference="remote")
            say(again, (1, 0, 2), (1, 1, 1))  # the answer may have been lost
            _, seconds = hear(again)
            last, thirds = ask(again, (2, 1, 0), (2, 2, 9), (0, 5, 0))
            assert (last.episodes, last.steps, last.ended) == ((2,), (2,), (1,))
            assert last.refused == (RefusedRow(2, 0, 9, "wrong_step"),)
            assert (ask(again, (1,), (2,), (5,))[0].ended, len(thirds)) == ((1,), 1)  # once more: it is taken once
        batch = parts.take()
        assert (batch.lengths.tolist(), batch.terminated.tolist()) == ([2], [True])
        assert batch.actions.tolist() == [actions[0], seconds[0]]
        np.testing.assert_array_equal(batch.observations, np.full((3, 4), 0.125, np.float32))
        stats = parts.gateway.stats()
        assert (stats["mean_return"], stats["remote_inference"]["open_episodes"]) == (
            3.0,
            2,
        )  # with the reward of step 0, the return until then
        assert parts.ledger.get_totals().received == 1


def test_the_agents_of_one_message_are_recorded_apart(tmp_path: Path) -> None:
    with serving(tmp_path, record="100%") as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        for step in range(21):  # 16 of a segment
            columns = np.repeat(np.array([1, 2], np.float32), 4) / 8, np.full(2, step > 0, np.float32)
            header = encode(ActsMessage((1, 2), (step, step)))
            raw.socket.send_multipart([header, *(each.tobytes() for each in columns), bytes([step == 20] * 2)])
            hear(raw)
        wait_for(lambda: parts.gateway.stats()["recorded"]["recorded"] == 2)
    found = [safetensors.numpy.load_file(path) for path in (tmp_path / "episodes").glob("*.safetensors")]
    assert sorted({float(number) for number in each["observations"].ravel()}.pop() for each in found) == [0.125, 0.25]
    assert [len(each["actions"]) for each in found] == [20, 20]


def test_a_restarted_gateway_names_the_rows_that_it_does_not_know(tmp_path: Path) -> None:
    with serving(tmp_path) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        ask(raw, (3, 4), (0, 0))
    with serving(tmp_path) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        answer, actions = ask(raw, (3, 5), (1, 0))  # the second begins
        assert [(each.row, each.reason) for each in answer.refused] == [(0, "unknown_episode")]
        assert (answer.episodes, len(actions)) == ((5,), 1)


def test_while_the_queue_is_full_the_answer_waits_and_no_row_is_lost() -> None:
    with serving(queue_capacity=4) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        ask(raw, (0, 1, 2), (0, 0, 0))
        for seq in range(4):
            parts.queue.put(("other", 1), seq, segment())
        say(raw, (0, 1, 2), (1, 1, 1), (1, 0, 2))
        say(raw, (0, 2), (1, 1), (1, 2))  # those that wait are answered once
        assert raw.rest(0.2) == []
        assert len(parts.queue) == 4
        assert parts.take().num_steps == 32
        answer, _ = hear(raw)
        assert (answer.episodes, answer.ended, answer.refused) == ((1,), (0, 2), ())
        assert raw.rest(0.1) == []
        assert parts.take().lengths.tolist() == [1, 1]


def test_masks_and_invalid_rows_beside_valid_ones() -> None:
    with serving(experience=MASKED) as parts, Raw(parts) as raw:
        raw.enter(inference="remote")
        say(raw, (0, 1, 2, 88), (0, 0, 0, 0), (), b"\x00\x01\x00\x00\x01\x02\x01\x01")
        answer, actions = hear(raw)
        assert (answer.episodes, actions) == ((0,), [1])
        assert [(each.row, each.reason, each.detail) for each in answer.refused] == [
            (1, "invalid", "masks: no action is allowed"),
            (2, "invalid", "masks: numbers other than 0 and 1"),
            (3, "invalid", "observation: 11.0 is above 10.0"),
        ]
        assert parts.gateway.stats()["actors"][0]["invalid"] == {"invalid_range": 3}
        say(raw, (0,), (1,), (1,), b"\x00\x00")  # after the end, none need be allowed
        assert hear(raw)[0].ended == (0,)
        assert parts.take().extras["masks"].tolist() == [[False, True], [False, False]]


def test_an_episode_goes_on_by_single_messages_and_back_and_columns_that_do_not_fit_are_an_error() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter(inference="remote")

        def act(episode: int, step: int) -> ActionMessage:
            raw.socket.send_multipart([encode(ActMessage(episode, step, 1.0)), np.zeros(4, np.float32).tobytes()])
            return raw.hear(ActionMessage)

        chosen = [ask(raw, (0, 1), (0, 0))[1][0], act(0, 1).action, ask(raw, (0,), (2,))[1][0]]
        raw.socket.send_multipart([encode(ActsMessage((0,), (3,))), b"", b"", b""])
        assert "observations: 0 numbers, expected 4" in raw.hear(ErrorMessage).message
        assert ask(raw, (0, 1), (3, 1), (2, 1))[0].ended == (0, 1)
        assert parts.take().actions[:3].tolist() == chosen


def test_a_session_of_segments_sends_no_rows() -> None:
    with serving() as parts, Raw(parts) as raw:
        raw.enter()
        say(raw, (0,), (0,))
        assert raw.hear(ErrorMessage).message == "this session's inference is local"
