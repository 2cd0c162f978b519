"""The open episodes of clients that send observations: each step is taken once, and becomes part of a segment.

A message has rows, each the next step of an episode; an `act` has one. Owns the episodes, their segments' assembly and
the answers, and nothing else: no policy, no clock, no socket, no queue. Called by `RemoteInference`. A step that is
sent again gets the answer that it got before. Legend: N rows of a message, L steps of a segment, K choices of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from shoal.actor.segment_builder import convert_rows
from shoal.errors import InvalidSegment
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.wire import DropReason, ExperienceSpec, Segment, TensorSpec
from shoal.wire.act_rows import ROW_LAST, ActRows
from shoal.wire.action_masks import MASKS, check_masks
from shoal.wire.messages import (
    MAX_ROWS,
    ROW_SUCCESS,
    ROW_TELLS_SUCCESS,
    ROW_TERMINATED,
    ActionMessage,
    ActionsMessage,
    RefusedRow,
)
from shoal.wire.segment import HUMAN, check_bounds, check_values, largest_segment_bytes

ENDED_EPISODE = "ended_episode"
UNKNOWN_EPISODE = "unknown_episode"
WRONG_STEP = "wrong_step"
FAILED = "failed"
INVALID = "invalid"
TOO_MANY = "too_many_episodes"
MIN_EPISODES = 256  # that may be open
_MAX_BYTES = 256 * 2**20  # of the open segments of a client, beyond its first MIN_EPISODES
_WAITING, _CHOSEN, _FULL = range(3)  # for its action; with it; with its segment complete, for room in the queue
Refusal = tuple[str, str]  # reason, detail
Choice = tuple[Any, float, int, Mapping[str, Any]]  # action, log-probability, version, extras of its observation
Answers = list[tuple[ActorKey, ActionMessage | ActionsMessage, Sequence[bytes]]]  # each with its client and its frames


@dataclass(eq=False, slots=True)
class RemoteEpisode:
    """An open episode: what has come since its last segment, and the policy's answers.

    step:    of the newest observation
    choices: of each step, and of the newest observation once it is computed
    used_at: of the newest message, by the caller's clock
    settings: the version of the game's settings
    behaviour:   who took the open steps; "": the policy
    is_assisted: others than the policy have taken steps
    """

    number: int
    observations: list[bytes]
    masks: list[bytes]
    total: float
    used_at: float
    settings: int
    is_assisted: bool
    step: int = 0
    status: int = _WAITING
    behaviour: str = ""
    rewards: list[float] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def choose(self, choice: Choice) -> None:
        """Set the policy's answer to the newest observation."""
        self.choices.append(choice)
        self.status = _CHOSEN

    def add_step(self, rows: ActRows, row: int) -> None:
        """Take the step before the observation of this row."""
        self.observations.append(rows.observations[row])
        if rows.masks:
            self.masks.append(rows.masks[row])
        self.rewards.append(rows.rewards[row])
        self.total += rows.rewards[row]
        self.step, self.status = rows.steps[row], _WAITING

    def take_segment(self, flags: int, experience: ExperienceSpec) -> Segment:
        """The steps since the last segment. The next one begins with the newest observation, and its choice, if there
        is one. flags: of the row that the last step came with; 0: the episode goes on"""
        length = len(self.rewards)
        observation = experience.observation
        action = experience.action
        actions, log_probabilities, versions, extras = zip(*self.choices[:length], strict=True)
        ended = flags & ROW_LAST
        masks = np.frombuffer(b"".join(self.masks), np.uint8).reshape(length + 1, -1) != 0
        segment = Segment(
            np.frombuffer(b"".join(self.observations), observation.numpy_dtype()).reshape(-1, *observation.shape),
            np.array(actions, action.numpy_dtype()).reshape(length, *action.shape),
            np.array(self.rewards, np.float32),
            np.array(log_probabilities, np.float32),
            np.array(versions, np.int64),
            bool(flags & ROW_TERMINATED),
            bool(ended and not flags & ROW_TERMINATED),
            self.total if ended else None,
            self.step if ended else None,
            {
                each.name: masks if each.name == MASKS else np.asarray(extras[0][each.name])[None]
                for each in experience.extras
            },
            settings=self.settings,
            success=bool(flags & ROW_SUCCESS) if ended and flags & ROW_TELLS_SUCCESS else None,
            behaviour=self.behaviour,
            assisted=self.is_assisted,
            episode=self.number,
        )
        self.observations = self.observations[-1:]
        self.masks = self.masks[-1:]
        self.rewards = []
        self.choices = self.choices[length:]
        return segment


