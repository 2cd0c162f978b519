"""The outcome of a training run: returned by the Trainer, the same on every rank, and stored in the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TrainResult:
    """The end of one run.

    reason:   the criterion of `stop` that was met first, or "interrupted"
    detail:   the same in a sentence
    steps:    of the optimiser, over all attempts of the run
    kept:     the step of the retained network: `steps`, unless an earlier one was better
    seconds:  of training and evaluation, over all attempts
    metrics:  of the retained network, from its evaluation (its loss under "loss"); {} without one
    weights:  the safetensors file of that network, or the index of several; None when the run was interrupted
    model:    the reference of the registered version, as `line@3`; "" without one
    decision: which version is the champion since then, and why
    signal:   the number of the signal that came meanwhile, at which the program is to end; 0 for none
    """

    run_id: str
    reason: str
    detail: str
    steps: int
    selected_step: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Path | None = None
    model: str = ""
    decision: str = ""
    signal: int = 0

    @property
    def registration(self) -> str:
        """What was registered, in a line; "" for nothing."""
        return f"registered {self.model}{'; ' * bool(self.decision)}{self.decision}" if self.model else ""

    @property
    def is_interrupted(self) -> bool:
        """Whether a stop was requested before any criterion was met; the run can be resumed."""
        return self.reason == "interrupted"
