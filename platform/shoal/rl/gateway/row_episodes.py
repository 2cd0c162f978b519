"""The open episodes of a client in columns, for a game with an agent in each row of its messages (`acts`).

As `remote_episodes` does for one step at a time: each step is taken once, and becomes part of a segment; a step that is
sent again gets its answer again. The next steps of N episodes are a few operations on arrays, and what else a row may
be (a first step, a repetition, a mistake) is found row by row. Called by `RemoteInference`. No policy, clock or queue.
Legend: N rows of a message, S slots, each of an open episode, T steps of the longest segment, K choices of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import InvalidSegment, ProtocolViolation
from shoal.rl.gateway.remote_episodes import (
    ENDED_EPISODE,
    UNKNOWN_EPISODE,
    WRONG_STEP,
    Choice,
    Observed,
    OpenEpisodes,
    RemoteEpisode,
)
from shoal.wire import ExperienceSpec, Segment
from shoal.wire.action_masks import MASKS, check_choices
from shoal.wire.experience_spec import NO_EXTRAS, TensorSpec
from shoal.wire.messages import (
    MAX_ROWS,
    ROW_SUCCESS,
    ROW_TELLS_SUCCESS,
    ROW_TERMINATED,
    ROW_TRUNCATED,
    ActionsMessage,
    ActsMessage,
    RefusedRow,
    encode,
)
from shoal.wire.segment import REWARD, check_values

INVALID, TOO_MANY = "invalid", "too_many_episodes"
_WAITING, _CHOSEN, _FULL = range(3)  # for its action; with it; with its segment complete, for room in the queue
_MAX_BYTES = 256 * 2**20  # of the columns of a client, beyond its first MIN_EPISODES
MIN_EPISODES = 256
_FIRST_SLOTS = 16


Refusal = tuple[str, str]  # reason, detail


class ActRows(NamedTuple):
    """The content of an `acts`: observations [N, *obs], rewards float32 [N], flags uint8 [N], masks bool [N, K]."""

    episodes: Sequence[int]
    steps: np.ndarray
    observations: np.ndarray
    rewards: np.ndarray
    flags: np.ndarray
    masks: np.ndarray

    @property
    def are_last(self) -> np.ndarray:
        """Whether the episode ended after the step before. [N]"""
        ended: np.ndarray = (self.flags & (ROW_TERMINATED | ROW_TRUNCATED)) != 0
        return ended


def read_rows(
    message: ActsMessage, frames: Sequence[bytes], experience: ExperienceSpec, choices: tuple[int, ...]
) -> tuple[ActRows, dict[int, InvalidSegment]]:
    """The rows, and what is outside of the spec in which of them. Raises ProtocolViolation for columns of another
    length. choices: of an action's numbers, in a run with masks"""
    num_rows = len(message.episodes)
    if not 0 < num_rows <= MAX_ROWS:
        raise ProtocolViolation("malformed", f"acts: {num_rows} rows, expected 1 to {MAX_ROWS}")
    specs = [experience.observation, TensorSpec("float32"), TensorSpec("uint8"), TensorSpec("uint8", (sum(choices),))]
    expected = dict(zip(("observations", "rewards", "flags", "masks")[: 4 if choices else 3], specs, strict=False))
    if len(message.steps) != num_rows or len(frames) != len(expected):
        problem = f"{num_rows} episodes, {len(message.steps)} steps and {len(frames)} tensors, expected as many steps "
        raise ProtocolViolation("malformed", f"acts: {problem}as episodes, and {', '.join(expected)}")
    columns: list[np.ndarray] = []
    for (name, spec), frame in zip(expected.items(), frames, strict=True):
        dtype, number = spec.numpy_dtype(), num_rows * math.prod(spec.shape)
        if not frame and name in ("rewards", "flags"):
            frame = bytes(number * dtype.itemsize)
        if len(frame) != number * dtype.itemsize:
            came = f"{len(frame) / dtype.itemsize:g} numbers, expected {number}"
            shape = f"{spec.dtype} {[num_rows, *spec.shape]}"
            raise ProtocolViolation("malformed", f"acts: {name}: {came} ({shape})")
        columns.append(np.frombuffer(frame, dtype).reshape(num_rows, *spec.shape))
    observations, rewards, flags = columns[:3]
    masks = columns[3] if choices else np.zeros((num_rows, 0), np.uint8)

    def check(part: slice) -> None:
        check_values("reward", rewards[part], REWARD)
        check_values("observation", observations[part], experience.observation)
        if choices:  # after a terminal state, no action is chosen
            check_choices(masks[part][flags[part] & ROW_TERMINATED == 0], choices)

    try:
        steps, _ = np.array([message.steps, message.episodes], np.int64)
    except OverflowError:
        raise ProtocolViolation("malformed", "acts: a number beyond 64 bits, with sign") from None
    rows = ActRows(message.episodes, steps, observations, rewards, flags, masks != 0)
    return rows, _find_invalid(check, num_rows)


