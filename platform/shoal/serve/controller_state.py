"""What a controller must not forget: which models, how far each rollout is, who the replicas are, what happened.

Written by the controller before anybody hears of a change, so that one that is started again goes on from there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.serve.rollout import Rollout

MAX_EVENTS = 500
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployment:
    """A model as it was asked for.

    registry: folder with its versions; "" for a model that follows the weights of a run
    version:  a number or an alias; an alias is followed
    options:  a ModelOptions, as a plain mapping
    """

    name: str
    registry: str = ""
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alias(self) -> str:
        """The alias that is followed; "" for none."""
        return "" if self.version.isdigit() else self.version

    @property
    def is_live(self) -> bool:
        return not self.registry


@dataclass(frozen=True)
class Event:
    """One change: what, when (seconds since the epoch), from which version to which, by whom and why."""

    number: int
    time: float
    kind: str
    model: str = ""
    version: int | None = None
    previous: int | None = None
    by: str = ""
    reason: str = ""

    def details(self) -> dict[str, object]:
        """For a run record, which has a kind and a time of its own."""
        found = {name: getattr(self, name) for name in ("model", "version", "previous", "by", "reason")}
        return {name: value for name, value in found.items() if value not in (None, "")}


@dataclass
class ModelState:
    """One model: what was asked for, how far it is, and the user's metrics of the candidate."""

    deployment: Deployment
    rollout: Rollout = field(default_factory=Rollout)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class ControllerState:
    """All of it. `deployment` names the call of `deploy` that this goes back to."""

    deployment: str = ""
    generation: int = 0
    started_at: float = 0.0
    models: dict[str, ModelState] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    num_events: int = 0


class StateFile:
    """The state of one endpoint on disk; `path` None keeps nothing (a test that wants none)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self, deployment: str) -> ControllerState | None:
        """What was saved for this deployment; None when there is nothing, or what there is cannot be read."""
        if self._path is None or not self._path.exists():
            return None
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=ControllerState)
        except (OSError, msgspec.DecodeError) as error:
            logger.error("%s cannot be read, the endpoint starts from what it was deployed with: %s", self._path, error)
            return None
        return state if state.deployment == deployment else None

    def save(self, state: ControllerState) -> None:
        """Replace the file in one step."""
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            incoming = self._path.with_name(f".incoming-{self._path.name}")
            incoming.write_bytes(msgspec.json.encode(state))
            incoming.replace(self._path)

    def remove(self) -> None:
        """The endpoint is gone, and what is saved from now on is not kept: a last report may still come. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