class RowAnswers:
    """The answers to the rows of a message, while some wait. A row that waits with an earlier message is answered with
    that.

    is_single: it is an `act`
    sink:      takes the message, once no row waits
    """

    def __init__(self, key: ActorKey, rows: ActRows, is_single: bool, sink: Answers, action: TensorSpec) -> None:
        self.key = key
        self.rows = rows
        self._is_single = is_single
        self._sink = sink
        self._action = action
        self.num_waiting = self._version = 0  # rows whose answer is still to come
        self._actions: dict[int, Any] = {}
        self._refused: list[RefusedRow] = []
        self._ends: list[int] = []

    def answer(self, rows: Sequence[int], actions: Sequence[Any], version: int) -> None:
        for row, action in zip(rows, actions, strict=True):
            self._actions[row] = action
        self._version = max(self._version, version)

    def end(self, row: int) -> None:
        """An episode has ended with this row."""
        self._ends.append(self.rows.episodes[row])

    def refuse(self, row: int, reason: str, detail: str = "") -> None:
        self._refused.append(RefusedRow(row, self.rows.episodes[row], self.rows.steps[row], reason, detail))

    def deliver(self, num_rows: int = 0) -> None:
        """So many rows wait no longer: with the last one the message leaves; none where each is answered with an
        earlier one."""
        self.num_waiting -= num_rows
        if self.num_waiting or not (self._actions or self._refused or self._ends):
            return
        episodes, steps = self.rows.episodes, self.rows.steps
        if self._is_single:
            action = self._actions.get(0)
            reason = ""
            detail = ""
            if isinstance(action, np.ndarray):
                action = action.ravel().tolist()
            if self._refused:
                reason, detail = self._refused[0].reason, self._refused[0].detail
            single = ActionMessage(episodes[0], steps[0], action, self._version, reason, detail or msgspec.UNSET)
            self._sink.append((self.key, single, ()))
            return
        chosen = sorted(self._actions)
        if len(chosen) < len(episodes):
            episodes, steps = [episodes[row] for row in chosen], [steps[row] for row in chosen]
        actions = np.array([self._actions[row] for row in chosen], self._action.numpy_dtype())
        ends = tuple(self._refused), tuple(self._ends)
        message = ActionsMessage(tuple(episodes), tuple(steps), self._version, *ends)
        self._sink.append((self.key, message, [actions.tobytes()]))


