"""A controller's persistent state: its models, their rollouts, the replicas and the events.

The controller saves it before any replica receives a change, so that a restarted one continues from there. A failed
write is retained in memory and retried at the controller's ticks: no endpoint stops for it.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.atomic_file import create_private, log_unknown_fields, make_folder, require_known_format
from shoal.errors import RunError, WeightsError
from shoal.serve.controller.rollout import Phase, Rollout
from shoal.serve.messages.replica_report import RejectedVersion
from shoal.weights import WeightSnapshot

FORMAT = 1  # of the state file
MAX_EVENTS = 500
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployment:
    """A model as requested.

    registry: folder or URL of its versions; "" for a model that follows the weights of a run
    version:  a number or an alias; an alias is followed
    options:  a ModelOptions, as a plain mapping
    """

    name: str
    registry: str = ""
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alias(self) -> str:
        """The followed alias; "" for none."""
        return "" if self.version.isdigit() else self.version

    @property
    def is_live(self) -> bool:
        return not self.registry


@dataclass(frozen=True)
class Event:
    """One change: its kind, time (seconds since the epoch), versions before and after, author and reason."""

    number: int
    time: float
    kind: str
    model: str = ""
    version: int | None = None
    previous: int | None = None
    by: str = ""
    reason: str = ""

    def details(self) -> dict[str, object]:
        """The fields for a run record, which has its own kind and time."""
        values = {name: getattr(self, name) for name in ("model", "version", "previous", "by", "reason")}
        return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(frozen=True)
class VersionDescription:
    """What a plan says of a version: its signature, as a plain mapping, and the bytes of its payload."""

    version: int
    signature: dict[str, Any]
    size_bytes: int


@dataclass
class ModelState:
    """The state of one model.

    deployment: the model as requested
    rollout:    its rollout
    metrics:    the user's metrics of the candidate
    meant:      the alias's version at the last poll; 0 before the first
    rejected:   versions that are not tried again automatically: the alias's, until it moves; of a model that follows a
                run the newest ones, until it is to follow again
    is_added:   added later; not one of the models that the endpoint was deployed with
    before:     the former deployment, while the new one may still fail
    described:  of a model on demand: the last planned version, for times without the registry

    Of a model that follows a run:

    retained:      as in `ModelPlan`
    last_rejected: the version rejected last, with the reason
    unrecorded:    the number rejected since the last event, which was recorded at `recorded_at`
    """

    deployment: Deployment
    rollout: Rollout = field(default_factory=Rollout)
    metrics: dict[str, float] = field(default_factory=dict)
    meant: int = 0
    rejected: list[int] = field(default_factory=list)
    is_added: bool = False
    before: Deployment | None = None
    described: VersionDescription | None = None
    retained: int = 0
    last_rejected: RejectedVersion | None = None
    unrecorded: int = 0
    recorded_at: float = 0.0

    def revert_deployment(self) -> None:
        if self.before is not None:
            self.deployment, self.before = self.before, None


@dataclass
class ControllerState:
    """The full state.

    format:       the number of the file's format
    deployment:   the call of `deploy` that it belongs to
    num_attempts: the most stagings of a removed model: one added again under its name continues from there
    placement:    the replicas that have a model on demand, by its name
    addresses:    host:port of the replicas that reach each other
    peer_token:   what they show each other
    """

    deployment: str = ""
    generation: int = 0
    started_at: float = 0.0
    models: dict[str, ModelState] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    num_events: int = 0
    num_attempts: int = 0
    placement: dict[str, list[str]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    peer_token: str = field(default_factory=lambda: secrets.token_hex(16))
    format: int = FORMAT

    def catch_up_generation(self, generation: int) -> bool:
        """Raise the generation past a replica's when the file was lost; whether it was."""
        if generation <= self.generation:
            return False
        self.generation = generation
        for model in self.models.values():
            if model.rollout.phase is Phase.FLIPPING:
                model.rollout = replace(model.rollout, generation=generation + 1)
        return True


