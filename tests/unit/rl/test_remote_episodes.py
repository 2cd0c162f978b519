"""Episodes at the gateway: messages of many agents give the same answers and segments as one message for each step."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rl_setting import EXPERIENCE, RemoteRounds, weights
from shoal.errors import ProtocolViolation
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.remote_episodes import OpenEpisodes
from shoal.wire import ExtraSpec, Segment, TensorSpec
from shoal.wire.act_rows import RowReader
from shoal.wire.action_masks import describe_masks
from shoal.wire.messages import MAX_ROWS, ActionMessage, ActionsMessage, ActMessage, ActsMessage

KEY = ("game", 1)
AGENTS = 4
ENDS = {"terminated": 1, "truncated": 2, "won": 13, "lost": 6}  # the flags of a row
TAKEN = 64  # in their place, for these tests: a person has acted, which `act` alone can say
KINDS = (*["next"] * 6, *ENDS, "taken", "again", "skipped", "invalid", "old", "absent")
EVENTS = ("space", "space", "full", "full", "expiry")
SAME = {"unknown_episode": "ended_episode"}  # numbers are compared with those of earlier messages
Row = tuple[int, int, float, float, int]  # episode, step, each number of the observation, reward, flags
Answers = dict[tuple[int, int], Any]
STATE = ExtraSpec("state", TensorSpec("float32", (1,)), "segment")
SPACES = {
    "plain": replace(EXPERIENCE, segment_length=3),
    "masked": replace(EXPERIENCE, segment_length=3, extras=(describe_masks(EXPERIENCE.action, ()),)),
    "recurrent": replace(EXPERIENCE, segment_length=3, extras=(STATE,)),
    "box": replace(EXPERIENCE, segment_length=2, action=TensorSpec("float32", (2,), -9.0, 9.0)),
}


class FakePolicy:
    """Its answers tell the observation, and its state the sum of those before in the episode."""

    version = 0

    def __init__(self, is_box: bool) -> None:
        self._is_box, self._sums = is_box, dict[Any, float]()

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        self.version = version

    def reset(self, stream: Any) -> None:
        self._sums.pop(stream, None)

    def get_extras(self, stream: Any) -> Mapping[str, Any]:
        return {"state": np.array([self._sums.get(stream, 0.0)], np.float32)}

    def act_batch(
        self, observations: np.ndarray, streams: Sequence[Any], masks: np.ndarray | None
    ) -> tuple[Sequence[Any], Sequence[float]]:
        first = observations[:, 0].tolist()
        for stream, value in zip(streams, first, strict=True):
            self._sums[stream] = self._sums.get(stream, 0.0) + value
        allowed = [0.0] * len(first) if masks is None else masks[:, 0].tolist()
        log_probabilities = [-value / 16 - each for value, each in zip(first, allowed, strict=True)]
        if self._is_box:
            return [np.array([value, -value], np.float32) for value in first], log_probabilities
        return [int(value * 8) % 2 for value in first], log_probabilities


class Side(RemoteRounds):
    """Of a game, with all that is answered to it."""

    def __init__(self, name: str) -> None:
        self._experience = SPACES[name]
        self._has_masks = name == "masked"
        self._has_space = True
        self._taken = [0.5, -0.5] if name == "box" else 1
        super().__init__(self._experience)
        self.state.sessions.count_free = lambda: 2**20 * self._has_space  # type: ignore[method-assign]
        self.inference._policy = FakePolicy(name == "box")  # type: ignore[assignment]
        self.inference.add_client(KEY, ActorProgress(*KEY, settings=7))

    def run(self, version: int, event: str, rows: Sequence[Row], are_together: bool) -> Answers:
        """What is answered to rows after an event. When the queue is full, they are sent twice before it has room."""
        self.state.weights = weights(version)
        if event == "expiry":
            self.inference.expire(math.inf)
        found: Answers = {}
        for self._has_space in (False, False, True) if event == "full" else (True,):
            together = [row for row in rows if are_together and row[4] != TAKEN]
            for part in [together, *[[row] for row in rows if row not in together]]:
                if part and not (event == "full" and self._has_space):
                    self._send(part, part is together)
            for _, answer, frames in self.settle():
                found |= read_answer(answer, frames, self._experience.action)
        return found

    def _send(self, rows: Sequence[Row], are_together: bool) -> None:
        episodes, steps, values, rewards, flags = zip(*rows, strict=True)
        observations = b"".join(np.full(4, value, np.float32).tobytes() for value in values)
        masks = [b"".join(bytes([int(value * 8) % 2, 1]) for value in values)] if self._has_masks else []
        if are_together:
            columns = [observations, np.array(rewards, np.float32).tobytes(), bytes(flags), *masks]
            return self.inference.take_message(
                KEY, ActsMessage(episodes, steps, tuple((0, 1, 2**63 - 1)[number % 3] for number in episodes)), columns
            )
        bits: dict[str, Any] = {"taken": self._taken} if flags[0] == TAKEN else {}
        bits |= {"terminated": bool(flags[0] & 1), "truncated": bool(flags[0] & 2)}
        bits |= {"success": bool(flags[0] & 8)} if flags[0] & 4 else {}
        self.inference.take_message(
            KEY,
            ActMessage(episodes[0], steps[0], rewards[0], settings=(0, 1, 2**64 - 1)[episodes[0] % 3], **bits),
            [observations, *masks],
        )

    def count_open(self) -> tuple[int, Counter[str]]:
        """Open episodes, and the segments that were dropped."""
        counts = self.inference.get_counts()
        assert counts is not None
        return counts["open_episodes"], self.state.queue.ledger.get_totals().dropped

    def close(self) -> None:
        self.inference.close()


def read_answer(answer: ActionMessage | ActionsMessage, frames: Sequence[bytes], action: TensorSpec) -> Answers:
    """The action, the reason of a refusal, or "ended", by episode and step; of an end, the step is -1."""
    if isinstance(answer, ActionMessage):
        if answer.reason or answer.action is not None:
            return {
                (answer.episode, answer.step): answer.action
                if answer.reason == ""
                else SAME.get(answer.reason, answer.reason)
            }
        return {(answer.episode, -1): "ended"}
    actions = np.frombuffer(frames[0], action.numpy_dtype()).reshape(len(answer.episodes), *action.shape).tolist()
    found: Answers = {(number, -1): "ended" for number in answer.ended}
    found |= {(each.episode, each.step): SAME.get(each.reason, each.reason) for each in answer.refused}
    return found | dict(zip(zip(answer.episodes, answer.steps, strict=True), actions, strict=True))


def describe(segment: Segment) -> list[Any]:
    """All of a segment: arrays as dtype, shape and bytes."""
    values = [getattr(segment, each.name) for each in fields(segment) if each.name != "extras"]
    values += [segment.extras[name] for name in sorted(segment.extras)]
    return [(each.dtype.str, each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in values]


class Game:
    """The agents' episodes, as a game knows them, and the rows that it sends."""

    def __init__(self) -> None:
        self._agents: dict[int, tuple[int, int]] = {}  # episode and newest step
        self._newest: dict[int, Row] = {}
        self._num_episodes = self._num_rows = 0

    def make_rows(self, kinds: Sequence[str]) -> list[Row]:
        rows = []
        for agent, kind in enumerate(kinds):
            self._num_rows += 1
            value = self._num_rows % 64 / 8
            if kind == "absent":
                continue
            if kind == "again" and agent in self._newest:
                rows.append(self._newest[agent])
                continue
            if agent not in self._agents:
                self._agents[agent] = (self._num_episodes, 0)
                self._num_episodes = self._num_episodes + 1
                step = 0
            elif kind == "old":
                rows.append((-1 - agent, 3, value, 1.0, 0))
                continue
            else:
                step = self._agents[agent][1] + (2 if kind == "skipped" else 1)
            flags = 0 if not step else TAKEN if kind == "taken" else ENDS.get(kind, 0)
            self._newest[agent] = self._agents[agent][0], step, 99.0 if kind == "invalid" else value, value, flags
            rows.append(self._newest[agent])
        return sorted(rows)  # one by one, numbers only grow

    def note(self, rows: Sequence[Row], answers: Answers) -> None:
        """Rows without an answer are sent again as the next step; refused and ended episodes are forgotten."""
        for agent, (episode, step) in list(self._agents.items()):
            newest = max([step, *(row[1] for row in rows if row[0] == episode and (episode, row[1]) in answers)])
            self._agents[agent] = episode, newest
            reasons = {"ended", "ended_episode", "unknown_episode"} & {
                answer for (number, _), answer in answers.items() if number == episode and isinstance(answer, str)
            }
            refused = any((episode, row[1]) in answers and isinstance(answers[episode, row[1]], str) for row in rows)
            if reasons:
                del self._agents[agent]
            elif refused:
                self._agents[agent] = episode, step


