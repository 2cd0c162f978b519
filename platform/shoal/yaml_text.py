"""YAML as specs, overrides and records have it: 1.1 with the numbers of 1.2.

Called by `config` and by readers of records; knows no spec.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from shoal.errors import ConfigError

_INT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "merge"))
_INTS = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FLOATS = re.compile(
    r"""([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?
    |[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that `1e-3` is a number, as in YAML 1.2, and `1:30` is not.

    A duplicate key in a mapping is rejected, as YAML demands: the first value would be lost.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise MarkedYAMLError(problem=f"{twice[0]!r} stands twice in it")
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` or YAML 1.1 would read as something else."""


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] not in (_INT, _FLOAT)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, _INTS, list("-+0123456789"))
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(_FLOAT, _FLOATS, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse a spec's file or an override's value. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # an invalid date or number, such as 2026-02-30; a deep nesting
        raise MarkedYAMLError(problem=str(error)) from error


def read_fields(path: Path, field: str, remedy: str) -> dict[str, Any]:
    """The fields in a file of YAML. Raises ConfigError for `field`, with the remedy for one that has none."""
    try:
        fields = parse_yaml(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(field, str(path), f"cannot be read: {error}", "give a file of YAML") from None
    if not isinstance(fields, dict):
        raise ConfigError(field, str(path), "holds no fields", remedy)
    return fields


def dump_yaml(value: Any) -> str:
    """The text of a plain value, which `parse_yaml` and other YAML parsers read back as it was."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    return text
