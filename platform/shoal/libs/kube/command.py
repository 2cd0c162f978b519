"""`shoal kube render`: manifests as files. Parse, check, write; talks to no cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import click
import yaml

from shoal.atomic_file import create_private
from shoal.config import format_override, last_override, merge, parse_overrides
from shoal.errors import ConfigError
from shoal.extend.cli import CommandGroup, Texts, find_job, validate_overrides
from shoal.extend.flows import ServingSpec
from shoal.extend.registry import split_ref
from shoal.extend.runs import split_secrets
from shoal.home import load_access_token, ray_token_path
from shoal.libs.kube.manifests import (
    CONSOLE_PORT,
    Document,
    make_cluster,
    make_console,
    make_endpoint,
    make_job,
    make_secret,
)
from shoal.libs.kube.spec import MAX_NAME_CHARS, KubeSpec
from shoal.recipes import find_packaged
from shoal.yaml_text import read_fields

PREFIX = "kube."
RECIPES = "/opt/shoal/jobs"  # in the image

Arguments = Annotated[Texts, "[kube.A.B=C]..."]
File = Annotated[Path | None, "YAML of the fields of kube, which words change."]
Folder = Annotated[Path, "Folder of the files."]
MANIFESTS = Path("manifests")


@click.group()
def kube() -> None:
    """Shoal on Kubernetes, by the operator KubeRay."""


@click.group(cls=CommandGroup)
def render() -> None:
    """Write the manifests of a job, an endpoint, a cluster or the console; kubectl applies them.

    Words kube.A.B=C set where it runs: kube.image, kube.store, kube.workers.max and others (docs/kubernetes.md). The
    tokens go into a file of their own, NAME-tokens.yaml, unless kube.secret names a Secret that is there.

    \b
    Examples:
      shoal kube render job train task=digits.py:Digits workers=4 kube.image=IMAGE kube.store=s3://BUCKET/shoal
      shoal kube render endpoint digits@champion endpoint.insecure=true --file kube.yaml
      shoal kube render cluster kube.name=lab kube.workers.gpus=1 --file kube.yaml
      shoal kube render console --cluster lab --file kube.yaml
    """


kube.add_command(render)


@render.verb()
def job(
    job: str,
    arguments: Annotated[Texts, "[A.B=C]..."] = (),
    *,
    file: File = None,
    out: Folder = MANIFESTS,
) -> Iterator[str]:
    """A RayJob of JOB, with fields of its spec set by A.B=C words; the image has its file at the same path."""
    path, (own, theirs) = find_job(job), _split(arguments)
    spec = _load(file, own, _to_name(path.stem))
    _, secrets = split_secrets(theirs)
    if secrets:
        remedy = "put it into the Secret kube.credentials, and let the Task read the variable"
        raise ConfigError("overrides", "***", "has a secret, which the manifest would show", remedy)
    _require_capacity(spec, theirs)
    validate_overrides(path, [each for each in theirs if not each.startswith("resume=")])
    program = ["python", _find_in_image(path), *theirs]
    return _write(spec, make_job(spec, program), out)


@render.verb()
def endpoint(
    arguments: Annotated[Texts, "NAME[@VERSION]... [A.B=C]..."] = (),
    *,
    file: File = None,
    out: Folder = MANIFESTS,
) -> Iterator[str]:
    """A RayService that serves registered models; A.B=C words set fields of the endpoint."""
    own, theirs = _split([each for each in arguments if "=" in each])
    models = [each for each in arguments if "=" not in each]
    fields = parse_overrides(ServingSpec, [format_override("models", ",".join(models)), *theirs])
    spec = _load(file, own, _to_name(split_ref(models[0])[0]) if models else "endpoint")
    return _write(spec, make_endpoint(spec, models, fields.get("endpoint", {})), out)


@render.verb()
def cluster(
    arguments: Arguments = (),
    *,
    file: File = None,
    out: Folder = MANIFESTS,
) -> Iterator[str]:
    """A RayCluster that stays."""
    spec = _load_alone(file, arguments, "cluster", "shoal")
    return _write(spec, make_cluster(spec), out)


@render.verb()
def console(
    arguments: Arguments = (),
    *,
    cluster: Annotated[str, "--cluster NAME", "A RayCluster of its namespace that it shows."] = "",
    names: Annotated[Texts, "--name", "By which browsers reach it, with kube.tls_secret. Repeatable."] = (),
    file: File = None,
    out: Folder = MANIFESTS,
) -> Iterator[str]:
    """A Deployment of the console: over the store, and a cluster.

    Without kube.tls_secret it listens at its pod's loopback alone, where the printed `kubectl port-forward` leads.
    """
    spec = _load_alone(file, arguments, "console", "console")
    yield from _write(spec, make_console(spec, names, cluster), out)
    target = f"-n {spec.namespace} deployment/{spec.name}"
    scheme = "https" if spec.tls_secret else "http"
    yield f"kubectl port-forward {target} {CONSOLE_PORT}   # and open {scheme}://localhost:{CONSOLE_PORT}"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the cluster, without their prefix, and the others."""
    own = [each.removeprefix(PREFIX) for each in arguments if each.startswith(PREFIX)]
    return own, [each for each in arguments if not each.startswith(PREFIX)]