MESSAGES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(KINDS), min_size=AGENTS, max_size=AGENTS), st.booleans(), st.sampled_from(EVENTS)
    ),
    min_size=5,
    max_size=30,
)


@pytest.mark.parametrize("name", SPACES)
@settings(deadline=None, max_examples=25)
@given(messages=MESSAGES)
def test_many_in_one_message_are_as_one_by_one(name: str, messages: Any) -> None:
    sides, game = [Side(name) for _ in range(3)], Game()  # together, one by one, and now so, now so
    try:
        for version, (kinds, is_mixed_together, event) in enumerate(messages, 1):
            rows = game.make_rows(kinds)
            together, single, mixed = (
                side.run(version, event, rows, are_together)
                for side, are_together in zip(sides, (True, False, is_mixed_together), strict=True)
            )
            assert together == single == mixed
            game.note(rows, together)
        segments = [sorted((describe(each) for each in side.segments), key=repr) for side in sides]
        assert segments[0] == segments[1] == segments[2]
        assert sides[0].count_open() == sides[1].count_open() == sides[2].count_open()
    finally:
        for side in sides:
            side.close()


def test_rows_may_begin_episodes_in_any_order_and_an_episode_stands_in_one() -> None:
    side = Side("plain")
    try:
        begun = side.run(1, "space", [(5, 0, 0.5, 0.0, 0), (3, 0, 0.5, 0.0, 0), (5, 0, 0.5, 0.0, 0)], True)
        assert begun.pop((3, 0)) in (0, 1)
        assert begun == {(5, 0): 0}  # the second row of it is refused, as another message of one row shows
        assert side.run(1, "space", [(4, 0, 0.5, 0.0, 0), (6, 0, 0.5, 0.0, 0)], True)[4, 0] == "ended_episode"
    finally:
        side.close()


