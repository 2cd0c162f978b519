"""How a training run ended: what the Trainer returns, the same on every rank, and what the record is closed with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TrainResult:
    """The end of one run.

    reason:   which of `stop`'s criteria was met first, or "interrupted"
    detail:   the same in a sentence
    steps:    of the optimiser, over all lives of the run
    kept:     the step whose network was kept: `steps`, unless an earlier one was better
    seconds:  of training and evaluation, over all lives
    metrics:  of the network that was kept, from its evaluation (its loss under "loss"); {} when there was none
    weights:  the safetensors file of that network; None when the run was interrupted
    """

    run_id: str
    reason: str
    detail: str
    steps: int
    selected_step: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Path | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was asked to end before any of its criteria was met; it can be resumed."""
        return self.reason == "interrupted"
