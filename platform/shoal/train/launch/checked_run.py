"""Hands the facts of a check on to the job that follows it, so that a Task is built and read once before a cluster is.

`shoal run` sets $SHOAL_CHECKED_RUN to `print` for the job's `--check`, reads the facts from what it prints, and sets
the variable to them for the job on the cluster. The job uses them if they are those of its spec and source.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from shoal.registry import ModelFactory, Signature
from shoal.train.launch.validate import ValidatedRun, validate_run
from shoal.train.spec import TrainSpec
from shoal.train.task import find_source_file

VARIABLE = "SHOAL_CHECKED_RUN"
PRINT = "print"
PREFIX = "checked run: "


def find_check(spec: TrainSpec) -> ValidatedRun | None:
    """The facts of an earlier check of the same run; None without one."""
    given = os.environ.get(VARIABLE, "")
    if given not in ("", PRINT):
        facts = json.loads(given)
        if facts.pop("key") == _make_key(spec):
            file = find_source_file(spec.task)
            return _from_json(facts, *(() if file is None else [file.parent]))
    return None


def check_once(spec: TrainSpec) -> ValidatedRun:
    """The facts of an earlier check of the same run, or those of a check now. Raises as `validate_run`."""
    checked = find_check(spec)
    if checked is not None:
        return checked
    checked = validate_run(spec)
    if os.environ.get(VARIABLE) == PRINT:
        values = asdict(checked) | {
            "key": _make_key(spec),
            "factory": checked.factory.model_dump(mode="json", exclude={"code"}),  # a variable has a limit
            "signature": checked.signature.model_dump(mode="json"),
        }
        sys.stdout.write(f"{PREFIX}{json.dumps(values)}\n")
    return checked


def _from_json(values: dict[str, object], *folders: Path) -> ValidatedRun:
    factory = values.pop("factory")
    signature = values.pop("signature")
    names = values.pop("metric_names")
    notes = values.pop("notes")
    assert isinstance(factory, dict)
    assert isinstance(signature, dict)
    assert isinstance(names, list)
    assert isinstance(notes, list)
    return ValidatedRun(
        factory=ModelFactory.parse(factory).with_code(*folders),
        signature=Signature.parse(signature),
        metric_names=tuple(names),
        notes=tuple(notes),
        **values,  # type: ignore[arg-type]
    )


def _make_key(spec: TrainSpec) -> str:
    """Of the spec and the source of its Task; a run that is resumed has other facts each time."""
    file = find_source_file(spec.task)
    source = file.read_bytes() if file is not None and file.is_file() else b""
    return hashlib.sha256(spec.to_yaml().encode() + source).hexdigest()
