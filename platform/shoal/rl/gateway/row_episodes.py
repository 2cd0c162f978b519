"""The open episodes of a client in columns, for a game with an agent in each row of its messages (`acts`).

As `remote_episodes` does for one step at a time: each step is taken once, and becomes part of a segment; a step that is
sent again gets its answer again. The next steps of N episodes are a few operations on arrays, and what else a row may
be (a first step, a repetition, a mistake) is found row by row. Called by `RemoteInference`. No policy, clock or queue.
Legend: N rows of a message, S slots, each of an open episode, T steps of the longest segment, K choices of a mask.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from shoal.batching.batcher import Prediction
from shoal.rl.gateway.remote_episodes import (
    ENDED_EPISODE,
    FAILED,
    UNKNOWN_EPISODE,
    WRONG_STEP,
    Answers,
    Choice,
    Choices,
    Observed,
    OpenEpisodes,
    RemoteEpisode,
)
from shoal.wire import ExperienceSpec, Segment
from shoal.wire.act_rows import ActRows
from shoal.wire.action_masks import MASKS
from shoal.wire.experience_spec import NO_EXTRAS, TensorSpec
from shoal.wire.messages import (
    MAX_ROWS,
    ROW_SUCCESS,
    ROW_TELLS_SUCCESS,
    ROW_TERMINATED,
    ROW_TRUNCATED,
    ActionMessage,
    ActionsMessage,
    RefusedRow,
    encode,
)

INVALID, TOO_MANY = "invalid", "too_many_episodes"
_WAITING, _CHOSEN, _FULL = range(3)  # for its action; with it; with its segment complete, for room in the queue
_MAX_BYTES = 256 * 2**20  # of the columns of a client, beyond its first MIN_EPISODES
MIN_EPISODES = 256
_FIRST_SLOTS = 16
Refusal = tuple[str, str]  # reason, detail
logger = logging.getLogger(__name__)


class PendingActions:
    """The answer to an `acts`, while rows of it wait. A row that waits with an earlier `acts` is answered with that."""

    def __init__(self, rows: ActRows, action: TensorSpec) -> None:
        self.rows = rows
        self.num_waiting = 0  # rows whose answer is still to come
        self._actions = np.zeros((len(rows.episodes), *action.shape), action.numpy_dtype())
        self._has_action = np.zeros(len(rows.episodes), np.bool_)
        self._version = 0
        self._refused: list[RefusedRow] = []
        self._ends: list[int] = []

    def answer(self, rows: Any, actions: Any, version: int) -> None:
        """Set the actions of rows: of one by its number, or of an array of them."""
        self._actions[rows], self._has_action[rows] = actions, True
        self._version = max(self._version, version)

    def end(self, row: int) -> None:
        """An episode has ended with this row."""
        self._ends.append(self.rows.episodes[row])

    def refuse(self, row: int, reason: str, detail: str = "") -> None:
        step = int(self.rows.steps[row])
        self._refused.append(RefusedRow(row, self.rows.episodes[row], step, reason, detail))

    def take(self, row: int, answer: ActionMessage) -> None:
        """Take the answer to a row that waits."""
        self.num_waiting -= 1
        if answer.reason:
            self.refuse(row, answer.reason, answer.detail or "")
        elif answer.action is None:
            self.end(row)
        else:
            self.answer(row, np.reshape(answer.action, self._actions.shape[1:]), answer.version)

    def to_frames(self) -> list[bytes]:
        """The message; none where each row is answered with an earlier one."""
        episodes, steps, actions = self.rows.episodes, self.rows.steps, self._actions
        if not self._has_action.all():
            chosen = np.flatnonzero(self._has_action)
            if not len(chosen) and not self._refused and not self._ends:
                return []
            episodes, steps, actions = [episodes[row] for row in chosen.tolist()], steps[chosen], actions[chosen]
        ends = tuple(self._refused), tuple(self._ends)
        message = ActionsMessage(tuple(episodes), tuple(steps.tolist()), self._version, *ends)
        return [encode(message), actions.tobytes()]


class TakenRows(NamedTuple):
    """What became of the rows of an `acts`: those that need an action now, and those that complete a segment."""

    asking: np.ndarray
    completing: np.ndarray


class RowEpisodes:
    """The columns, a row of each for one open episode. They grow by doubling, up to `max_episodes`.

    client: whose numbers they have; its episodes that single `act` messages have begun come here, and go back
    """

    number: np.ndarray  # int64 [S]
    settings: np.ndarray  # int64 [S], their version
    step: np.ndarray  # int64 [S], of the newest observation
    length: np.ndarray  # int64 [S], steps of the open segment
    total: np.ndarray  # float64 [S], return until now
    used_at: np.ndarray  # float64 [S], of the newest message, by the caller's clock
    status: np.ndarray  # uint8 [S]
    observations: np.ndarray  # [S, T+1, *obs]
    masks: np.ndarray  # bool [S, T+1, K]
    actions: np.ndarray  # [S, T, *act]
    rewards: np.ndarray  # float32 [S, T]
    log_probabilities: np.ndarray  # float32 [S, T]
    versions: np.ndarray  # int64 [S, T]

    def __init__(self, client: OpenEpisodes, experience: ExperienceSpec, num_choices: int) -> None:
        self._client, self._experience = client, experience
        self._slots: dict[int, int] = {}  # by the number of the episode
        self._free: list[int] = []
        observation, action, length = experience.observation, experience.action, experience.segment_length
        self._columns: dict[str, tuple[tuple[int, ...], Any]] = {
            **dict.fromkeys(("number", "settings", "step", "length"), ((), np.int64)),
            **dict.fromkeys(("total", "used_at"), ((), np.float64)),
            "status": ((), np.uint8),
            "observations": ((length + 1, *observation.shape), observation.numpy_dtype()),
            "masks": ((length + 1, num_choices), np.bool_),
            "actions": ((length, *action.shape), action.numpy_dtype()),
            **dict.fromkeys(("rewards", "log_probabilities"), ((length,), np.float32)),
            "versions": ((length,), np.int64),
        }
        # What a segment carries that begins with the open one's first step, or with the newest one.
        self.extras: list[Mapping[str, Any]] = []  # [S]
        self.newest_extras: list[Mapping[str, Any]] = []  # [S]
        for name, (shape, dtype) in self._columns.items():
            setattr(self, name, np.zeros((0, *shape), dtype))
        slot_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self._columns.values())
        self.max_episodes = min(MAX_ROWS, max(MIN_EPISODES, _MAX_BYTES // slot_bytes))

    def __len__(self) -> int:
        return len(self._slots)

    def is_waiting(self, number: int, step: int) -> bool:
        """Whether this step of an episode waits for its answer."""
        slot = self._slots.get(number, -1)
        status = self.status[slot] if slot >= 0 else _CHOSEN
        return status != _CHOSEN and step == self.step[slot] + (status == _FULL)

    def get_numbers(self) -> list[int]:
        """The numbers of the open episodes."""
        return list(self._slots)

    def find_slots(self, episodes: Sequence[int]) -> np.ndarray:
        """Their slots [N]; -1 where none is open."""
        return np.fromiter(map(self._slots.get, episodes, repeat(-1)), np.int64, len(episodes))

    def take(self, pending: PendingActions, refused: Mapping[int, Refusal | None], now_s: float) -> TakenRows:
        """Take the next step of each row's episode, unless it completes a segment; answer what needs no policy.

        refused: rows that are not taken; None: it waits with an earlier message
        """
        rows, slots, others = pending.rows, self.find_slots(pending.rows.episodes), dict(refused)
        if len(set(rows.episodes)) < len(rows.episodes):
            seen: set[int] = set()
            for row, number in enumerate(rows.episodes):
                if number in seen:
                    others.setdefault(row, (WRONG_STEP, "the episode stands in an earlier row"))
                seen.add(number)
        last_number = self._client.last_number  # of earlier messages: the rows of this one may be in any order
        is_free = np.ones(len(slots), np.bool_)
        is_free[list(others)] = False
        asking = self._begin(rows, np.flatnonzero(is_free & (slots < 0)), now_s)
        is_free[asking] = False
        is_next = is_free & (slots >= 0)
        is_next &= (rows.steps == self.step[slots] + 1) & (self.status[slots] == _CHOSEN)
        self.used_at[slots[is_next]] = now_s
        completes = is_next & (rows.are_last | (self.length[slots] + 1 == self._experience.segment_length))
        plain = np.flatnonzero(is_next & ~completes)
        self._take_step(rows, plain, slots[plain])
        for row in np.flatnonzero(is_free & ~is_next).tolist():
            self._take_other(pending, row, last_number, now_s)
        for row, refusal in others.items():
            if refusal is not None:
                pending.refuse(row, *refusal)
        return TakenRows(np.concatenate([plain, asking]), np.flatnonzero(completes))

    def _begin(self, rows: ActRows, at: np.ndarray, now_s: float) -> np.ndarray:
        """Begin the episodes of those rows that do, as many as may be open; returns these rows."""
        at = at[(rows.steps[at] == 0) & ~rows.are_last[at] & (rows.numbers[at] > self._client.last_number)]
        at = at[: max(0, self.max_episodes - len(self) - len(self._client.episodes))]
        slots = self._open([rows.episodes[row] for row in at.tolist()])
        self.step[slots], self.length[slots], self.status[slots] = 0, 0, _WAITING
        self.total[slots], self.used_at[slots] = rows.rewards[at], now_s
        given, newest = rows.settings[at], self._client.progress.settings
        self.settings[slots] = np.where((given > 0) & (given <= newest), given, newest)
        self.observations[slots, 0], self.masks[slots, 0] = rows.observations[at], rows.masks[at]
        newest = int(rows.numbers[at].max(initial=0))
        self._client.last_number = max(self._client.last_number, newest)  # in Python: that of `act` may have 64 bits
        return at

    def _take_other(self, pending: PendingActions, row: int, last_number: int, now_s: float) -> None:
        """Answer a row that is neither the next step of an episode nor its first one, or let it wait with an earlier
        message."""
        number, step, is_last = pending.rows.episodes[row], pending.rows.steps[row], pending.rows.are_last[row]
        slot = self._slots.get(number)
        if slot is None:
            if number <= last_number and is_last:  # the answer to the end may have been lost
                pending.end(row)
            elif number <= last_number or step != 0 or is_last:
                pending.refuse(row, ENDED_EPISODE if number <= last_number else UNKNOWN_EPISODE)
            else:
                pending.refuse(row, TOO_MANY, f"{len(self)} are open, at most {self.max_episodes}")
            return
        self.used_at[slot] = now_s
        known, status = self.step[slot], self.status[slot]
        if step == known and status != _WAITING:
            at = self.length[slot]
            pending.answer(row, self.actions[slot, at], int(self.versions[slot, at]))
        elif step != known + (status == _FULL):
            pending.refuse(row, WRONG_STEP)

    def _open(self, numbers: Sequence[int]) -> np.ndarray:
        """Slots of new episodes."""
        while len(self._free) < len(numbers) or not len(self.number):
            known = len(self.number)
            size = max(_FIRST_SLOTS, 2 * known)
            for name, (shape, dtype) in self._columns.items():
                larger = np.zeros((size, *shape), dtype)
                larger[:known] = getattr(self, name)
                setattr(self, name, larger)
            self._free += range(known, size)
            self.extras += [NO_EXTRAS] * (size - known)
            self.newest_extras += [NO_EXTRAS] * (size - known)
        self._slots |= {number: self._free.pop() for number in numbers}
        slots = self.find_slots(numbers)
        self.number[slots] = numbers
        return slots

    def _take_step(self, rows: ActRows, at: np.ndarray, slots: np.ndarray) -> None:
        """Add the step before the observation of each of these rows, of these slots."""
        length = self.length[slots]
        self.rewards[slots, length] = rows.rewards[at]
        length = length + 1
        self.observations[slots, length], self.masks[slots, length] = rows.observations[at], rows.masks[at]
        self.length[slots], self.step[slots], self.status[slots] = length, rows.steps[at], _WAITING
        self.total[slots] += rows.rewards[at]

    def set_choices(
        self,
        slots: np.ndarray,
        actions: np.ndarray,
        log_probabilities: Sequence[float],
        version: int,
        extras: Sequence[Mapping[str, Any]],
    ) -> None:
        """The policy's answers to the newest observations of these slots. extras: of each, or empty"""
        length = self.length[slots]
        self.actions[slots, length], self.log_probabilities[slots, length] = actions, log_probabilities
        self.versions[slots, length], self.status[slots] = version, _CHOSEN
        for slot, at, each in zip(slots, length, extras, strict=False):
            self.newest_extras[slot] = each
            if at == 0:
                self.extras[slot] = each

    def hold(self, numbers: Sequence[int]) -> None:
        """The next steps of these episodes complete their segments, for which there is no room."""
        self.status[self.find_slots(numbers)] = _FULL

    def complete(self, rows: ActRows, at: np.ndarray) -> list[Segment]:
        """Take the steps of rows that complete segments; returns these, whose arrays are parts of common ones."""
        slots = self.find_slots([rows.episodes[row] for row in at.tolist()])
        self._take_step(rows, at, slots)
        lengths = self.length[slots]
        end = int(lengths.max())
        observations, masks = self.observations[slots, : end + 1], self.masks[slots, : end + 1]
        actions, rewards, versions = self.actions[slots, :end], self.rewards[slots, :end], self.versions[slots, :end]
        log_probabilities = self.log_probabilities[slots, :end]
        numbers = (slots, lengths, rows.flags[at], self.total[slots], self.step[slots], self.settings[slots])
        segments = []
        for index, (slot, length, flags, total, step, settings, number) in enumerate(
            zip(*(each.tolist() for each in (*numbers, self.number[slots])), strict=True)
        ):
            is_last = flags & (ROW_TERMINATED | ROW_TRUNCATED) != 0
            extras = {
                each.name: masks[index, : length + 1] if each.name == MASKS else self.extras[slot][each.name][None]
                for each in self._experience.extras
            }
            segments.append(
                Segment(
                    observations[index, : length + 1],
                    actions[index, :length],
                    rewards[index, :length],
                    log_probabilities[index, :length],
                    versions[index, :length],
                    bool(flags & ROW_TERMINATED),
                    flags & (ROW_TERMINATED | ROW_TRUNCATED) == ROW_TRUNCATED,
                    total if is_last else None,
                    step if is_last else None,
                    extras,
                    settings=settings,
                    success=bool(flags & ROW_SUCCESS) if is_last and flags & ROW_TELLS_SUCCESS else None,
                    episode=number,
                )
            )
            if is_last:
                self.close(number)
        self.observations[slots, 0], self.masks[slots, 0] = (
            self.observations[slots, lengths],
            self.masks[slots, lengths],
        )
        self.length[slots] = 0
        return segments

    def close(self, number: int) -> None:
        """Forget an episode."""
        self._free.append(self._slots.pop(number))

    def take_idle(self, before_s: float) -> list[int]:
        """Remove the episodes whose answers no message has followed since `before_s`; returns their numbers."""
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        idle = slots[(self.status[slots] == _CHOSEN) & (self.used_at[slots] < before_s)]
        numbers: list[int] = self.number[idle].tolist()
        for number in numbers:
            self.close(number)
        return numbers

    def adopt(self, episode: RemoteEpisode) -> None:
        """Go on with an episode that waits for no action, and whose steps were single messages until now."""
        (slot,), observation = self._open([episode.number]), self._experience.observation
        length, spare = len(episode.steps), self.masks.shape[2]
        frames = b"".join(each.frame for each in episode.observations)
        seen = np.frombuffer(frames, observation.numpy_dtype()).reshape(length + 1, *observation.shape)
        self.observations[slot, : length + 1] = seen
        masks = np.frombuffer(b"".join(each.mask for each in episode.observations), np.bool_)
        self.masks[slot, : length + 1] = masks.reshape(length + 1, spare)
        self.rewards[slot, :length] = [reward for _, reward in episode.steps]
        for at, choice in enumerate([*(each for each, _ in episode.steps), episode.choice]):
            assert choice is not None
            self.length[slot] = at
            self.set_choices(np.array([slot]), choice.action, [choice.log_probability], choice.version, [choice.extras])
        self.step[slot], self.total[slot], self.used_at[slot] = episode.step, episode.total, episode.used_at
        self.settings[slot] = episode.settings

    def release(self, number: int) -> RemoteEpisode | None:
        """Remove an episode that waits for no action, for single messages; None where none is open, or it waits."""
        slot = self._slots.get(number, -1)
        if slot < 0 or self.status[slot] != _CHOSEN:
            return None
        length = int(self.length[slot])
        choices = [
            Choice(action if action.ndim else action.item(), log_probability, version, self.extras[slot])
            for action, log_probability, version in zip(
                self.actions[slot, : length + 1].copy(),
                self.log_probabilities[slot, : length + 1].tolist(),
                self.versions[slot, : length + 1].tolist(),
                strict=True,
            )
        ]
        seen = zip(self.observations[slot, : length + 1], self.masks[slot, : length + 1], strict=True)
        observations = [Observed(observation.tobytes(), mask.tobytes()) for observation, mask in seen]
        steps = list(zip(choices, self.rewards[slot, :length].tolist(), strict=False))
        total, used_at, step = float(self.total[slot]), float(self.used_at[slot]), int(self.step[slot])
        self.close(number)
        settings = int(self.settings[slot])
        newest = choices[-1]._replace(extras=self.newest_extras[slot])
        return RemoteEpisode(number, observations, total, used_at, steps, step, newest, settings=settings)