def _find_in_image(path: Path) -> str:
    """The path of a job's file in the image: that of a recipe is given by the Dockerfile, another is below the folder
    that the image works in, as it is below this one. Raises ConfigError."""
    if path.parent == find_packaged("jobs"):
        return f"{RECIPES}/{path.name}"
    if not path.is_relative_to(Path.cwd()):
        raise ConfigError("job", str(path), "is not below this folder, as it has to be in the image", "start there")
    return str(path.relative_to(Path.cwd()))


def _to_name(text: str) -> str:
    """A name of Kubernetes's of a job's or a model's."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MAX_NAME_CHARS].rstrip("-")


def _load(file: Path | None, overrides: Sequence[str], name: str) -> KubeSpec:
    values = {} if file is None else read_fields(file, "file", "write it as `image: IMAGE`")
    try:
        return KubeSpec.parse(merge({"name": name, **values}, parse_overrides(KubeSpec, overrides)))
    except ConfigError as error:  # by the field's name on the command line: a job has `workers` of its own
        field = PREFIX.rstrip(".") if error.field == KubeSpec.__name__ else f"{PREFIX}{error.field}"
        raise ConfigError(field, error.value, error.problem, error.remedy) from None


def _load_alone(file: Path | None, arguments: Sequence[str], what: str, name: str) -> KubeSpec:
    """The spec of what has no job, and so no other fields."""
    own, theirs = _split(arguments)
    if theirs:
        raise ConfigError("kube", theirs[0], f"is no field of a {what}", f"write {PREFIX}A.B=C")
    return _load(file, own, name)


def _require_capacity(spec: KubeSpec, overrides: Sequence[str]) -> None:
    """Raises ConfigError for more workers than all pods have processors, or GPUs, for."""
    workers, device = last_override(overrides, "workers"), last_override(overrides, "device")
    kind, size = ("GPUs", "gpus") if device == "cuda" else ("CPUs", "cpus")
    most = sum(getattr(group, size) * (group.max if spec.autoscale else group.min) for group in spec.all_groups)
    if workers.isdecimal() and int(workers) > most:
        problem = f"is more than the {most} {kind} of all pods"
        raise ConfigError("workers", workers, problem, f"give kube.workers.max or kube.workers.{size} more")


def _write(spec: KubeSpec, documents: Sequence[Document], out: Path) -> Iterator[str]:
    """Write the manifests, and the tokens into a file that its owner alone reads."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{spec.name}.yaml"
        plain = json.loads(json.dumps(documents))  # without what YAML would write as anchors
        path.write_text(yaml.safe_dump_all(plain, sort_keys=False))
        paths = [path]
        if not spec.secret:
            secret = out / f"{spec.name}-tokens.yaml"
            content = make_secret(spec, ray_token_path().read_text().strip(), load_access_token())
            secret.unlink(missing_ok=True)
            create_private(secret).write_text(yaml.safe_dump(content, sort_keys=False))
            paths.insert(0, secret)
    except OSError as error:
        raise ConfigError("out", str(out), f"cannot be written: {error.strerror}", "name another folder") from None
    yield from (f"kubectl apply -f {each}" for each in paths)
