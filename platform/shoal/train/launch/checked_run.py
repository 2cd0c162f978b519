"""Hands the facts of a check on to the job that follows it, so that a Task is built and read once before a cluster is.

`shoal run` names a file in $SHOAL_CHECKED_RUN: its `--check` writes the file, and the job on the cluster that it starts
then takes the facts from there, if they are those of the same spec and the same source.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from shoal.atomic_file import replace_synced
from shoal.registry import ModelFactory, Signature
from shoal.train.launch.validate import ValidatedRun, validate_run
from shoal.train.spec import TrainSpec
from shoal.train.task import find_source_file

VARIABLE = "SHOAL_CHECKED_RUN"


def check_once(spec: TrainSpec) -> ValidatedRun:
    """The facts of an earlier check of the same run, or those of a check now. Raises as `validate_run`."""
    name = os.environ.get(VARIABLE)
    if not name:
        return validate_run(spec)
    file, key = Path(name), _make_key(spec)
    if file.is_file():
        found = json.loads(file.read_text())
        if found.pop("key") == key:
            return _from_json(found)
    checked = validate_run(spec)
    values = asdict(checked) | {
        "key": key,
        "factory": checked.factory.model_dump(mode="json"),
        "signature": checked.signature.model_dump(mode="json"),
    }
    replace_synced(file, json.dumps(values).encode())
    return checked


def _from_json(values: dict[str, object]) -> ValidatedRun:
    factory, signature, names = values.pop("factory"), values.pop("signature"), values.pop("metric_names")
    assert isinstance(factory, dict)
    assert isinstance(signature, dict)
    assert isinstance(names, list)
    return ValidatedRun(
        factory=ModelFactory.parse(factory),
        signature=Signature.parse(signature),
        metric_names=tuple(names),
        **values,  # type: ignore[arg-type]
    )


def _make_key(spec: TrainSpec) -> str:
    """Of the spec and the source of its Task; a run that is resumed has other facts each time."""
    file = find_source_file(spec.task)
    source = file.read_bytes() if file is not None and file.is_file() else b""
    return hashlib.sha256(spec.to_yaml().encode() + source).hexdigest()