class AnsweringRows:
    """Rows of an `acts` that wait for their actions: the batcher's future of them."""

    __slots__ = ("_answers", "_at", "_client", "_episodes", "_pending", "_slots")

    def __init__(self, answers: Answers, client: OpenEpisodes, episodes: RowEpisodes, pending: PendingActions, at: Any):
        self._answers, self._client, self._episodes, self._pending, self._at = answers, client, episodes, pending, at
        self._slots = episodes.find_slots(pending.rows.episodes)[at]

    def done(self) -> bool:
        return False

    def set_result(self, result: Prediction[Choices], /) -> None:
        actions, version = np.asarray(result.outputs.actions), result.outputs.version
        self._episodes.set_choices(self._slots, actions, *result.outputs[1:])
        self._pending.answer(self._at, actions, version)
        self._deliver()

    def set_exception(self, error: Exception, /) -> None:
        """The policy has failed: the episodes end without their open segments."""
        logger.error("remote inference failed: %r", error)
        for row in self._at.tolist():
            self._episodes.close(self._pending.rows.episodes[row])
            self._pending.refuse(row, FAILED)
        self._deliver()

    def _deliver(self) -> None:
        self._pending.num_waiting -= len(self._at)
        if not self._pending.num_waiting:
            self._answers.append((self._client.key, self._pending.to_frames()))