class StateFile:
    """The state of one endpoint on disk, with one version of each live model's weights in a folder next to it.

    `path` None writes nothing (a test that wants none).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._weights: dict[str, WeightSnapshot] = {}
        self._unwritten: dict[Path, bytes] = {}  # the writes that failed
        self._unknown: dict[str, dict[str, Any]] = {}  # fields of a later Shoal, by model; "": of the full state

    def load(self, deployment: str) -> ControllerState | None:
        """Load this deployment's state; None when there is none or it cannot be read.

        Deletes the weights of another deployment. Raises RunError for a file of a newer format.
        """
        state = self.read()
        if state is not None and state.deployment == deployment:
            for model in state.models.values():
                if model.rollout.is_open:  # the new deployment had not begun when this was saved
                    model.revert_deployment()
            return state
        self._delete_all_weights()
        return None

    def read(self) -> ControllerState | None:
        """The state in the file, of whatever deployment; None when there is none or it cannot be read."""
        if self._path is None:
            return None
        try:
            document = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Any])
            require_known_format(self._path, document, FORMAT, RunError)
            state = msgspec.convert(document, ControllerState)
            of_state, of_model = ({each.name for each in fields(kind)} for kind in (ControllerState, ModelState))
            parts = {"": (of_state, document)} | {name: (of_model, each) for name, each in document["models"].items()}
            self._unknown = {
                name: {field: value for field, value in part.items() if field not in known}
                for name, (known, part) in parts.items()
            }
            paths = (f"{model}.{name}" if model else name for model, each in self._unknown.items() for name in each)
            log_unknown_fields(self._path, paths)
            return state
        except FileNotFoundError:
            return None
        except (
            OSError,
            msgspec.DecodeError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # another kind of document
            logger.error("%s cannot be read, the endpoint starts from its deployment: %s", self._path, error)
            return None

    def save(self, state: ControllerState) -> None:
        """Replace the file in one step; a failed write is logged and waits for `retry_writes`."""
        if self._path is None:
            return
        document = msgspec.to_builtins(state)
        for model, unknown in self._unknown.items():
            if not model:
                document |= unknown
            elif model in document["models"]:
                document["models"][model] |= unknown
        self._write(self._path, msgspec.json.encode(document))

    def retry_writes(self) -> None:
        for path, content in list(self._unwritten.items()):
            self._write(path, content)

    def store_weights(self, model: str, snapshot: WeightSnapshot) -> None:
        """Retain weights in place of the model's former version."""
        self._weights[model] = snapshot
        if self._path is not None:
            self._write(_weights_folder(self._path) / model, msgspec.msgpack.encode(snapshot))

    def load_weights(self, model: str, version: int) -> WeightSnapshot | None:
        """Load retained weights; None when there are none or they cannot be read."""
        if model not in self._weights and self._path is not None:
            with suppress(OSError, msgspec.DecodeError, WeightsError):
                snapshot = msgspec.msgpack.decode(
                    (_weights_folder(self._path) / model).read_bytes(), type=WeightSnapshot
                )
                snapshot.check()
                self._weights[model] = snapshot
        retained = self._weights.get(model)
        return retained if retained is not None and retained.version == version else None

    def delete_weights(self, model: str) -> None:
        """Delete the weights of a model that is no longer served. Idempotent."""
        self._weights.pop(model, None)
        if self._path is not None:
            self._remove(_weights_folder(self._path) / model)

    def _delete_all_weights(self) -> None:
        self._weights = {}
        if self._path is not None:
            shutil.rmtree(_weights_folder(self._path), ignore_errors=True)

    def remove(self) -> None:
        """Remove the state of an endpoint that is gone. Later saves are ignored: a last report may still arrive.
        Idempotent."""
        self._delete_all_weights()
        if self._path is not None:
            self._remove(self._path)
            self._path = None
        self._unwritten = {}

    def _write(self, path: Path, content: bytes) -> None:
        incoming = path.with_name(f".incoming-{path.name}")
        try:
            make_folder(path.parent)
            create_private(incoming).write_bytes(content)
            incoming.replace(path)
        except OSError as error:
            with suppress(OSError):
                incoming.unlink(missing_ok=True)
            if path not in self._unwritten:
                logger.error("%s cannot be written, the endpoint continues and tries again: %s", path, error)
            self._unwritten[path] = content
        else:
            self._unwritten.pop(path, None)

    def _remove(self, path: Path) -> None:
        self._unwritten.pop(path, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("%s cannot be removed, and is no longer used: %s", path, error)


def find_served_versions(folder: Path, registry: str) -> dict[tuple[str, int], Path]:
    """The versions of a registry that endpoints serve or go back to, by name and number, with the state file.

    folder: of the state files. Raises RunError for a file of a newer format, or one that cannot be read.
    """
    served: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.json")):
        state = StateFile(path).read()
        if state is None and path.exists():
            remedy = "restore it from a copy, or remove it if its cluster is gone"
            raise RunError(f"{path} cannot be read, so what its endpoint serves is not known: {remedy}")
        for name, model in state.models.items() if state is not None else ():
            if model.deployment.registry == registry:
                rollout = model.rollout
                versions = filter(None, (rollout.stable, rollout.candidate, rollout.previous))
                served |= {(name, version): path for version in versions}
    return served


def _weights_folder(state: Path) -> Path:
    return state.with_suffix(".weights")
