"""The interface of a tracker, and the words of `track=` that name one: of a library, a package, or a file of the user.

Called by specs, by the recorder of a run and by the follower. Imports no tracker's own library.
"""

from __future__ import annotations

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator

from shoal.config import MASKED
from shoal.errors import ConfigError
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.runs.record.provenance import is_secret_name
from shoal.yaml_text import parse_yaml

if TYPE_CHECKING:
    from shoal.runs.run_reader import MetricValue, Run

GROUP = "shoal.trackers"  # of entry points, and of the extensions of libraries
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


def _is_name(name: object) -> bool:
    return isinstance(name, str) and (name in collect_extensions(GROUP) or _REFERENCE.fullmatch(name) is not None)


def _validate_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _is_name(name):
            find_extension(str(name), GROUP, {})  # raises
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
        tracker = find_extension(name, GROUP, {})
    except ValueError as error:
        raise ConfigError("track", name, str(error)) from error
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise ConfigError("track", name, "is no shoal.extend.Tracker")
    if tracker.requires:
        module = importlib.util.find_spec(tracker.requires)
        if module is None or module.origin is None:  # the latter is a folder of this name, as `wandb` makes one
            remedy = f"pip install 'shoal[{tracker.requires}]'"
            raise ConfigError("track", name, "its library is not installed here", remedy)
    return tracker


def find_trackers(spec: str) -> tuple[str, ...]:
    """The names in the field `track` of a recorded spec (YAML); none where a job has another such field.

    Raises ConfigError as `load_tracker` does.
    """
    fields = parse_yaml(spec) if "track" in spec else None
    listed = fields.get("track") if isinstance(fields, dict) else None
    names = tuple(filter(_is_name, listed)) if isinstance(listed, list) else ()
    for name in names:
        load_tracker(name)
    return names


def make_file_name(name: str, suffix: str) -> str:
    """The name of a tracker's file in the folder of a run: `tracking-mlflow.json`."""
    return f"tracking-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.{suffix}"


def list_parameters(spec: str) -> dict[str, object]:
    """The fields of a recorded spec (YAML) by their paths, as `optimizer.learning_rate`, without secrets.

    Values are texts, numbers, booleans or None; a list is its JSON.
    """

    def flatten(path: str, value: object) -> Iterable[tuple[str, object]]:
        if isinstance(value, Mapping) and value:
            for name, each in value.items():
                yield from flatten(f"{path}.{name}" if path else str(name), each)
        elif MASKED not in str(value) and not is_secret_name(path):
            is_plain = value is None or isinstance(value, str | int | float)
            yield path, value if is_plain else json.dumps(value, default=str)

    fields = parse_yaml(spec)
    return dict(flatten("", fields)) if isinstance(fields, dict) else {}


def list_facts(run: Run) -> dict[str, str]:
    """What a reader of the tracker may search for, besides the spec."""
    facts = {"job": run.job, "kind": run.kind.value, "host": run.host, "git": run.git_revision or ""}
    return {f"shoal.{name}": each for name, each in facts.items() if each}


def list_models(run: Run) -> list[str]:
    """The registered models, as NAME@VERSION."""
    models: Any = run.to_dict()["models"]
    return [f"{model['name']}@{model['version']}" for model in models]
