"""In what runs differ before they learn: fields of their specs, defaults included, their data, and the text of their
code. Reads only the run record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from shoal.errors import ShoalError
from shoal.extend.runs import Run, RunKind
from shoal.plugins.find import load_reference

UNKNOWN = "-"
_SPECS = {RunKind.TRAINING: "shoal.extend.train:TrainSpec", RunKind.LOOP: "shoal.extend.flows:ActorLearnerSpec"}
_IGNORED = ("resume",)


def find_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, by name: the value of each. What only one kind of run has is left
    out where runs are of several kinds."""
    specs = _read_specs(runs)
    settings = [dict(_flatten(spec)) | _describe_origin(run) for run, spec in zip(runs, specs, strict=True)]
    result = {}
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [each.get(name, UNKNOWN) for each in settings]
        kinds = {run.kind for run, each in zip(runs, settings, strict=True) if name in each}
        if len(set(values)) > 1 and kinds == {run.kind for run in runs} and name not in _IGNORED:
            result[name] = values
    return result


def _read_specs(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The fields of each run with their defaults; where one cannot be read so, the recorded fields of all."""
    recorded = [yaml.safe_load(run.spec) for run in runs]
    recorded = [each if isinstance(each, dict) else {} for each in recorded]
    try:
        types = [load_reference(_SPECS[run.kind]) if run.kind in _SPECS else None for run in runs]
        return [
            each if kind is None else kind.from_record(run.spec).model_dump(mode="json")
            for run, kind, each in zip(runs, types, recorded, strict=True)
        ]
    except (ShoalError, ValueError):  # of an older release, with secrets, or with an algorithm that is not here
        return recorded


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _describe_origin(run: Run) -> dict[str, str]:
    """The fingerprints of its data, of the files that its spec names, and its git revision, as far as it has them."""
    seen = run.last_events()
    origin = {f"data: {part}": str(found) for part, found in seen.get("data", {}).items()}
    origin |= {f"text of {file}": sha256[:12] for file, sha256 in seen.get("code", {}).items()}
    if run.git_revision:
        origin["git revision"] = run.git_revision[:10] + (" (changed)" if run.git_dirty else "")
    return origin
