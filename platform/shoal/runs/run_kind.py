"""What kind of run it is, whatever its author calls its job.

The flow that creates a record writes the kind. The reader infers it from the spec's fields where the record has none:
a run of an older Shoal, or of a job of the user's own.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import yaml


class RunKind(StrEnum):
    """The kind of a run; OTHER is a user's own job."""

    LOOP = "loop"
    TRAINING = "training"
    POPULATION = "population"
    SERVING = "serving"
    PREDICTION = "prediction"
    SWEEP = "sweep"
    STREAM = "stream"
    OTHER = "other"


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


@lru_cache(maxsize=16)  # called four times a second
def infer_kind(spec: str) -> RunKind:
    """Infer it from a recorded spec (YAML)."""
    try:
        fields = yaml.safe_load(spec)
    except yaml.YAMLError:
        return RunKind.OTHER
    found = set(fields) if isinstance(fields, dict) else set()
    return next((kind for kind, needed in _FIELDS if needed <= found), RunKind.OTHER)
