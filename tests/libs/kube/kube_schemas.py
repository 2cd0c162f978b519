"""Validates manifests as the API server of Kubernetes does: by KubeRay's schemas and by Kubernetes' own, strictly."""

import gzip
from functools import cache
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from shoal_program import ROOT

CRDS = ROOT.parent / "shared" / "crds"  # of KubeRay; not part of this project


def find_problems(document: dict[str, Any]) -> list[str]:
    """`PATH: what is wrong`, for each problem of a manifest."""
    if document["apiVersion"] != "ray.io/v1":
        return _validate_own(document)
    errors = _load_validator(document["kind"]).iter_errors(document)
    found = [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    for path, template in _find_templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        found += [f"{path}.{problem}" for problem in _validate_own(pod)]
    return found


def _validate_own(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@cache
def _load_validator(kind: str) -> Validator:
    with gzip.open(CRDS / f"ray.io_{kind.lower()}s.yaml.gz") as file:
        versions = yaml.load(file, Loader=yaml.CSafeLoader)["spec"]["versions"]
    [schema] = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    root: dict[str, Any] = schema["properties"]
    root["metadata"] = {"type": "object", "properties": {name: {} for name in ("name", "namespace", "labels")}}
    _make_strict(schema)
    return Draft202012Validator(schema)


def _make_strict(schema: dict[str, Any]) -> None:
    """Rewrite Kubernetes' own words as those of JSON Schema; unknown fields are errors, as for `kubectl` they are."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
    if schema.get("format") in ("int32", "int64"):
        del schema["format"]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema["additionalProperties"] = False
    for each in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(each, dict):
            _make_strict(each)


def _find_templates(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        return [found for number, each in enumerate(value) for found in _find_templates(each, f"{path}.{number}")]
    if not isinstance(value, dict):
        return []
    own = [(f"{path}.template".lstrip("."), value["template"])] if "template" in value else []
    return own + [
        found for name, each in value.items() for found in _find_templates(each, f"{path}.{name}".lstrip("."))
    ]
