"""`shoal models`: the registry's versions and aliases.

Parse, call, print: `shoal.registry` does the work.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
from rich.table import Column
from rich.text import Text

from shoal.cli.support.console import confirm_removal, format_facts, make_number_column, make_table, remove_old
from shoal.cli.support.options import DryRun, NotNegative, OlderThan, Texts, VersionName, Yes
from shoal.cli.support.verbs import CommandGroup
from shoal.errors import ConfigError
from shoal.home import home
from shoal.plugins.find import load_reference
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.registry.model_code import ModelCode, list_nested_code
from shoal.registry.model_format import PAYLOAD_FILES, ModelFormat, find_format, find_formats_of_files
from shoal.runs.formatting import format_age, format_number, format_size, format_timestamp, format_value
from shoal.serve.controller.state import find_served_versions
from shoal.serve.spec.batch_layout import has_batch_first
from shoal.weights import WeightSnapshot

NUM_MOVES = 5
MAX_ARGUMENT_LENGTH = 500  # of JSON, that `show` prints


@click.group(cls=CommandGroup)
def models() -> None:
    """List, show, add, export, promote, roll back and remove registered models; push and pull those of Hugging Face.

    A model is named NAME@3, NAME@champion for its best version, or NAME for its newest one.

    \b
    Examples:
      shoal models list
      shoal models show cartpole@champion
      shoal models promote cartpole@3
    """


def _show_versions(versions: Sequence[ModelVersion]) -> object:
    if not versions:
        return "There are no models yet. A job registers what it trained:\n\n  shoal run --help"
    columns = [
        Column("model", overflow="fold"),
        Column("aliases", overflow="fold"),
        *map(make_number_column, ("age", "size")),
        Column("run", overflow="fold", no_wrap=True),  # which may be copied
        Column("metrics", overflow="fold"),
    ]
    return make_table(*columns, rows=map(_make_cells, versions))


def _as_dict(found: ModelVersion) -> dict[str, object]:
    described = json.loads(found.manifest.model_dump_json())
    return {**described, "aliases": list(found.aliases), "location": found.location}


@models.verb("list", show=_show_versions, to_json=lambda versions: [*map(_as_dict, versions)])
def list_models(name: str | None = None) -> Sequence[ModelVersion]:
    """List every version of every model, or of the model NAME.

    \b
    Examples:
      shoal models list
      shoal models list cartpole
    """
    return _open_registry().list(name)


def _open_registry() -> Registry:
    """Open it for verbs that only read: a store that does not answer is reported at once, and not after a minute."""
    registry = Registry()
    registry.store = registry.store.without_waiting()
    return registry


def _make_cells(version: ModelVersion) -> list[str | Text]:
    manifest = version.manifest
    age, size = format_age(time.time() - manifest.created_at), format_size(manifest.size_bytes)
    numbers = ", ".join(f"{key} {format_number(value)}" for key, value in manifest.metrics.items())
    aliases = Text(", ".join(version.aliases) or "-", style="green" if version.aliases else "default")
    return [version.ref, aliases, age, size, manifest.run_id or "-", numbers or "-"]


def _show_version(shown: tuple[ModelVersion, bool]) -> Iterator[str]:
    version, shows_code = shown
    if shows_code:
        return (f"{click.style(f'# {path}', bold=True)}\n{text}" for path, text in _list_code(version).items())
    is_module, manifest = version.manifest.model.format == "module", version.manifest
    snapshot = version.weight_file() if is_module else version.snapshot()
    files = f" in {len(manifest.parts)} files" if manifest.parts else ""
    payload = f"{format_size(manifest.size_bytes)}{files}, whole"
    kind = manifest.model.format
    built_by = f"{PAYLOAD_FILES[kind]} alone" if kind in PAYLOAD_FILES else kind
    if is_module:
        shapes = snapshot.shapes()
        num_values = sum(math.prod(shape) for shape in shapes.values())
        payload = f"{len(shapes)} tensors, {num_values:,} values, {payload}"
        built_by = f"{manifest.model.factory} {json.dumps(_shorten_arguments(manifest.model.kwargs))}"
    since = format_age(time.time() - manifest.created_at)
    facts = [
        ("model", version.ref),
        ("aliases", ", ".join(version.aliases) or "-"),
        ("registered", f"{format_timestamp(manifest.created_at)}, {since} ago"),
        ("from run", f"{manifest.run_id or '-'}, weights version {manifest.weights_version}"),
        ("built by", built_by),
        ("preprocess by", manifest.model.preprocess),
        ("postprocess by", manifest.model.postprocess),
        ("actions", "sampled" if manifest.model.action == "sampled" else ""),
        *(("input", _format_tensor(each)) for each in manifest.signature.inputs),
        *(("output", _format_tensor(each)) for each in manifest.signature.outputs),
        *((key, format_number(value)) for key, value in manifest.metrics.items()),
        *((key, format_value(value)) for key, value in manifest.lineage.items()),
        *((f"{part} data", fingerprint) for part, fingerprint in manifest.data.items()),
        *_describe_code(manifest.model.code),
        ("weights" if is_module else "program", payload),
        ("sha256", manifest.sha256),
        ("files", version.location),
    ]
    for alias, moves in sorted(_open_registry().aliases(version.name).moves.items()):
        facts += [
            (f"{alias} moved", f"by {each.kind} to {each.version}, {format_timestamp(each.time)}")
            for each in moves[-NUM_MOVES:]
        ]
    return format_facts(facts)


@models.verb(show=_show_version, to_json=lambda shown: _as_dict(shown[0]))
def show(
    model: VersionName,
    *,
    shows_code: Annotated[bool, "--code", "Print the code that is stored with it."] = False,
) -> tuple[ModelVersion, bool]:
    """Show one version.

    Its origin, how it is built and called, and whether its weights are intact.

    \b
    Examples:
      shoal models show cartpole@3
      shoal models show ranker@3 --code
    """
    return _open_registry().get(model), shows_code


@models.verb()
def diff(before: VersionName, after: VersionName) -> Iterator[str]:
    """Compare two versions: their code, packages, arguments, signature, metrics and data.

    \b
    Examples:
      shoal models diff ranker@1 ranker@2
      shoal models diff ranker@champion ranker
    """
    registry = _open_registry()
    old, new = registry.get(before), registry.get(after)
    facts, others = _list_facts(old), _list_facts(new)
    for name in sorted({*facts, *others}):
        if facts.get(name) != others.get(name):
            yield f"{name}: {facts.get(name, '-')} -> {others.get(name, '-')}"
    texts, changed = _list_code(old), _list_code(new)
    for path in sorted({*texts, *changed}):
        was, now = (each.get(path, "").splitlines() for each in (texts, changed))
        for line in difflib.unified_diff(was, now, f"{old.ref}/{path}", f"{new.ref}/{path}", lineterm=""):
            yield click.style(line, fg={"+": "green", "-": "red"}.get(line[0]))


@models.verb(work="registering the file")
def add(
    file: Path,
    *,
    name: Annotated[str | None, "The model's name; that of the file by default."] = None,
    alias: Annotated[str, "An alias for this version."] = "champion",
    signature_file: Annotated[Path | None, "--signature", "The tensors of a TorchScript file, in YAML or JSON."] = None,
    format_name: Annotated[
        str | None, "--format", "A format of your own, as my_format:FORMAT; by the file's suffix by default."
    ] = None,
) -> Iterator[str]:
    """Register a model file: torch.export (.pt2), ONNX (.onnx) or TorchScript (.pt, .ts, .jit).

    Its inputs and outputs are read from the file, or from --signature for TorchScript. Requests share a batch along the
    first dimension, if that is dynamic. A .pt2 or TorchScript file can contain code: add and serve only files that you
    trust.

    \b
    Examples:
      shoal models add resnet.onnx
      shoal models add build/model.pt2 --name ranker --alias candidate
      shoal models add model.pt --signature tensors.yaml
    """
    kind = _choose_format(file, format_name)
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise ConfigError("file", str(file), f"cannot be read ({error})") from error
    signature = _read_signature(kind, payload, str(file), signature_file)
    version = Registry().register(
        name or file.stem.lower(),
        WeightSnapshot.from_payload(1, payload),
        model=ModelFactory(format=kind.name),
        signature=signature,
        aliases=(alias,),
    )
    yield f"{version.name}@{alias} is {version.ref} now."
    for verb, tensors in (("takes", signature.inputs), ("gives", signature.outputs)):
        yield f"It {verb} {'; '.join(map(_format_tensor, tensors))}"
    if without := [spec for spec in (*signature.inputs, *signature.outputs) if not has_batch_first(spec)]:
        yield (
            f"Dimension 0 of {', '.join(spec.name for spec in without)} is not dynamic. To batch requests, export it"
            " with a dynamic first dimension (torch.export: dynamic_shapes with one Dim('batch')), or name the"
            " dimension of the batch where you serve it: endpoint.model.batch_dim='{TENSOR: 1}'"
        )
    unbatched = " endpoint.model.max_batch_size=0" if without else ""
    yield f"Serve it: shoal serve deploy {version.name}@{alias}{unbatched}"


@models.verb(work="writing the checkpoint")
def export(
    model: VersionName,
    *,
    folder: Annotated[Path, "--dcp", "The folder to write, which does not exist."],
) -> str:
    """Write the weights of a version as a distributed checkpoint.

    Its format is that of torch.distributed.checkpoint (DCP), with the tensors' own names at the top, as torchtitan has
    it. A run begins with such a folder by init=FOLDER.

    \b
    Examples:
      shoal models export llama@3 --dcp outputs/checkpoint/step-0
    """
    from shoal.atomic_file import draft_folder
    from shoal.weights.dcp_folder import write_dcp  # torch takes a second to load
    from shoal.weights.tensor_files import open_weight_file

    version = Registry().get(model)
    if (kind := version.manifest.model.format) != "module":
        raise ConfigError("model", version.ref, f"is a program of the format {kind}, which has no tensors by name")
    if folder.exists():
        raise ConfigError("dcp", str(folder), "exists", "name another folder, or remove it")
    tensors = open_weight_file(version.weight_file())
    with draft_folder(folder) as draft:
        write_dcp(draft, tensors.describe(), tensors)
    return f"{folder} has the {len(tensors)} tensors of {version.ref}. Begin a run with them: init={folder}"


@models.verb()
def promote(model: VersionName, *, alias: Annotated[str, "The alias to move."] = "champion") -> str:
    """Move an alias to this version.

    Endpoints that follow the alias then serve it.

    \b
    Examples:
      shoal models promote cartpole@3
      shoal models promote cartpole@candidate
      shoal models promote cartpole@3 --alias candidate
    """
    version = Registry().promote(model, alias)
    option = "" if alias == "champion" else f" --alias {alias}"
    back = f"shoal models rollback {version.name}{option}"
    return f"{version.name}@{alias} is {version.ref} now. Back to the one before: {back}"


@models.verb()
def rollback(name: str, *, alias: Annotated[str, "The alias to move back."] = "champion") -> str:
    """Move an alias back by one promotion.

    The alias of the model NAME returns to its previous version.

    \b
    Examples:
      shoal models rollback cartpole
      shoal models rollback cartpole --alias candidate
    """
    version = Registry().rollback(name, alias)
    return f"{version.name}@{alias} is {version.ref} now."


@models.verb("rm")
def remove(references: Annotated[Texts, "NAME[@VERSION]..."], *, yes: Yes = False) -> Iterator[str]:
    """Remove a version, or with NAME alone a model: all of its versions and aliases.

    A version that an alias names, that an endpoint serves, or that adapters have as their base, is refused. No number
    is used again.

    \b
    Examples:
      shoal models rm cartpole@3
      shoal models rm cartpole --yes
    """
    registry = Registry()
    served = find_served_versions(home() / "endpoints", registry.location)
    names: dict[str, None] = {}  # as they are now: `latest` may be another version when the answer comes
    for each in references:
        versions = [registry.get(each)] if "@" in each else registry.list(each)
        names[versions[0].ref if "@" in each else each] = None
        for version in versions:
            if (path := served.get((version.name, version.version))) is not None:
                endpoint = path.stem.rpartition("-")[0]
                remedy = (
                    f"deploy others with `shoal serve deploy {version.name}@N --into {endpoint}`, or"
                    f" `shoal serve delete {endpoint}`; if its cluster is gone, remove {path}"
                )
                problem = f"is served by the endpoint of {path.name}, or is the version that it goes back to"
                raise ConfigError("model", version.ref, problem, remedy)
            if "@" in each and version.aliases:
                remedy = f"move it with `shoal models promote {version.name}@N --alias {version.aliases[0]}`"
                raise ConfigError("model", version.ref, f"is {' and '.join(version.aliases)}", remedy)
        registry.require_no_dependents([version.ref for version in versions])
    confirm_removal(list(names), "models", yes)
    for each in names:
        registry.remove(each)
        yield f"{each} is removed"


@models.verb()
def prune(
    name: str | None = None,
    *,
    keep: Annotated[NotNegative | None, "Keep the newest versions of each model, so many."] = None,
    older_than: Annotated[OlderThan, "Keep newer versions than this, such as 30d."] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> Iterator[str]:
    """Remove old versions of every model, or of the model NAME.

    With both options, a version goes that is beyond the newest and old. Versions that an alias names, that an endpoint
    serves or goes back to, or that adapters have as their base, stay.

    \b
    Examples:
      shoal models prune --keep 5 --dry-run
      shoal models prune cartpole --keep 5 --older-than 30d --yes
    """
    if keep is None and older_than is None:
        raise ConfigError("prune", "", "needs --keep, --older-than, or both", "as in shoal models prune --keep 5")
    registry = Registry()
    by_name: dict[str, list[ModelVersion]] = {}
    for version in registry.list(name):
        by_name.setdefault(version.name, []).append(version)
    beyond = [each for versions in by_name.values() for each in versions[: max(0, len(versions) - (keep or 0))]]
    before_s = time.time() - (older_than or 0.0)
    old = [each for each in beyond if not each.aliases and each.manifest.created_at < before_s]
    served = find_served_versions(home() / "endpoints", registry.location)
    bases = registry.find_dependents()
    references = [each.ref for each in old if (each.name, each.version) not in served and each.ref not in bases]

    def remove() -> None:
        for each in references:
            registry.remove(each)
        registry.remove_leftovers()

    return remove_old(references, "models", remove, dry_run=dry_run, is_confirmed=yes)


def _choose_format(file: Path, format_name: str | None) -> ModelFormat:
    if format_name is not None:
        return find_format(format_name)
    formats = find_formats_of_files()
    if not formats:
        problem = "is of no format that a library opens here"
        raise ConfigError("file", str(file), problem, "install one, or give --format")
    if file.suffix not in formats:
        remedy = (
            "a model is a .pt2 file of torch.export.save, an .onnx file, or a .pt file of torch.jit.save; a module is"
            " registered in Python, by the job that trains it or with shoal.registry.Registry().register; give --format"
            " for a format of your own"
        )
        raise ConfigError("file", str(file), f"is not one of {', '.join(formats)}", remedy)
    return formats[file.suffix]


def _read_signature(kind: ModelFormat, payload: bytes, file: str, given: Path | None) -> Signature:
    """Imports the format's libraries, which take a second, on use."""
    if kind.check:
        load_reference(kind.check)(payload, file)
    if kind.signature:
        if given is not None:
            raise ConfigError("signature", str(given), f"is not for {file}, which has its own", "leave it out")
        return kind.read_signature(payload, file)
    if given is None:
        remedy = (
            "give --signature FILE, a YAML file of `inputs: [{name: x, datatype: FP32, shape: [-1, 3]}]` in the order"
            " of its forward, and `outputs: [...]`"
        )
        raise ConfigError("signature", "", f"{file} has no names and shapes of its tensors", remedy)
    try:
        return Signature.from_yaml(given)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("signature", str(given), f"cannot be read ({error})") from error