def _find_invalid(check: Callable[[slice], None], num_rows: int) -> dict[int, InvalidSegment]:
    """The error of each row that has one: of all together, if there is none."""
    try:
        check(slice(None))
    except InvalidSegment:
        invalid = {}
        for row in range(num_rows):
            try:
                check(slice(row, row + 1))
            except InvalidSegment as error:
                invalid[row] = error
        return invalid
    return {}


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
    completing: list[int]


class RowEpisodes:
    """The columns, a row of each for one open episode. They grow by doubling, up to `max_episodes`.

    client: whose numbers they have; its episodes that single `act` messages have begun come here, and go back
    """

    number: np.ndarray  # int64 [S]
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
            **dict.fromkeys(("number", "step", "length"), ((), np.int64)),
            **dict.fromkeys(("total", "used_at"), ((), np.float64)),
            "status": ((), np.uint8),
            "observations": ((length + 1, *observation.shape), observation.numpy_dtype()),
            "masks": ((length + 1, num_choices), np.bool_),
            "actions": ((length, *action.shape), action.numpy_dtype()),
            **dict.fromkeys(("rewards", "log_probabilities"), ((length,), np.float32)),
            "versions": ((length,), np.int64),
        }
        self.extras: list[Mapping[str, Any]] = []  # [S], of the open segment
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
        rows, last_number = pending.rows, self._client.last_number
        slots = self.find_slots(rows.episodes)
        is_next = slots >= 0
        if is_next.any():
            is_next &= (rows.steps == self.step[slots] + 1) & (self.status[slots] == _CHOSEN)
        others = dict(refused)
        is_next[list(others)] = False
        if len(set(rows.episodes)) < len(rows.episodes):
            seen: set[int] = set()
            for row, number in enumerate(rows.episodes):
                if number in seen and row not in others:
                    is_next[row], others[row] = False, (WRONG_STEP, "the episode stands in an earlier row")
                seen.add(number)
        completes = is_next & (rows.are_last | (self._next_lengths(slots) == self._experience.segment_length))
        plain = np.flatnonzero(is_next & ~completes)
        self.take_step(rows, plain, slots[plain])
        self.used_at[slots[is_next]] = now_s
        begun = []
        for row in np.flatnonzero(~is_next).tolist():
            if row in others:
                if (refusal := others[row]) is not None:
                    pending.refuse(row, *refusal)
            elif self._take_other(pending, row, last_number, now_s):
                begun.append(row)
        asking = np.concatenate([plain, begun]).astype(np.int64) if begun else plain
        return TakenRows(asking, np.flatnonzero(completes).tolist())

    def _next_lengths(self, slots: np.ndarray) -> np.ndarray | int:
        return self.length[slots] + 1 if len(self.length) else 0

    def _take_other(self, pending: PendingActions, row: int, last_number: int, now_s: float) -> bool:
        """Answer a row that is no next step, or let it wait with an earlier message; whether it begins an episode.

        last_number: before this message, of which the rows may have their numbers in any order
        """
        number, step, is_last = (
            pending.rows.episodes[row],
            int(pending.rows.steps[row]),
            bool(pending.rows.are_last[row]),
        )
        slot = self._slots.get(number)
        if slot is None:
            if number <= last_number and is_last:  # the answer to the end may have been lost
                pending.end(row)
            elif number <= last_number or step != 0 or is_last:
                pending.refuse(row, ENDED_EPISODE if number <= last_number else UNKNOWN_EPISODE)
            elif len(self) + len(self._client.episodes) >= self.max_episodes:
                pending.refuse(row, TOO_MANY, f"{len(self)} are open, at most {self.max_episodes}")
            else:
                self._begin(number, pending.rows, row, now_s)
                return True
            return False
        self.used_at[slot] = now_s
        known, status = self.step[slot], self.status[slot]
        if step == known and status != _WAITING:
            at = self.length[slot]
            pending.answer(row, self.actions[slot, at], int(self.versions[slot, at]))
        elif step != known + (status == _FULL):
            pending.refuse(row, WRONG_STEP)
        return False

    def _begin(self, number: int, rows: ActRows, row: int, now_s: float) -> None:
        slot = self._open(number)
        self._client.last_number = max(self._client.last_number, number)
        self.step[slot], self.length[slot], self.status[slot] = 0, 0, _WAITING
        self.total[slot], self.used_at[slot] = rows.rewards[row], now_s
        self.observations[slot, 0], self.masks[slot, 0] = rows.observations[row], rows.masks[row]

    def _open(self, number: int) -> int:
        """A slot of a new episode."""
        if not self._free:
            known = len(self.number)
            size = max(_FIRST_SLOTS, 2 * known)
            for name, (shape, dtype) in self._columns.items():
                larger = np.zeros((size, *shape), dtype)
                larger[:known] = getattr(self, name)
                setattr(self, name, larger)
            self._free = list(range(known, size))[::-1]
            self.extras += [NO_EXTRAS] * (size - known)
        slot = self._slots[number] = self._free.pop()
        self.number[slot] = number
        return slot

    def take_step(self, rows: ActRows, at: Any, slots: Any) -> None:
        """Add the step before the observation of each of these rows; of one by its number, or of an array of them."""
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
            if at == 0:
                self.extras[slot] = each

    def hold(self, number: int) -> None:
        """The next step of this episode completes its segment, for which there is no room."""
        self.status[self._slots[number]] = _FULL

    def complete(self, rows: ActRows, row: int) -> tuple[bool, Segment]:
        """Take the step of a row that completes a segment; returns whether the episode ends with it, and the segment.
        The next one begins with its newest observation."""
        slot, flags = self._slots[rows.episodes[row]], int(rows.flags[row])
        self.take_step(rows, row, slot)
        length, is_last = int(self.length[slot]), bool(flags & (ROW_TERMINATED | ROW_TRUNCATED))
        masks = self.masks[slot, : length + 1].copy()
        segment = Segment(
            self.observations[slot, : length + 1].copy(),
            self.actions[slot, :length].copy(),
            self.rewards[slot, :length].copy(),
            self.log_probabilities[slot, :length].copy(),
            self.versions[slot, :length].copy(),
            bool(flags & ROW_TERMINATED),
            flags & (ROW_TERMINATED | ROW_TRUNCATED) == ROW_TRUNCATED,
            float(self.total[slot]) if is_last else None,
            int(self.step[slot]) if is_last else None,
            {
                each.name: masks if each.name == MASKS else np.asarray(self.extras[slot][each.name])[None]
                for each in self._experience.extras
            },
            success=bool(flags & ROW_SUCCESS) if is_last and flags & ROW_TELLS_SUCCESS else None,
        )
        self.observations[slot, 0], self.masks[slot, 0] = self.observations[slot, length], self.masks[slot, length]
        self.length[slot] = 0
        if is_last:
            self.close(rows.episodes[row])
        return is_last, segment

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
        slot, observation = self._open(episode.number), self._experience.observation
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
        return RemoteEpisode(number, observations, total, used_at, steps, step, choices[-1])
