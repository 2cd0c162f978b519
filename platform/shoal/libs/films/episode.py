"""What is filmed of an episode: its steps as arrays, and pictures of some of them.

Legend: N steps, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import needs_extra
from shoal.extend.rl import PICTURES

with needs_extra("films"):
    from PIL import Image

WIDTH = 320  # pixels, of a film
MAX_FRAMES, MIN_FRAMES = 250, 25  # of an episode
MAX_PICTURES = 500  # of a film: so many are in memory at once
FRAMES_PER_S = 25.0  # at most
MAX_STEPS, MAX_BYTES = 20_000, 64 << 20  # of what is recorded of an episode; the rest of it is in no film
STEPS_PER_S = 10.0  # of a game that does not say
CHART_S, LAST_S = 10.0, 1.0  # a chart takes so long, and the end of an episode


class Shot(NamedTuple):
    """A picture of an episode after so many steps of the agent, and how long it is shown."""

    step: int
    picture: Image.Image
    seconds: float


@dataclass
class FilmedEpisode:
    """One episode of N steps, of one agent.

    observations:  [N, ...] or [N + 1, ...], before each step; empty where there are shots
    actions:       [N, ...]; rewards, values: [N]
    probabilities: [N, K], of the choices; of a policy without a distribution their `scores` [N, K], such as Q
    outcome:       "terminated", "truncated", or "" where it goes on
    shots:         in order, the last one after the episode's end; without any a chart is drawn
    max_frames:    of that chart
    """

    title: str
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    values: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    scores: np.ndarray | None = None
    outcome: str = ""
    shots: list[Shot] = field(default_factory=list)
    max_frames: int = MAX_FRAMES

    @property
    def num_steps(self) -> int:
        return len(self.rewards)


class Camera:
    """Takes pictures of an episode of unknown length: at most `max_frames`, evenly over the steps.

    render: the picture of the game now, uint8 [H, W, 3]; None for what is none
    """

    def __init__(self, render: Callable[[], Any], steps_per_s: float, max_frames: int = MAX_FRAMES) -> None:
        self._render = render
        self.steps_per_s = steps_per_s
        self._max_frames = max_frames
        self.frames: dict[int, Image.Image] = {}
        self._every = max(1, round(steps_per_s / FRAMES_PER_S))

    def take(self, step: int, *, is_last: bool = False) -> None:
        if step % self._every and not is_last:
            return
        picture = self._render()
        if picture is None or np.ndim(picture) != 3:
            return
        self.frames[step] = fit_picture(Image.fromarray(np.asarray(picture, np.uint8)[:, :, :3]))
        if len(self.frames) > self._max_frames and not is_last:
            self._every *= 2
            self.frames = {number: each for number, each in self.frames.items() if number % self._every == 0}


def open_camera(environment: Any, max_frames: int = MAX_FRAMES) -> tuple[Camera | None, str]:
    """A camera for an environment after its reset; or why there is none: then a chart is drawn."""
    if getattr(environment, "render_mode", None) != PICTURES:
        return None, "it draws no pictures"
    try:
        picture = environment.render()
    except Exception as error:
        if not isinstance(error, ImportError) and type(error).__name__ != "DependencyNotInstalled":  # gymnasium's
            raise
        return None, f"{error}, or 'CHECKOUT[films]'"
    if np.ndim(picture) != 3:
        return None, f"its render returns {type(picture).__name__}, no array [H, W, 3]"
    metadata = getattr(environment, "metadata", None) or {}
    return Camera(environment.render, float(metadata.get("render_fps") or STEPS_PER_S), max_frames), ""


class Recording:
    """The steps of an agent in an episode, while it is played. A step in which it waits counts for its last action."""

    def __init__(self, camera: Camera | None) -> None:
        self._camera = camera
        self._numbers: list[int] = []  # of the game's steps
        self._observations: list[np.ndarray] = []
        self._actions: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._outputs: list[Mapping[str, np.ndarray]] = []
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the episode is longer than its film can be."""
        return len(self._numbers) >= MAX_STEPS or self._num_bytes >= MAX_BYTES

    def take(self, number: int, *, is_last: bool = False) -> None:
        """A picture before step `number` of the game, or after the last one."""
        if self._camera is not None:
            self._camera.take(number, is_last=is_last)

    def add(self, number: int, observation: Any, action: Any, outputs: Mapping[str, np.ndarray]) -> None:
        """An action, of step `number` of the game. outputs: `probabilities` or `scores` [K], and `value`, if known"""
        self._numbers.append(number)
        self._observations.append(np.array(observation if self._camera is None else ()))
        self._num_bytes += self._observations[-1].nbytes
        self._actions.append(np.array(action))
        self._outputs.append(outputs)
        self._rewards.append(0.0)

    def reward(self, value: float) -> None:
        """Add to the reward of the last action; before the first there is none to be rewarded."""
        if self._rewards:
            self._rewards[-1] += value

    def finish(self, title: str, outcome: str, max_frames: int = MAX_FRAMES) -> FilmedEpisode | None:
        """None where the agent has not acted."""
        if not self._numbers:
            return None
        found = {
            name: np.stack([each[name] for each in self._outputs])
            for name in ("value", "probabilities", "scores")
            if all(name in each for each in self._outputs)
        }
        episode = FilmedEpisode(
            title,
            np.stack(self._observations),
            np.stack(self._actions),
            np.array(self._rewards),
            found.get("value"),
            found.get("probabilities"),
            found.get("scores"),
            outcome,
            max_frames=max_frames,
        )
        if self._camera is not None:  # of the game's steps: in some of them the agent may not have acted
            taken = list(self._camera.frames)
            places = np.searchsorted(self._numbers, taken, "right") - 1
            seconds = [*(np.diff(taken) / self._camera.steps_per_s), LAST_S]
            shots = zip(places.clip(0).tolist(), self._camera.frames.values(), seconds, strict=True)
            episode.shots = [Shot(*each) for each in shots]
        return episode


def fit_picture(picture: Image.Image) -> Image.Image:
    """As large as fits into a square of WIDTH by a whole factor: small pixels stay sharp."""
    size = max(picture.size)
    if size > WIDTH:
        return picture.reduce(-(-size // WIDTH))
    factor = WIDTH // size
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def to_probabilities(logits: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """[K] of logits [K], of the independent choices between `bounds`."""
    parts = [logits[begin:end] for begin, end in pairwise(bounds.tolist())]
    weights = [np.exp(part - part.max()) for part in parts]
    return np.concatenate([each / each.sum() for each in weights])