def _shorten_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Without a Task's source, and what is fitted to its data."""
    args = kwargs.get("args")
    shown = {**kwargs, "args": dict(args)} if isinstance(args, dict) else dict(kwargs)
    for values in (shown, shown["args"] if isinstance(args, dict) else {}):
        for name, value in values.items():
            if isinstance(value, str) and "\n" in value:
                values[name] = f"({value.count(chr(10))} lines, see --json)"
            elif name != "args" and len(json.dumps(value)) > MAX_ARGUMENT_LENGTH:
                values[name] = "(see --json)"
    return shown


def _list_code(found: ModelVersion) -> dict[str, str]:
    """The files of a version's code, with those of the factories in its arguments, by path."""
    codes = [("", found.manifest.model.code), *list_nested_code(found.manifest.model.kwargs)]
    texts = {f"{prefix}{path}": text for prefix, code in codes if code for path, text in code.files.items()}
    binary = {f"{prefix}{path}": "(no text)" for prefix, code in codes if code for path in code.binary}
    return {**texts, **binary}


def _describe_code(code: ModelCode | None) -> list[tuple[str, str | None]]:
    if code is None:
        return [("code", "not stored: this version runs whatever lies where it is loaded")]
    paths = [*code.files, *code.binary]
    packages = ", ".join(f"{name} {release}" for name, release in code.packages.items())
    return [
        ("code", f"{', '.join(paths)} (--code shows them)" if paths else ""),
        ("packages", packages),
        ("packages differ", code.describe_other_packages()),
    ]


def _list_facts(found: ModelVersion) -> dict[str, object]:
    """What `diff` compares besides code, by name."""
    manifest = json.loads(found.manifest.model_dump_json())
    model, code = manifest["model"], manifest["model"]["code"] or {}
    facts = {name: manifest[name] for name in ("sha256", "size_bytes", "signature", "run_id")}
    facts |= {name: model[name] for name in ("format", "factory", "preprocess", "postprocess")}
    parts = ("argument", model["kwargs"]), ("package", code.get("packages", {})), ("metric", manifest["metrics"])
    for part, values in (*parts, ("data", manifest["data"]), ("lineage", manifest["lineage"])):
        facts |= {f"{part} {name}": value for name, value in values.items() if name != "source"}
    return facts


def _format_tensor(tensor: TensorSignature) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in tensor.shape)
    columns = f" of {', '.join(tensor.columns)}" if tensor.columns else ""
    return f"{tensor.name}: {tensor.datatype} [{sizes}]{columns}"
