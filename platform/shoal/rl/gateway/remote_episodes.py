"""The open episodes of clients that send observations: each step is taken once, and becomes part of a segment.

A message has rows, each the next step of an episode; an `act` has one. Owns the episodes, their segments' assembly and
the answers, and nothing else: no policy, no clock, no socket, no queue. Called by `RemoteInference`. A step that is
sent again gets the answer that it got before. Legend: N rows of a message, L steps of a segment, K choices of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from shoal.wire.action_masks import MASKS, check_masks, find_choices
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
Asking = dict[int, "RemoteEpisode"]  # by the row of a message
Answers = list[tuple[ActorKey, ActionMessage | ActionsMessage, Sequence[bytes]]]  # each with its client and its frames


@dataclass(eq=False, slots=True)
class RemoteEpisode:
    """An open episode: what has come since its last segment lies in the client's records, from `start` to `newest`.

    total:   return until the last segment
    used_at: of the newest message, by the caller's clock
    settings: the version of the game's settings
    is_assisted: others than the policy have taken steps
    step:    of the newest observation
    behaviour:   who took the steps since the last segment; "": the policy
    extras:  what a segment that begins with the newest observation carries, once its action is computed
    first_extras: of the observation that the open segment begins with
    """

    number: int
    start: int
    newest: int
    total: float
    used_at: float
    settings: int
    is_assisted: bool
    step: int = 0
    status: int = _WAITING
    behaviour: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    first_extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Steps since the last segment."""
        return self.newest - self.start


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

    def answer(self, rows: Iterable[int], actions: Sequence[Any], version: int) -> None:
        self._actions.update(zip(rows, actions, strict=True))
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
        observation, action = experience.observation, experience.action
        self._num_choices = sum(find_choices(experience))
        # For each open episode a record of its newest observation, and of each before it since the last segment: with
        # the reward that came with it, and what was done there.
        fields = [
            ("observation", observation.numpy_dtype(), observation.shape),
            ("mask", np.bool_, (self._num_choices,)),
            ("reward", np.float64),
            ("action", action.numpy_dtype(), action.shape),
            ("log_probability", np.float32),
            ("version", np.int64),
        ]
        self._fields = np.dtype(fields, align=True)
        self._resize(np.zeros(0, f"V{self._fields.itemsize}"))  # without the fields, records are copied much quicker
        self._free: list[int] = []  # where an episode may begin
        self.max_episodes = min(MAX_ROWS, max(MIN_EPISODES, _MAX_BYTES // largest_segment_bytes(experience)))
        self.last_number, self.behaviour = -1, ""

    def take(
        self, answers: RowAnswers, refused: dict[int, Refusal], now_s: float, limit: int
    ) -> tuple[Asking, list[int], list[int]]:
        """Take the next step of each row's episode, unless it may complete a segment; answer what needs no policy.

        limit: of the open episodes, for those that begin

        Returns the rows that need an action now, with their episodes; those that complete a segment of the policy's,
        which takes a slot of the queue; and those with a step of others, whose segments take none. Raises
        InvalidSegment for what is `taken` in a single row, which changes nothing.
        """
        rows, longest = answers.rows, self._experience.segment_length - 1
        last_number = self.last_number  # of earlier messages: the rows of this one may be in any order
        asking: Asking = {}
        filling: list[int] = []
        showing: list[int] = []
        if len(rows.episodes) > 1 and len(set(rows.episodes)) < len(rows.episodes):
            seen: set[int] = set()
            for row, number in enumerate(rows.episodes):
                if number in seen:
                    refused.setdefault(row, (WRONG_STEP, "the episode stands in an earlier row"))
                seen.add(number)
        is_plain = rows.taken is msgspec.UNSET and not self.behaviour
        found = map(self.get, rows.episodes)
        for row, (episode, step, flags) in enumerate(zip(found, rows.steps, rows.flags, strict=True)):
            if refused and row in refused:
                continue
            if episode is None or step != episode.step + 1 or episode.status != _CHOSEN:
                if begun := self._take_other(answers, row, last_number, now_s, limit):
                    asking[row] = begun
                continue
            episode.used_at = now_s
            if not is_plain or episode.behaviour:
                (filling if self._fills_slot(episode, rows, row) else showing).append(row)
            elif flags & ROW_LAST or episode.newest - episode.start == longest:
                filling.append(row)
            else:
                episode.step = step
                episode.newest += 1
                episode.status = _WAITING
                asking[row] = episode
        self._observe(rows, asking)
        for row, refusal in refused.items():
            answers.refuse(row, *refusal)
        answers.num_waiting = len(asking) + len(filling) + len(showing)
        return asking, filling, showing

    def _fills_slot(self, episode: RemoteEpisode, rows: ActRows, row: int) -> bool:
        """Whether a step that others than the policy have taken, or that follows such ones, completes a segment of the
        policy's."""
        _, behaviour = self._read_step(episode, rows)
        is_cut = bool(episode.length) and episode.behaviour != behaviour
        num_steps = 1 if is_cut else episode.length + 1
        is_last = bool(rows.flags[row] & ROW_LAST) or num_steps == self._experience.segment_length
        return (is_cut and not episode.behaviour) or (is_last and not behaviour)

    def _read_step(self, episode: RemoteEpisode, rows: ActRows) -> tuple[np.ndarray | None, str]:
        """What was `taken` in place of the policy's action, and by whom. Raises InvalidSegment."""
        spec = self._experience.action
        given = rows.taken
        if given is msgspec.UNSET:
            if self.behaviour:
                problem = f"is missing: in this session {self.behaviour} acts"
                raise InvalidSegment(DropReason.INVALID_FRAMES, "taken", problem)
            return None, ""
        given = np.asarray(given)
        given = given.reshape(spec.shape) if given.size == math.prod(spec.shape) else given
        action = convert_rows("taken", given, spec.numpy_dtype(), spec.shape)
        check_values("taken", action, spec)
        check_bounds(action[None], self._experience)
        if self._num_choices:
            mask = self._masks[episode.newest]
            check_masks(action[None], np.stack([mask, mask]), True, self._experience)
        return action, self.behaviour or HUMAN

    def get_observation(self, episode: RemoteEpisode) -> bytes:
        """The newest one of an episode."""
        newest: bytes = self._observations[episode.newest].tobytes()
        return newest

    def _resize(self, records: np.ndarray) -> None:
        self._records = records
        columns = records.view(self._fields)
        self._observations = columns["observation"]
        self._masks = columns["mask"]
        self._rewards = columns["reward"]
        self._actions = columns["action"]
        self._log_probabilities = columns["log_probability"]
        self._versions = columns["version"]

    def _observe(self, rows: ActRows, asking: Asking) -> None:
        """Record the observations of rows, which are the newest of their episodes."""
        if not asking:
            return
        places, part = _locate(asking)
        if len(asking) < len(rows.episodes):
            part = list(asking)[part]
        self._observations[places] = rows.observations[part]
        self._rewards[places] = rows.rewards[part]
        if self._num_choices:
            self._masks[places] = rows.masks[part]

    def choose(
        self,
        asking: Asking,
        actions: Sequence[Any],
        log_probabilities: Sequence[float],
        version: int,
        extras: Iterable[Mapping[str, Any]],
    ) -> None:
        """The policy's answers to the newest observations of episodes. extras: of each, or empty"""
        places, part = _locate(asking)
        self._actions[places] = actions[part]
        self._log_probabilities[places] = log_probabilities[part]
        self._versions[places] = version
        for episode in asking.values():
            episode.status = _CHOSEN
        for episode, each in zip(asking.values(), extras, strict=False):
            episode.extras = each
            if not episode.length:
                episode.first_extras = each

    def close(self, number: int) -> None:
        """Forget an episode."""
        self._free.append(self.pop(number).start)

    def _take_other(
        self, answers: RowAnswers, row: int, last_number: int, now_s: float, limit: int
    ) -> RemoteEpisode | None:
        """Begin an episode with a row, which it returns, or answer one that is no next step, or let it wait with an
        earlier message."""
        rows = answers.rows
        number = rows.episodes[row]
        step = rows.steps[row]
        is_last = rows.flags[row] & ROW_LAST
        if (episode := self.get(number)) is not None:
            episode.used_at = now_s
            if step == episode.step and episode.status != _WAITING:
                action, version = self._actions[episode.newest], int(self._versions[episode.newest])
                answers.answer([row], [action if action.ndim else action.item()], version)
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
            settings = given if 0 < given <= newest else newest
            is_assisted = rows.taken is not msgspec.UNSET
            if not self._free:
                stride, known = self._experience.segment_length + 1, self._records
                self._resize(np.zeros(max(stride, 2 * len(known)), known.dtype))
                self._records[: len(known)] = known
                self._free = list(range(len(known), len(self._records), stride))
            start = self._free.pop()
            episode = RemoteEpisode(number, start, start, float(rows.rewards[row]), now_s, settings, is_assisted)
            self.last_number = max(self.last_number, number)
            self[number] = episode
            return episode
        return None

    def hold(self, number: int) -> None:
        """The next step of this episode completes a segment, for which there is no room."""
        self[number].status = _FULL

    def complete(self, rows: ActRows, at: Sequence[int]) -> tuple[list[Segment], Asking]:
        """Take the steps of rows that complete segments; returns these, the row's own and the one before where others
        act from now on, and the rows whose episodes go on."""
        segments: list[Segment] = []
        stepped = {row: self[rows.episodes[row]] for row in at}
        for episode in stepped.values():
            action, behaviour = self._read_step(episode, rows)
            if episode.length and episode.behaviour != behaviour:
                segments += self._take_segments([(episode, 0)])
            episode.behaviour = behaviour
            if behaviour:
                episode.is_assisted = True
                self._actions[episode.newest] = action
                self._log_probabilities[episode.newest] = 0.0
                self._versions[episode.newest] = 0
            episode.step += 1
            episode.newest += 1
            episode.status = _WAITING
        self._observe(rows, stepped)
        length = self._experience.segment_length
        ends = [(episode, rows.flags[row]) for row, episode in stepped.items()]
        segments += self._take_segments([each for each in ends if each[1] & ROW_LAST or each[0].length == length])
        for row in at:
            if rows.flags[row] & ROW_LAST:
                self.close(stepped.pop(row).number)
        return segments, stepped

    def _take_segments(self, ends: Sequence[tuple[RemoteEpisode, int]]) -> Iterator[Segment]:
        """The steps since the last segments of episodes, in arrays that are parts of common ones; the next ones begin
        with the newest observations. With each the flags of the row of its last step; 0: it goes on."""
        if not ends:
            return
        extras = self._experience.extras
        starts = np.array([each.start for each, _ in ends])
        lengths = np.array([each.newest + 1 for each, _ in ends]) - starts
        offsets = lengths.cumsum()
        places = np.arange(offsets[-1]) + np.repeat(starts + lengths - offsets, lengths)
        records = self._records[places].view(self._fields)
        observations, masks, actions = records["observation"], records["mask"], records["action"]
        log_probabilities, versions = records["log_probability"], records["version"]
        rewards = records["reward"].astype(np.float32)
        all_rewards: list[float] = records["reward"].tolist()
        self._records[starts] = self._records[starts + lengths - 1]
        begin = 0
        for episode, flags in ends:
            end = begin + episode.length
            steps, observed = slice(begin, end), slice(begin, end + 1)
            ended = flags & ROW_LAST
            episode.total = sum(all_rewards[begin + 1 : end + 1], episode.total)
            yield Segment(
                observations[observed],
                actions[steps],
                rewards[begin + 1 : end + 1],
                log_probabilities[steps],
                versions[steps],
                bool(flags & ROW_TERMINATED),
                bool(ended and not flags & ROW_TERMINATED),
                episode.total if ended else None,
                episode.step if ended else None,
                {
                    each.name: masks[observed]
                    if each.name == MASKS
                    else np.asarray(episode.first_extras[each.name])[None]
                    for each in extras
                },
                settings=episode.settings,
                success=bool(flags & ROW_SUCCESS) if ended and flags & ROW_TELLS_SUCCESS else None,
                behaviour=episode.behaviour,
                assisted=episode.is_assisted,
                episode=episode.number,
            )
            episode.newest = episode.start
            episode.first_extras = episode.extras
            begin = end + 1

    def take_idle(self, before_s: float) -> list[RemoteEpisode]:
        """Remove the episodes whose answers no message has followed since `before_s`."""
        idle = [each for each in self.values() if each.status == _CHOSEN and each.used_at < before_s]
        for each in idle:
            self.close(each.number)
        return idle

    def take_shown(self, episodes: Sequence[RemoteEpisode]) -> Iterator[Segment]:
        """What others have shown since the last segments of episodes that do not go on."""
        return self._take_segments([(each, 0) for each in episodes if each.behaviour and each.length])


def _locate(asking: Asking) -> tuple[Any, Any]:
    """The places of the newest records of episodes, and an index of all of them; of one episode both are numbers, which
    are quicker than arrays of one."""
    places = [each.newest for each in asking.values()]
    return (np.array(places), slice(None)) if len(places) > 1 else (places[0], 0)