class OpenEpisodes(dict[int, RemoteEpisode]):
    """A client and its open episodes by number. `last_number` is the highest that it has begun: numbers only grow.

    max_single: how many may be open when an `act` begins one
    behaviour:  who acts; "": the policy, unless a message says otherwise
    """

    def __init__(self, key: ActorKey, progress: ActorProgress, experience: ExperienceSpec, max_single: int) -> None:
        super().__init__()
        self.key = key
        self.progress = progress
        self.max_single = max_single
        self._experience = experience
        self.max_episodes = min(MAX_ROWS, max(MIN_EPISODES, _MAX_BYTES // largest_segment_bytes(experience)))
        self.last_number, self.behaviour = -1, ""

    def take(
        self, answers: RowAnswers, refused: dict[int, Refusal], now_s: float, limit: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Take the next step of each row's episode, unless it may complete a segment; answer what needs no policy.

        limit: of the open episodes, for those that begin

        Returns the rows that need an action now, those that complete a segment of the policy's, which takes a slot of
        the queue, and those with a step of others, whose segments take none. Raises InvalidSegment for what is `taken`
        in a single row, which changes nothing.
        """
        rows, longest = answers.rows, self._experience.segment_length
        asking: list[int] = []
        filling: list[int] = []
        showing: list[int] = []
        others: list[int] = []
        if len(rows.episodes) > 1 and len(set(rows.episodes)) < len(rows.episodes):
            seen: set[int] = set()
            for row, number in enumerate(rows.episodes):
                if number in seen:
                    refused.setdefault(row, (WRONG_STEP, "the episode stands in an earlier row"))
                seen.add(number)
        is_plain = rows.taken is msgspec.UNSET and not self.behaviour
        for row, (number, step, flags) in enumerate(zip(rows.episodes, rows.steps, rows.flags, strict=True)):
            if refused and row in refused:
                continue
            episode = self.get(number)
            if episode is None or step != episode.step + 1 or episode.status != _CHOSEN:
                others.append(row)
                continue
            episode.used_at = now_s
            if not is_plain or episode.behaviour:
                (filling if self._fills_slot(episode, rows, row) else showing).append(row)
            elif flags & ROW_LAST or len(episode.rewards) + 1 == longest:
                filling.append(row)
            else:
                episode.add_step(rows, row)
                asking.append(row)
        last_number = self.last_number  # of earlier messages: the rows of this one may be in any order
        for row in others:
            if self._take_other(answers, row, last_number, now_s, limit):
                asking.append(row)
        for row, refusal in refused.items():
            answers.refuse(row, *refusal)
        answers.num_waiting = len(asking) + len(filling) + len(showing)
        return asking, filling, showing

    def _fills_slot(self, episode: RemoteEpisode, rows: ActRows, row: int) -> bool:
        """Whether a step that others than the policy have taken, or that follows such ones, completes a segment of the
        policy's."""
        _, behaviour = self._read_step(episode, rows)
        is_cut = bool(episode.rewards) and episode.behaviour != behaviour
        num_steps = 1 if is_cut else len(episode.rewards) + 1
        is_last = bool(rows.flags[row] & ROW_LAST) or num_steps == self._experience.segment_length
        return (is_cut and not episode.behaviour) or (is_last and not behaviour)

    def _read_step(self, episode: RemoteEpisode, rows: ActRows) -> tuple[Choice, str]:
        """What was done at the observation before, and by whom: the answer, or what was `taken` in its place. Raises
        InvalidSegment."""
        answer = episode.choices[-1]
        spec = self._experience.action
        given = rows.taken
        if given is msgspec.UNSET:
            if self.behaviour:
                problem = f"is missing: in this session {self.behaviour} acts"
                raise InvalidSegment(DropReason.INVALID_FRAMES, "taken", problem)
            return answer, ""
        given = np.asarray(given)
        given = given.reshape(spec.shape) if given.size == math.prod(spec.shape) else given
        action = convert_rows("taken", given, spec.numpy_dtype(), spec.shape)
        check_values("taken", action, spec)
        check_bounds(action[None], self._experience)
        if episode.masks:
            mask = np.frombuffer(episode.masks[-1], np.bool_)
            check_masks(action[None], np.stack([mask, mask]), True, self._experience)
        return (action, 0.0, 0, answer[3]), self.behaviour or HUMAN

    def _take_other(self, answers: RowAnswers, row: int, last_number: int, now_s: float, limit: int) -> bool:
        """Begin an episode with a row, or answer one that is no next step, or let it wait with an earlier message;
        returns whether it needs an action."""
        rows = answers.rows
        number = rows.episodes[row]
        step = rows.steps[row]
        is_last = rows.flags[row] & ROW_LAST
        if (episode := self.get(number)) is not None:
            episode.used_at = now_s
            if step == episode.step and episode.status != _WAITING:
                action, _, version, _ = episode.choices[-1]
                answers.answer([row], [action], version)
            elif step != episode.step + (episode.status == _FULL):
                answers.refuse(row, WRONG_STEP)
        elif number <= last_number and is_last:  # the answer to the end may have been lost
            answers.end(row)
        elif number <= last_number or step != 0 or is_last:
            answers.refuse(row, ENDED_EPISODE if number <= last_number else UNKNOWN_EPISODE)
        elif len(self) >= limit:
            answers.refuse(row, TOO_MANY, f"{len(self)} are open, at most {limit}")
        else:
            given, newest = rows.settings[row], self.progress.settings
            settings, masks = given if 0 < given <= newest else newest, [rows.masks[row]] if rows.masks else []
            observed, is_assisted = ([rows.observations[row]], masks), rows.taken is not msgspec.UNSET
            self[number] = RemoteEpisode(number, *observed, rows.rewards[row], now_s, settings, is_assisted)
            self.last_number = max(self.last_number, number)
            return True
        return False

    def hold(self, number: int) -> None:
        """The next step of this episode completes a segment, for which there is no room."""
        self[number].status = _FULL

    def complete(self, rows: ActRows, row: int) -> list[Segment]:
        """Take the step of a row that completes segments; returns these: the one before where others act from now on,
        and its own."""
        episode, flags = self[rows.episodes[row]], rows.flags[row]
        segments: list[Segment] = []
        choice, behaviour = self._read_step(episode, rows)
        if episode.rewards and episode.behaviour != behaviour:
            segments.append(episode.take_segment(0, self._experience))
        episode.choices[-1], episode.behaviour = choice, behaviour
        episode.is_assisted |= bool(behaviour)
        episode.add_step(rows, row)
        if flags & ROW_LAST or len(episode.rewards) == self._experience.segment_length:
            segments.append(episode.take_segment(flags, self._experience))
        if flags & ROW_LAST:
            del self[episode.number]
        return segments

    def take_idle(self, before_s: float) -> list[RemoteEpisode]:
        """Remove the episodes whose answers no message has followed since `before_s`."""
        idle = [each for each in self.values() if each.status == _CHOSEN and each.used_at < before_s]
        for each in idle:
            del self[each.number]
        return idle

    def take_shown(self, episodes: Sequence[RemoteEpisode]) -> Iterator[Segment]:
        """What others have shown since the last segments of episodes that do not go on."""
        for each in episodes:
            if each.behaviour and each.rewards:
                yield each.take_segment(0, self._experience)
