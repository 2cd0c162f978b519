"""The open episodes of clients that send observations: each step is taken once, and becomes part of a segment.

Owns the episodes and their segments' assembly, and nothing else: no policy, no clock, no socket, no queue. Called by
`RemoteInference`. A step that is sent again gets the answer that it got before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from shoal.actor.segment_builder import convert_rows
from shoal.errors import InvalidSegment
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.wire import DropReason, ExperienceSpec, Segment
from shoal.wire.action_masks import MASKS, check_masks, read_mask
from shoal.wire.experience_spec import NO_EXTRAS, TensorSpec
from shoal.wire.messages import ActionMessage, ActMessage
from shoal.wire.segment import HUMAN, LARGEST_REWARD, REWARD, check_bounds, check_values

ENDED_EPISODE = "ended_episode"
UNKNOWN_EPISODE = "unknown_episode"
WRONG_STEP = "wrong_step"
FAILED = "failed"
Answers = list[tuple[ActorKey, ActionMessage | list[bytes]]]  # each with its client; as frames those of `acts`


class Choice(NamedTuple):
    """An action, as the policy returned it, its log-probability, the version of the weights, and what a segment that
    begins with its observation carries."""

    action: Any
    log_probability: float
    version: int
    extras: Mapping[str, Any] = NO_EXTRAS

    def to_message(self, episode: int, step: int) -> ActionMessage:
        """The answer to a client; the numbers of an array in C order."""
        action = self.action.ravel().tolist() if isinstance(self.action, np.ndarray) else self.action
        return ActionMessage(episode, step, action, self.version)


class Choices(NamedTuple):
    """The policy's answers to rows. extras: see `Choice`, of each; empty without"""

    actions: Sequence[Any]
    log_probabilities: Sequence[float]
    version: int
    extras: Sequence[Mapping[str, Any]]


class Observed(NamedTuple):
    """The bytes of an observation, and in a run with action masks those of its mask: bool [K]."""

    frame: bytes
    mask: bytes = b""


@dataclass(eq=False)
class RemoteEpisode:
    """An open episode: the observations and steps since its last segment, and its newest answer.

    step:    of the newest observation
    choice:  the answer to it; None: not computed yet
    used_at: of the newest message, by the caller's clock
    is_full: its open segment is complete, and waits for room in the queue
    settings: the version of the game's settings
    behaviour:   who took the open steps; "": the policy
    is_assisted: others than the policy have taken steps
    """

    number: int
    observations: list[Observed]
    total: float
    used_at: float
    steps: list[tuple[Choice, float]] = field(default_factory=list)  # with the reward
    step: int = 0
    choice: Choice | None = None
    is_full: bool = False
    settings: int = 0
    behaviour: str = ""
    is_assisted: bool = False


@dataclass(eq=False)
class OpenEpisodes:
    """A client and its open episodes. `last_number` is the highest episode that it has begun: numbers only grow.
    behaviour: who acts; "": the policy, unless a message says otherwise"""

    key: ActorKey
    progress: ActorProgress
    max_episodes: int
    episodes: dict[int, RemoteEpisode] = field(default_factory=dict)
    last_number: int = -1
    behaviour: str = ""

    def find_episode(self, message: ActMessage, observation: Observed, now_s: float) -> RemoteEpisode | ActionMessage:
        """The episode that takes this step or already has it; a new one for step 0. Otherwise the answer.

        Raises InvalidSegment when too many episodes are open.
        """
        number, step = message.episode, message.step
        episode = self.episodes.get(number)
        if episode is None:
            ended = message.terminated or message.truncated
            if number <= self.last_number:  # the answer to the end of an episode may have been lost
                return ActionMessage(number, step, reason="" if ended else ENDED_EPISODE)
            if step != 0 or ended:
                return ActionMessage(number, step, reason=UNKNOWN_EPISODE)
            if len(self.episodes) >= self.max_episodes:
                problem = f"{len(self.episodes)} are open, at most {self.max_episodes}"
                raise InvalidSegment(DropReason.INVALID_RANGE, "episode", problem)
            self.last_number = number
            episode = self.episodes[number] = RemoteEpisode(number, [observation], message.reward, now_s)
            newest = self.progress.settings
            given = 0 if message.settings is msgspec.UNSET else message.settings
            episode.settings = given if 0 < given <= newest else newest
            episode.is_assisted = message.taken is not msgspec.UNSET
            return episode
        episode.used_at = now_s
        if step == episode.step:
            return episode if episode.choice is None else episode.choice.to_message(number, step)
        if step != episode.step + 1 or episode.choice is None:
            return ActionMessage(number, step, reason=WRONG_STEP)
        return episode

    def take_idle(self, before_s: float) -> Iterator[RemoteEpisode]:
        """Remove the episodes whose answers no message has followed since `before_s`."""
        for episode in list(self.episodes.values()):
            if episode.choice is not None and episode.used_at < before_s and not episode.is_full:
                yield self.episodes.pop(episode.number)


def read_observation(
    message: ActMessage, frames: Sequence[bytes], experience: ExperienceSpec, choices: tuple[int, ...] = ()
) -> Observed:
    """The observation and its mask. choices: of an action's numbers, in a run with masks. Raises InvalidSegment when
    one of them or the reward is outside of the spec."""
    spec = experience.observation
    sizes = [math.prod(spec.shape) * spec.numpy_dtype().itemsize, *([sum(choices)] if choices else [])]
    if [len(frame) for frame in frames] != sizes:
        _raise_misfit(frames, [("observation", spec), ("mask", TensorSpec("bool", tuple(sizes[1:])))][: len(sizes)])
    if not -LARGEST_REWARD <= message.reward <= LARGEST_REWARD:  # NaN, too
        check_values("reward", np.array(message.reward), REWARD)
    check_values("observation", np.frombuffer(frames[0], spec.numpy_dtype()), spec)
    if choices and not message.terminated:  # after that, no action is chosen
        read_mask(np.frombuffer(frames[1], np.uint8), choices)
    return Observed(*frames)


