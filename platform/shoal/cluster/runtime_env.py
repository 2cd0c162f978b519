"""What a user adds to the environment of a job: packages, an image, variables, in the terms of Ray's `runtime_env`.

Called by `shoal run`, which hands it to `jobs.submit`. Ray makes the environment on each node, when a worker needs it.
Values of variables are secrets here: no message and no command line has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.runs.record.provenance import MASKED_VARIABLE, mask_values
from shoal.yaml_text import read_fields

_OURS = ("working_dir", "py_modules", "excludes")  # `jobs.submit` sets them
_PYTHON = ("pip", "uv", "conda", "py_executable", "image_uri", "container")  # have a Python of their own
_IMAGES = ("image_uri", "container")


@dataclass(frozen=True)
class JobEnvironment:
    """fields: of `runtime_env`, but for `env_vars`, which are `variables`"""

    fields: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def has_own_python(self) -> bool:
        """Whether the job runs in another Python than the cluster's, where this machine cannot check it."""
        return any(name in self.fields for name in _PYTHON)

    def require_combinable(self, ours: Mapping[str, str], *, is_uploaded: bool) -> None:
        """Raise ConfigError for what does not go with what the job has already.

        ours:        the variables that Shoal sets
        is_uploaded: whether the cluster is remote, so that folder and package are uploaded
        """
        for name in self.variables.keys() & ours.keys():
            raise ConfigError("env", name, "is set by Shoal itself", "leave it out")
        for name in _IMAGES if is_uploaded else ():
            if name in self.fields:
                problem = "Ray adds no folder to a container, and a remote cluster gets the job's by upload"
                raise ConfigError(name, self.fields[name], problem, "start its nodes from this image instead")

    def to_variables(self) -> dict[str, str]:
        """What the job has in its environment."""
        return {**self.variables, MASKED_VARIABLE: ",".join(self.variables)} if self.variables else {}

    def mask(self, text: str) -> str:
        """The text without the values of the variables."""
        return mask_values(text, self.variables.values())


def parse_job_environment(
    file: Path | None, packages: Sequence[str], image: str, variables: Sequence[str]
) -> JobEnvironment:
    """The environment of a file, with the other options added. Raises ConfigError.

    file:      YAML or JSON of a `runtime_env`
    packages:  as pip takes them
    variables: NAME=VALUE, or NAME of one of this process
    """
    fields = {} if file is None else read_fields(file, "runtime_env", "write it as `pip: [PACKAGE]`")
    for name in _OURS:
        if name in fields:
            problem = f"has {name}, which is the folder that the job is started in"
            raise ConfigError("runtime_env", str(file), problem, "leave it out, and start the job in that folder")
    given = fields.pop("env_vars", {})
    env = {**given, **dict(map(_parse_variable, variables))} if isinstance(given, dict) else given
    if packages:
        present = fields.get("pip", [])
        if not isinstance(present, list):
            raise ConfigError("pip", list(packages), f"{file} has pip as {present!r}", "give all packages in the file")
        fields["pip"] = [*present, *packages]
    if image:
        fields["image_uri"] = image
    _require_valid(fields, env)
    return JobEnvironment(fields, env)


def format_options(file: Path | None, packages: Sequence[str], image: str, variables: Sequence[str]) -> tuple[str, ...]:
    """The options of a command that gives the same environment, with `--env NAME` for each variable: its value is to be
    in the environment of the next one who types the command."""
    options = [("--runtime-env", str(file))] if file is not None else []
    options += [("--pip", each) for each in packages]
    options += [("--image", image)] if image else []
    options += [("--env", each.partition("=")[0]) for each in variables]
    return tuple(part for option in options for part in option)


def _parse_variable(written: str) -> tuple[str, str]:
    name, separator, value = written.partition("=")
    if not name or not (separator or name in os.environ):
        problem = "is not set in this process" if name else "has no name"
        raise ConfigError("env", name, problem, "write NAME=VALUE, or the NAME of a variable that is set")
    return name, value if separator else os.environ[name]


def _require_valid(fields: dict[str, Any], variables: Any) -> None:
    """What Ray would refuse. Its messages name types and fields; the values of variables are not given to it."""
    if not isinstance(variables, dict) or not all(isinstance(each, str) for each in (*variables, *variables.values())):
        raise ConfigError("env_vars", "", "is not a text for each name", 'write numbers as texts: NAME: "1"')
    if not fields:
        return
    from ray.runtime_env import RuntimeEnv  # a third of a second

    try:
        unknown = fields.keys() - RuntimeEnv.known_fields
        RuntimeEnv(**fields)
    except (TypeError, ValueError) as error:
        problem = f"is refused by Ray: {' '.join(str(error).split())}"
        raise ConfigError("runtime_env", sorted(fields), problem, "leave one of them out") from None
    if unknown:
        known = ", ".join(sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_")))
        raise ConfigError("runtime_env", min(unknown), "is no field of Ray's runtime_env", f"use {known}")
