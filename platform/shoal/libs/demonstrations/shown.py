"""What a learner makes of demonstrations: a cloning term that fades, and segments for a replay.

Legend: N steps, S segments laid end to end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from shoal.extend.rl import DemonstrationSite, DemonstrationsSpec
from shoal.libs.demonstrations.files import Demonstration, open_files
from shoal.wire import Segment

_log = logging.getLogger(__name__)
POLL_S = 1.0  # between two looks for new ones
MAX_CLONING_STEPS = 1000  # between two updates
MAX_OFFLINE_STEPS = 100  # likewise, of a replay
BATCH_STEPS = 256  # of the cloning term, at each step of the optimizer, to within one segment


def cloning_loss(log_pi: Tensor) -> Tensor:
    """The mean of -log π(a|x) over shown steps [N]: the cross entropy of their actions, of a Box their log-density."""
    return -log_pi.mean()


def fade(spec: DemonstrationsSpec, num_steps: int) -> float:
    """The weight of the cloning term, so many steps after the newest demonstration."""
    return spec.weight * min(1.0, max(0.0, 1.0 - num_steps / spec.fade_steps))


class Shown:
    """A ShownExperience: the demonstrations of a run, read in the background."""

    def __init__(self, site: DemonstrationSite) -> None:
        self._spec, self.share, self.generation = site.spec, site.spec.share, 0
        self._files = open_files(site)
        self._known: dict[str, Demonstration] = {}
        self._segments: list[Segment] = []
        self._newest_steps = self._num_steps = 0  # of the run, at the newest demonstration and now
        self._offline_steps = 0
        self._num_new = 0  # shown steps, since `take_cloning_steps`
        self._random = np.random.default_rng(0)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def advance(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._thread is None:
            self.poll()  # those that a run starts with count from its first step on
            self._offline_steps = 0 if num_steps else self._spec.updates  # not of a learner that goes on
            self._thread = threading.Thread(target=self._follow, name="demonstrations", daemon=True)
            self._thread.start()

    @property
    def weight(self) -> float:
        """Of the cloning term, now."""
        return fade(self._spec, self._num_steps - self._newest_steps)

    def get_segments(self) -> Sequence[Segment]:
        return self._segments

    def take_cloning_steps(self) -> int:
        taken, self._num_new = self._num_new, 0
        return min(MAX_CLONING_STEPS, round(taken * self._spec.passes / BATCH_STEPS))

    def take_offline_steps(self) -> int:
        due = min(self._offline_steps, MAX_OFFLINE_STEPS)
        self._offline_steps -= due
        return due

    def compute_loss(
        self, compute_log_pi: Callable[[Sequence[Segment]], Tensor]
    ) -> tuple[Tensor, Mapping[str, float]] | None:
        segments, weight = self._segments, self.weight
        if not segments or not self._spec.weight:
            return None
        drawn = self._draw(segments)
        loss = cloning_loss(compute_log_pi(drawn))
        if not loss.isfinite():
            self._leave_out([each for each in drawn if not compute_log_pi([each]).isfinite().all()])
            return None
        return weight * loss, {"learner/demonstration_weight": weight, "learner/cloning_loss": loss.item()}

    def poll(self) -> None:
        """Read those that are new, and forget those that are gone."""
        names = self._files.list_names()
        new = self._files.read_sound(name for name in names if name not in self._known)
        if not new and len(names) == len(self._known):
            return
        known = self._known | new
        self._known = {name: known[name] for name in names if name in known}
        self._newest_steps = max((each.info.run_steps for each in self._known.values()), default=0)
        self._num_new += sum(each.info.num_steps for each in new.values())
        self._segments = [each.segment for each in self._known.values()]
        self.generation += 1

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self.poll()
            except OSError as error:
                _log.warning("demonstrations cannot be read now: %s", error)

    def _leave_out(self, segments: Sequence[Segment]) -> None:
        """Forget what would spoil each loss: numbers within the spec, and too large for the network."""
        bad = {name for name, each in self._known.items() if any(each.segment is one for one in segments)}
        _log.warning("the loss of %s is not finite: they are left out", ", ".join(sorted(bad)) or "what was drawn")
        self._segments = [each.segment for name, each in self._known.items() if name not in bad]

    def _draw(self, segments: Sequence[Segment]) -> list[Segment]:
        drawn, num_steps = [], 0
        for index in self._random.permutation(len(segments)):
            if num_steps >= BATCH_STEPS:
                break
            drawn.append(segments[index])
            num_steps += segments[index].num_steps
        return drawn
