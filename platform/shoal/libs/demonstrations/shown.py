"""What a learner makes of demonstrations: a cloning term that fades, and segments for a replay.

Legend: N steps, S segments laid end to end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from shoal.extend.rl import DemonstrationSite, DemonstrationsSpec
from shoal.libs.demonstrations.files import Demonstration, join_pieces, open_files
from shoal.store import Mirror
from shoal.wire import Segment
from shoal.wire.experience_spec import STATE

_log = logging.getLogger(__name__)
POLL_S = 1.0  # between two looks for new ones
MAX_CLONING_STEPS = 1000  # between two updates
MAX_OFFLINE_STEPS = 100  # likewise, of a replay
BATCH_STEPS = 256  # of the cloning term, at each step of the optimizer, to within one segment
JOINED_STEPS = 1024  # over which a recurrent policy is unrolled at once


def cloning_loss(log_pi: Tensor) -> Tensor:
    """The mean of -log π(a|x) over shown steps [N]: the cross entropy of their actions, of a Box their log-density."""
    return -log_pi.mean()


def fade(spec: DemonstrationsSpec, num_steps: int) -> float:
    """The weight of the cloning term, so many steps after the newest demonstration."""
    return spec.weight * min(1.0, max(0.0, 1.0 - num_steps / spec.fade_steps))


def join_segments(demonstrations: Iterable[Demonstration]) -> list[Segment]:
    """The segments of a recurrent policy, those of an episode in one, of at most JOINED_STEPS: the state that came with
    a later one is of the policy as it was then, and the present one reads another."""
    joined: list[list[Segment]] = []
    ends: dict[tuple[str, int, bytes], list[Segment]] = {}  # by the observation at which an episode goes on
    for info, segment in sorted(demonstrations, key=lambda each: each.info.seq):
        parts = ends.pop((info.actor_id, info.incarnation, segment.observations[0].tobytes()), [])
        if not parts or info.num_steps + sum(part.num_steps for part in parts) > JOINED_STEPS:
            joined.append(parts := [])
        parts.append(segment)
        if not (info.terminated or info.truncated):
            ends[info.actor_id, info.incarnation, segment.observations[-1].tobytes()] = parts
    return [
        replace(whole, extras={**whole.extras, STATE: parts[0].extras[STATE]})
        for parts in joined
        for whole in [join_pieces(parts)]
    ]


class Shown:
    """A ShownExperience: the demonstrations of a run, read in the background."""

    def __init__(self, site: DemonstrationSite) -> None:
        self._spec = site.spec
        self.share = site.spec.share
        self.generation = 0
        self._files = open_files(site)
        self._names: list[str] = []  # of files, those that cannot be read among them
        self._known: dict[str, Demonstration] = {}
        self._segments: list[Segment] = []
        self._is_recurrent = any(each.name == STATE for each in site.experience.extras)
        self._cloned: list[Segment] = []  # in the cloning term: those, or a recurrent policy's joined
        self._newest_steps = self._num_steps = 0  # of the run, at the newest demonstration and now
        self._num_shown = self._num_taken = 0  # shown steps, and those of `take_cloning_steps`
        self._offline_steps = 0
        self._random = np.random.default_rng(0)
        self._mirror: Mirror | None = None

    def advance(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._mirror is None:
            self.poll()  # those that a run starts with count from its first step on
            known = [each.info for each in self._known.values()]  # to a learner that has restarted, but for the newest
            self._num_taken = sum(info.num_steps for info in known if info.run_steps < num_steps)
            self._offline_steps = 0 if num_steps else self._spec.updates  # not of a learner that goes on
            warning = "demonstrations cannot be read now"
            self._mirror = Mirror("demonstrations", self.poll, POLL_S, POLL_S, warning)

    @property
    def weight(self) -> float:
        """Of the cloning term, now."""
        return fade(self._spec, self._num_steps - self._newest_steps)

    def get_segments(self) -> Sequence[Segment]:
        return self._segments

    def take_cloning_steps(self) -> int:
        num_shown = self._num_shown
        num_new, self._num_taken = num_shown - self._num_taken, num_shown
        longest = max((each.num_steps for each in self._cloned), default=0)
        batch_steps = max(BATCH_STEPS, longest)
        return round(min(MAX_CLONING_STEPS * BATCH_STEPS, num_new * self._spec.passes) / batch_steps)

    def take_offline_steps(self) -> int:
        due = min(self._offline_steps, MAX_OFFLINE_STEPS)
        self._offline_steps -= due
        return due

    def compute_loss(
        self, compute_log_pi: Callable[[Sequence[Segment]], Tensor], differentiate: Callable[[Tensor], bool]
    ) -> Mapping[str, float] | None:
        segments, weight = self._cloned, self.weight
        if not segments or not weight:
            return None
        drawn = self._draw(segments)
        loss = cloning_loss(compute_log_pi(drawn))
        if not differentiate(weight * loss):
            bad = [each for each in drawn if not differentiate(cloning_loss(compute_log_pi([each])))]
            self.leave_out(bad or drawn)  # only together
            return None
        return {"learner/demonstration_weight": weight, "learner/cloning_loss": loss.item()}

    def leave_out(self, segments: Sequence[Segment]) -> None:
        bad = {id(each) for each in segments}
        left = {name: each for name, each in self._known.items() if id(each.segment) in bad}
        names = [f"{name} of {each.info.actor_id}" for name, each in sorted(left.items())]
        _log.warning("the loss of %s is not finite: they are left out", ", ".join(names) or "what was drawn")
        self._known = {name: each for name, each in self._known.items() if name not in left}
        self._segments = [each for each in self._segments if id(each) not in bad]
        self._cloned = [each for each in self._cloned if id(each) not in bad]

    def poll(self) -> None:
        """Read those that are new, and forget those that are gone."""
        names = self._files.list_names()
        if names == self._names:
            return
        new = self._files.read_sound(name for name in names if name not in self._names)
        known = self._known | new
        self._names, self._known = names, {name: known[name] for name in names if name in known}
        self._newest_steps = max((each.info.run_steps for each in self._known.values()), default=0)
        self._num_shown += sum(each.info.num_steps for each in new.values())
        self._segments = [each.segment for each in self._known.values()]
        self._cloned = join_segments(self._known.values()) if self._is_recurrent else self._segments
        self.generation += 1

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()

    def _draw(self, segments: Sequence[Segment]) -> list[Segment]:
        drawn, num_steps = [], 0
        for index in self._random.permutation(len(segments)):
            if num_steps >= BATCH_STEPS:
                break
            drawn.append(segments[index])
            num_steps += segments[index].num_steps
        return drawn
