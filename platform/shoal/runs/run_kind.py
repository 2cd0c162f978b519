"""What kind of run it is, whatever its author calls its job.

The flow that creates a record gives the kind. Where it gives none, as a job of the user's own, it is inferred from the
spec's fields.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import yaml


class RunKind(StrEnum):
    """The kind of a run: one of these, or `RunKind("curve")` of a `RunFlow`. OTHER is a job that says none."""

    LOOP = "loop"
    TRAINING = "training"
    POPULATION = "population"
    SERVING = "serving"
    PREDICTION = "prediction"
    SWEEP = "sweep"
    STREAM = "stream"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> RunKind | None:
        """The kind of a library or of a user, or one that a later Shoal recorded. What is no word is refused."""
        if not isinstance(value, str) or not value:
            return None
        kind = str.__new__(cls, value)
        kind._name_ = kind._value_ = value
        return kind


# The fields that a spec of the kind has, whatever else it has; the first match counts.
_FIELDS = (
    (RunKind.LOOP, {"target_return"}),
    (RunKind.POPULATION, {"task", "members", "evolution"}),
    (RunKind.SWEEP, {"train", "space", "trials"}),
    (RunKind.STREAM, {"mqtt", "online", "commit"}),
    (RunKind.TRAINING, {"task"}),
    (RunKind.PREDICTION, {"model", "input", "output"}),
    (RunKind.SERVING, {"models", "endpoint"}),
)

# Fields of the spec, or of a sweep's trials, or of an endpoint.
_TASK = r"(?:  )?(?:task|recipe)"
_NAME = r"(?:(?:train|endpoint):\n(?:  .*\n)*?  )?name"
_GENERIC_JOB = "train"


def format_name(job: str, kind: RunKind, spec: str) -> str:
    """What a run is called: as its spec names its model or its endpoint, or by its Task, after the job where that says
    more, as in `sweep lenet`. `{data}` in a name is the stem of that file."""
    name = re.sub(r"{(\w+)}", lambda each: Path(_find(f" +{each[1]}", spec)).name.split(".")[0], _find(_NAME, spec))
    if not name and kind in (RunKind.TRAINING, RunKind.POPULATION, RunKind.SWEEP):
        task = _find(_TASK, spec)
        name = task.rpartition(":")[2] if ":" in task else Path(task).stem  # of my_task.py:MyTask, of jobs/lenet.py
    return " ".join(dict.fromkeys(each for each in (job, name) if each and (each != _GENERIC_JOB or not name)))


def _find(field: str, spec: str) -> str:
    """The first text of a field; "" for none. A list of runs is no time to parse all of their YAML."""
    line = re.search(rf"^{field}: ['\"]?([^'\"\n]+)", spec, re.MULTILINE)
    return line[1] if line else ""


def infer_kind(spec: str) -> RunKind:
    """Infer it from a recorded spec (YAML)."""
    return find_kind(infer_fields(spec))


def find_kind(fields: Collection[str]) -> RunKind:
    """The kind of runs whose spec has these fields."""
    return next((kind for kind, needed in _FIELDS if needed <= set(fields)), RunKind.OTHER)


def infer_fields(spec: str) -> set[str]:
    """The fields of a recorded spec (YAML); none if it is not a mapping."""
    try:
        fields = yaml.safe_load(spec)
    except yaml.YAMLError:
        return set()
    return set(fields) if isinstance(fields, dict) else set()