def _raise_misfit(frames: Sequence[bytes], expected: Sequence[tuple[str, TensorSpec]]) -> NoReturn:
    """Raise InvalidSegment, which names the first tensor that has not as many numbers as expected."""
    if len(frames) != len(expected):
        problem = f"{len(frames)} tensors, expected {len(expected)}: {' and '.join(name for name, _ in expected)}"
        raise InvalidSegment(DropReason.INVALID_FRAMES, "observation", problem)
    for (name, spec), frame in zip(expected, frames, strict=True):
        number, size = math.prod(spec.shape), spec.numpy_dtype().itemsize
        if len(frame) != number * size:
            came = f"{len(frame)} bytes, {size} a number" if len(frame) % size else f"{len(frame) // size} numbers"
            problem = f"{came}, expected {number} ({spec.dtype} {list(spec.shape)})"
            raise InvalidSegment(DropReason.INVALID_FRAMES, name, problem)
    raise AssertionError("all fit")


class Step(NamedTuple):
    """What was done at the observation before the newest one. behaviour: by whom; "": by the policy"""

    choice: Choice
    behaviour: str

    def fills_slot(self, episode: RemoteEpisode, message: ActMessage, experience: ExperienceSpec) -> bool:
        """Whether it completes a segment of the policy's, which takes a slot of the queue."""
        is_cut = bool(episode.steps) and episode.behaviour != self.behaviour
        num_steps = 1 if is_cut else len(episode.steps) + 1
        is_last = message.terminated or message.truncated or num_steps == experience.segment_length
        return (is_cut and not episode.behaviour) or (is_last and not self.behaviour)


def read_step(episode: RemoteEpisode, behaviour: str, message: ActMessage, experience: ExperienceSpec) -> Step:
    """The step before this message: the answer, or what was `taken` in its place. behaviour: of the client. Raises
    InvalidSegment."""
    assert episode.choice is not None
    if message.taken is msgspec.UNSET:
        if behaviour:
            problem = f"is missing: in this session {behaviour} acts"
            raise InvalidSegment(DropReason.INVALID_FRAMES, "taken", problem)
        return Step(episode.choice, "")
    spec, given = experience.action, np.asarray(message.taken)
    given = given.reshape(spec.shape) if given.size == math.prod(spec.shape) else given
    action = convert_rows("taken", given, spec.numpy_dtype(), spec.shape)
    check_values("taken", action, spec)
    check_bounds(action[None], experience)
    if mask := episode.observations[-1].mask:
        masks = np.frombuffer(mask, np.bool_)
        check_masks(action[None], np.stack([masks, masks]), True, experience)
    return Step(Choice(action, 0.0, 0, episode.choice.extras), behaviour or HUMAN)


def take_step(
    episode: RemoteEpisode, message: ActMessage, observation: Observed, step: Step, experience: ExperienceSpec
) -> list[Segment]:
    """Add the step before this observation; returns the segments that it completes: the one before where others act
    from now on, and its own."""
    segments = []
    if episode.steps and episode.behaviour != step.behaviour:
        segments.append(_take_segment(episode, None, experience))
    episode.behaviour = step.behaviour
    episode.is_assisted |= bool(step.behaviour)
    episode.steps.append((step.choice, message.reward))
    episode.observations.append(observation)
    episode.step, episode.choice = message.step, None
    episode.total += message.reward
    if message.terminated or message.truncated or len(episode.steps) == experience.segment_length:
        segments.append(_take_segment(episode, message, experience))
    episode.is_full = False
    return segments


def take_shown(episode: RemoteEpisode, experience: ExperienceSpec) -> Segment | None:
    """What others have shown since the last segment, if they have: of an episode that does not go on."""
    return _take_segment(episode, None, experience) if episode.behaviour and episode.steps else None


def _take_segment(episode: RemoteEpisode, message: ActMessage | None, experience: ExperienceSpec) -> Segment:
    """The steps since the last segment, which end with `message`, or where another's begin (None). The next segment
    begins with its observation."""
    choices, rewards = zip(*episode.steps, strict=True)
    length, last = len(rewards), message or ActMessage(episode.number, episode.step)
    ended = last.terminated or last.truncated
    observation, action = experience.observation, experience.action
    masks = np.frombuffer(b"".join(each.mask for each in episode.observations), np.bool_).reshape(length + 1, -1)
    frames = b"".join(each.frame for each in episode.observations)
    segment = Segment(
        np.frombuffer(frames, observation.numpy_dtype()).reshape(-1, *observation.shape),
        np.array([choice.action for choice in choices], action.numpy_dtype()).reshape(length, *action.shape),
        np.array(rewards, np.float32),
        np.array([choice.log_probability for choice in choices], np.float32),
        np.array([choice.version for choice in choices], np.int64),
        last.terminated,
        last.truncated and not last.terminated,
        episode.total if ended else None,
        episode.step if ended else None,
        {
            each.name: masks if each.name == MASKS else np.asarray(choices[0].extras[each.name])[None]
            for each in experience.extras
        },
        settings=episode.settings,
        success=last.success if ended and last.success is not msgspec.UNSET else None,
        behaviour=episode.behaviour,
        assisted=episode.is_assisted,
        episode=episode.number,
    )
    episode.observations, episode.steps = episode.observations[-1:], []
    return segment
