"""What others than the policy have shown: kept by the gateway, and learnt from beside the policy's own experience; and
episodes of the policy's that the gateway records.

The interfaces of an extension of the group `shoal.demonstrations`, whose words are `check`, `prepare`, `recorder`,
`learner` and `episodes`.
Without it, gateways drop demonstrations as NOT_STORED, and record no episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.plugins.find import find_extension, find_optional
from shoal.rl.part_specs import DemonstrationsSpec, RecordSpec
from shoal.wire import ExperienceSpec, Segment

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "shoal.demonstrations"


class DemonstrationRecorder(Protocol):
    """Called by the gateway, in its thread."""

    def store(self, key: tuple[str, int], seq: int, segment: Segment, run_steps: int) -> None:
        """Keep a segment, which is on the disk when this returns; again after a crash. run_steps: of the policy, until
        now. Raises OSError."""

    def get_counts(self) -> dict[str, int]:
        """Segments, steps and complete episodes that are kept."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


class EpisodeRecorder(Protocol):
    """Called by the gateway, in its thread; never waits for a disk."""

    def add(self, key: tuple[str, int], segment: Segment, version: int, settings: Mapping[str, Any]) -> None:
        """Take a segment, in the order of its episode, whatever becomes of it. key: of the actor; version, settings: of
        the game, in this episode"""

    def get_counts(self) -> dict[str, int]:
        """Episodes that are kept, that were recorded by this gateway, and that could not be."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


class ShownExperience(Protocol):
    """Called by the learner and its algorithm, in their thread.

    share:      of each sample of a replay
    generation: another number when `get_segments` has others
    """

    share: float
    generation: int

    def advance(self, num_steps: int) -> None:
        """Notice what has come. num_steps: of the policy, that were learnt"""

    def get_segments(self) -> Sequence[Segment]: ...

    def take_cloning_steps(self) -> int:
        """The steps of the optimizer, on `compute_loss` alone, that are due for what has come since the last call."""

    def take_offline_steps(self) -> int:
        """The steps of a replay's optimizer, on samples of these alone, that are due now."""

    def compute_loss(
        self, compute_log_pi: Callable[[Sequence[Segment]], Tensor], differentiate: Callable[[Tensor], bool]
    ) -> Mapping[str, float] | None:
        """Differentiate the term to add to a loss; returns metrics, or None where there is none and gradients are of no
        use. compute_log_pi: log π(a|x) of the steps [N] of segments; differentiate: whether all is finite"""

    def leave_out(self, segments: Sequence[Segment]) -> None:
        """Forget what would spoil each loss: numbers within the spec, and too large for the network."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True)
class DemonstrationSite:
    """Of one policy of a run: `folder` has its files; `name`: of that folder, in `$SHOAL_STORE`, or "" for none."""

    spec: DemonstrationsSpec
    experience: ExperienceSpec
    folder: Path
    name: str = ""

    def check(self) -> None:
        """Raise ConfigError where `spec.source` has none, and for those that do not fit."""
        if self.spec.source:
            find_extension("check", GROUP)(self)

    def prepare(self) -> None:
        """Copy those of `spec.source`, once in a run. Raises ConfigError as `check` does."""
        if self.spec.source:
            find_extension("prepare", GROUP)(self)

    def open_recorder(self) -> DemonstrationRecorder | None:
        """None without the extension."""
        return cast("DemonstrationRecorder | None", self._open("recorder"))

    def open_episodes(self, spec: RecordSpec) -> EpisodeRecorder | None:
        """None where no episode is recorded, and without the extension. Raises OSError."""
        return cast("EpisodeRecorder | None", self._open("episodes", spec) if spec.share else None)

    def open_shown(self) -> ShownExperience | None:
        """None without the extension."""
        return cast("ShownExperience | None", self._open("learner"))

    def _open(self, name: str, *arguments: object) -> object:
        opener = find_optional(name, GROUP)
        return None if opener is None else opener(self, *arguments)
