"""The interface of a tracker, and the words of `track=` that name one: of a library, a package, or a file of the user.

Called by specs, by what begins the record of a run and by the followers that a library starts. Imports no tracker's
own library.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

from pydantic import AfterValidator, BeforeValidator

from shoal.errors import ConfigError, format_install
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.yaml_text import parse_yaml

if TYPE_CHECKING:
    from shoal.runs.run_reader import MetricValue, Run

GROUP = "shoal.trackers"  # of entry points, and of the extensions of libraries
FOLLOWERS, PROCESSES = "shoal.followers", "processes"  # the group and the word of what starts the followers of a run
_REFERENCE = re.compile(r"[\w./-]+:\w+")  # module:name or file.py:name


class Tracker(ABC):
    """One run at a tracker, in a process that nothing waits for.

    Each method may raise any exception: it is then called again later, `begin` first where it has not returned yet.
    """

    requires: ClassVar[str] = ""  # the module of its library, which is also an extra of the package

    @abstractmethod
    def begin(self, run: Run, tracker_run: str) -> tuple[str, str]:
        """Create the run there, or continue `tracker_run` ("": unknown). Returns its id there, and its address."""

    @abstractmethod
    def send(self, values: Sequence[MetricValue]) -> None:
        """Add values, those of one time together and in the order of time."""

    @abstractmethod
    def finish(self, run: Run) -> None:
        """Record how the run ended, and return when the tracker has everything."""


class RunFollowers(Protocol):
    """What sends one incarnation of a run to its trackers."""

    def check(self, newest: float) -> list[dict[str, object]]:
        """Details of an event for each tracker that lacks values: once. newest: when the newest value was logged"""
        ...

    def close(self) -> list[dict[str, object]]:
        """Wait for the end, for a bounded time: the details of an event for each tracker."""
        ...


def _is_name(name: object) -> bool:
    return isinstance(name, str) and (name in collect_extensions(GROUP) or _REFERENCE.fullmatch(name) is not None)


def _validate_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _is_name(name):
            find_extension(str(name), GROUP)  # raises
    return tuple(dict.fromkeys(names))


TrackerNames = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    AfterValidator(_validate_names),
]
"""A field of a spec: where its run is mirrored to; `track=mlflow` is `track=[mlflow]`."""


def load_tracker(name: str) -> type[Tracker]:
    """The class of a name. Raises ConfigError where there is none, or its library is not installed here."""
    try:
        tracker = find_extension(name, GROUP)
    except ValueError as error:
        raise ConfigError("track", name, str(error)) from error
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise ConfigError("track", name, "is no shoal.extend.Tracker")
    if tracker.requires:
        module = importlib.util.find_spec(tracker.requires)
        if module is None or module.origin is None:  # the latter is a folder of this name, as `wandb` makes one
            raise ConfigError("track", name, "its library is not installed here", format_install(tracker.requires))
    return tracker


def find_trackers(spec: str) -> tuple[str, ...]:
    """The names in the field `track` of a recorded spec (YAML); none where a job has another such field.

    Raises ConfigError as `load_tracker` does, and without a library that follows runs.
    """
    fields = parse_yaml(spec) if "track" in spec else None
    listed = fields.get("track") if isinstance(fields, dict) else None
    names = tuple(filter(_is_name, listed)) if isinstance(listed, list) else ()
    for name in names:
        load_tracker(name)
    if names and PROCESSES not in collect_extensions(FOLLOWERS):
        raise ConfigError("track", names, "needs a library that follows runs", "leave it out")
    return names


def start_followers(run_id: str, folder: Path, names: Sequence[str]) -> RunFollowers | None:
    """Start what sends a run to its trackers; None without a tracker."""
    if not names:
        return None
    followers: RunFollowers = find_extension(PROCESSES, FOLLOWERS)(run_id, folder, names)
    return followers
