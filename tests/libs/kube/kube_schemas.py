"""Validates manifests as the API server of Kubernetes does: by KubeRay's schemas and by Kubernetes' own, strictly."""

import gzip
from functools import cache
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from shoal_program import ROOT

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
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
    root["metadata"] = {
        "type": "object",
        "properties": {name: {} for name in ("name", "namespace", "labels", "annotations")},
    }
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
    own = [
        (f"{path}.{name}".lstrip("."), value[name]) for name in ("template", "submitterPodTemplate") if name in value
    ]
    return own + [
        found for name, each in value.items() for found in _find_templates(each, f"{path}.{name}".lstrip("."))
    ]


def find_unrestricted(document: Any) -> list[str]:
    """Where a document has a pod that Pod Security's profile *restricted* refuses: its published rules."""
    found = []
    for path, template in _find_templates(document):
        pod = template["spec"]
        own = pod.get("securityContext", {})
        if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            found.append(f"{path}: shares namespaces of its host")
        found += [
            f"{path}: volume {each}" for each in pod.get("volumes", []) if not (each.keys() - {"name"}) <= VOLUMES
        ]
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        options = [(f"{path} {each['name']}", {**own, **each.get("securityContext", {})}) for each in containers]
        for where, security in options:
            profile = security.get("seccompProfile", {}).get("type")
            added = set(security.get("capabilities", {}).get("add", []))
            refused = {
                "escalates": security.get("allowPrivilegeEscalation") is not False,
                "keeps capabilities": "ALL" not in security.get("capabilities", {}).get("drop", []),
                "adds capabilities": not added <= {"NET_BIND_SERVICE"},
                "may be root": security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0,
                "has no seccomp": profile not in ("RuntimeDefault", "Localhost"),
                "is privileged": bool(security.get("privileged")),
            }
            found += [f"{where} {what}" for what, is_refused in refused.items() if is_refused]
    autoscaler = _find_values(document, "autoscalerOptions")
    found += ["the autoscaler escalates" for each in autoscaler if "securityContext" not in each]
    return found


def _find_values(value: Any, key: str) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [value[key]] if isinstance(value, dict) and key in value else []
    return own + [found for each in children for found in _find_values(each, key)]