def test_a_policy_that_fails_ends_the_episodes_of_its_rows() -> None:
    side = Side("plain")
    try:
        side.run(1, "space", [(0, 0, 0.5, 0.0, 0)], True)
        side.inference._policy.act_batch = None  # type: ignore[method-assign,assignment]
        failed = side.run(1, "space", [(0, 1, 0.5, 0.0, 0), (1, 0, 0.5, 0.0, 0)], True)
        assert failed == {(0, 1): "failed", (1, 0): "failed"}
        assert side.count_open()[0] == 0
    finally:
        side.close()


@pytest.mark.parametrize(
    ("shape", "limit"), [((4,), MAX_ROWS), ((84, 84, 4), 256)], ids=["few numbers", "frames, of which 256 are 1.5 GB"]
)
def test_as_many_episodes_as_their_memory_allows(shape: tuple[int, ...], limit: int) -> None:
    experience = replace(EXPERIENCE, observation=TensorSpec("float32", shape))
    assert OpenEpisodes(KEY, ActorProgress(*KEY), experience, 256).max_episodes == limit


def test_one_episode_too_many_is_refused_and_the_others_are_taken() -> None:
    side = Side("plain")
    try:
        first = side.run(1, "space", [(number, 0, 0.5, 0.0, 0) for number in range(MAX_ROWS)], True)
        assert set(map(type, first.values())) == {int}
        assert side.run(1, "space", [(MAX_ROWS, 0, 0.5, 0.0, 0), (0, 1, 0.5, 0.0, 0)], True) == {
            (MAX_ROWS, 0): "too_many_episodes",
            (0, 1): 0,
        }
    finally:
        side.close()


@pytest.mark.parametrize(
    ("episodes", "steps", "columns", "problem"),
    [
        ((1, 2), (0, 0), (32, 8, 3), "flags: 3 numbers, expected 2"),
        ((2**63,), (0,), (16, 4, 1), "a number beyond 64 bits"),
    ],
)
def test_columns_that_do_not_fit_together_are_named(
    episodes: tuple[int, ...], steps: tuple[int, ...], columns: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ProtocolViolation, match=problem) as raised:
        RowReader(EXPERIENCE).read_many(ActsMessage(episodes, steps), [bytes(size) for size in columns])
    assert raised.value.code == "malformed"
