"""Exports a registered model into a folder that serves itself, or for a game. Called by `shoal export`, without Ray.

registry ─► convert (torch) ─► FolderModel, as the folder runs it ─► verify ─► examples.json
                                                                         └─► the folder takes its place
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from shoal.atomic_file import draft_folder, replace_synced
from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.extend.registry import PAYLOAD_FILES, ModelVersion, find_version
from shoal.extend.serve import BatchLayout, ModelOptions, to_tensor_metadata
from shoal.libs.export.convert import convert_to_onnx
from shoal.libs.export.examples import (
    Example,
    Predict,
    compare_answers,
    generate_examples,
    load_registered,
    read_examples,
    select_answered,
)
from shoal.libs.export.folder import complete_folder, copy_license, measure_folder, require_target
from shoal.libs.export.game_policy import GamePolicy, compare_vectors, describe_policy, make_vectors, read_experience
from shoal.libs.export.runtime.model import DESCRIPTION_FILE, FORMAT, MODEL_FILE, FolderModel, ModelDescription
from shoal.libs.export.runtime.self_test import EXAMPLES_FILE
from shoal.wire.experience_spec import ExperienceSpec

ONNX_FILE, OPSET = "policy.onnx", 15  # Unity's engine reads 7 to 15
RUNTIMES = ("Policy.gd", "PolicyLayer.gd", "policy.mjs", "Policy.cs", "policy.hpp")
MAX_STORED_BYTES = 1 << 20  # of an example; one is stored at any size
OLDEST_OPSET, NEWEST_OPSET = 7, 20  # that torch's exporter writes


class ExportSpec(Spec):
    """A model and the folder that it becomes.

    model:       name@version, name@alias, name for the newest version, or the id of a run that registered it
    to:          container: an HTTP server; lambda: a function of AWS Lambda; game: a policy for engines of games
    into:        the folder; empty: NAME-container, NAME-lambda or NAME-game, here
    replace:     replace a folder that is an export of the same model
    examples:    JSON files, each the body of an inference: compared and stored in addition to generated ones
    tolerance:   how far an output may be from the registered model's, relative to its largest value, or to 1
    max_batch_size, batch_dim, finite: as in an endpoint's options
    action:      `best` exports a policy that samples, whose folder takes the best actions; None rejects it, but for a
                 game, whose runtimes then act as it was registered
    opset:       of the ONNX file; None: 15 for a game, otherwise torch's
    preprocess, postprocess: `""` leaves a registered hook out, whose code no folder has; None rejects such a model
    """

    model: str = Field(min_length=1)
    to: Literal["container", "lambda", "game"]
    into: str = ""
    replace: bool = False
    examples: list[str] = Field(default_factory=list)
    tolerance: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    max_batch_size: int = Field(default=64, ge=0)
    batch_dim: dict[str, Annotated[int, Field(ge=0)] | None] = Field(default_factory=dict)
    finite: bool = True
    action: Literal["best"] | None = None
    opset: Annotated[int, Field(ge=OLDEST_OPSET, le=NEWEST_OPSET)] | None = None
    preprocess: Literal[""] | None = None
    postprocess: Literal[""] | None = None

    def make_options(self) -> ModelOptions:
        """The options of an endpoint that answers as the folder does. Raises ConfigError."""
        return ModelOptions(
            max_batch_size=self.max_batch_size,
            max_queue_size=max(self.max_batch_size, 1),
            batch_dim=self.batch_dim,
            finite=self.finite,
            device="cpu",
            warm_up=False,
            preprocess=self.preprocess,
            postprocess=self.postprocess,
        )


@dataclass(frozen=True)
class ExportReport:
    """A folder that was written.

    difference: the largest one of its answers from the registered model's, relative to their largest value, or to 1
    size_bytes: unzipped, with its packages
    warning:    why a game's folder has no runtimes; "": it has
    """

    folder: Path
    model: str
    num_examples: int
    difference: float
    size_bytes: int
    warning: str = ""


def export_model(spec: ExportSpec) -> ExportReport:
    """Write the folder. Raises ConfigError, RegistryError, WeightsError and OSError; then nothing has changed."""
    version = find_version(spec.model)
    into = Path(spec.into or f"{version.name}-{spec.to}").absolute()
    _require_exportable(version, spec)
    experience = read_experience(version) if spec.to == "game" else None
    require_target(into, version.name, replace=spec.replace)
    with draft_folder(into) as draft:
        if experience is not None:
            payload, difference = _make_onnx(version, spec.update({"opset": spec.opset or OPSET}))
            (draft / ONNX_FILE).write_bytes(payload)
            registered = load_registered(version, version.snapshot(), spec.make_options())
            written = write_game(draft, version, experience, registered, spec.tolerance, spec.action)
            num_vectors, other, warning = written
            size_bytes = measure_folder(draft)
            return ExportReport(into, version.ref, num_vectors, max(difference, other), size_bytes, warning)
        model, examples, difference = _convert(version, spec, draft)
        num_examples = _write_examples(draft, model, examples)
        size_bytes = complete_folder(draft, model.description)
    return ExportReport(into, version.ref, num_examples, difference, size_bytes)


def write_onnx(version: ModelVersion, path: Path, **fields: object) -> None:
    """Write a version as one ONNX file, compared as a folder is; a policy takes its best actions there.

    fields: of ExportSpec

    Raises ConfigError, WeightsError and OSError; then nothing has changed.
    """
    spec = ExportSpec.parse({"model": version.ref, "to": "container", "action": "best", **fields})
    _require_exportable(version, spec)
    payload, _ = _make_onnx(version, spec)
    replace_synced(path, payload)


def _make_onnx(version: ModelVersion, spec: ExportSpec) -> tuple[bytes, float]:
    """The model as one file, and the largest difference of its answers."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, difference = _convert(version, spec, Path(folder))
        return (Path(folder) / MODEL_FILE).read_bytes(), difference


def _convert(version: ModelVersion, spec: ExportSpec, folder: Path) -> tuple[FolderModel, Sequence[Example], float]:
    """Write the model and its description; returns it as the folder runs it, examples that it answers, and the largest
    difference of its answers from the registered model's."""
    options = spec.make_options()
    description, layout = _describe(version, spec), BatchLayout(version.manifest.signature, options)
    examples = read_examples(spec.examples, description)
    examples += generate_examples(version.manifest.signature, layout, options.max_rows)
    snapshot, registered = version.snapshot(), None
    if version.manifest.model.format == "onnx":
        payload = snapshot.payload
    else:
        registered = load_registered(version, snapshot, options)
        examples = select_answered(examples, registered, version.ref)
        largest = max(examples, key=lambda each: each.num_rows)
        payload = convert_to_onnx(version, snapshot, options, largest, spec.opset, has_doubles=spec.to != "game")
    (folder / MODEL_FILE).write_bytes(payload)
    (folder / DESCRIPTION_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(description)) + b"\n")
    model = FolderModel(folder)
    exported: Predict = lambda example: model.predict(example.inputs, example.num_rows)  # noqa: E731
    if registered is None:
        examples = select_answered(examples, exported, version.ref)
    difference = compare_answers(examples, registered or exported, exported, spec.tolerance, version.ref)
    return model, examples, difference


def _require_exportable(version: ModelVersion, spec: ExportSpec) -> None:
    """Raises ConfigError for what no folder has: hooks, formats of users' own, tensors of types that ONNX lacks."""
    model, signature = version.manifest.model, version.manifest.signature
    if model.format not in PAYLOAD_FILES:
        problem = f"is of format {model.format}; of {', '.join(PAYLOAD_FILES)} a folder can be made"
        raise ConfigError("model", version.ref, problem, "register it as ONNX")
    if model.format == "onnx" and spec.opset is not None:
        problem = "is for what torch exports, and an ONNX version keeps its own"
        raise ConfigError("opset", spec.opset, problem, "leave it out, or export the model from which it was made")
    if columns := [each.name for each in signature.inputs if each.kind]:
        problem = f"takes rows of a table ({columns[0]}, ...), encoded by code that neither ONNX nor a folder has"
        remedy = f'shoal.load("{version.ref}").predict(rows) answers in a program, `shoal serve deploy` at an endpoint'
        raise ConfigError("model", version.ref, problem, remedy)
    for hook in ("preprocess", "postprocess"):
        if getattr(model, hook) and getattr(spec, hook) is None:
            problem = f"has the {hook} {getattr(model, hook)}, whose code a folder does not have"
            remedy = f'{hook}="" exports the network without it; let clients do that step'
            raise ConfigError("model", version.ref, problem, remedy)
    if model.action == "sampled" and spec.action is None and spec.to != "game":
        remedy = "action=best exports it all the same; its clients may sample by the outputs of the distribution"
        raise ConfigError("model", version.ref, "samples its actions, and a folder takes the best ones", remedy)
    lacking = {"BF16"} if model.format == "onnx" else {"BF16", "BYTES"}
    for tensor in (*signature.inputs, *signature.outputs):
        if tensor.datatype in lacking:
            problem = f"{tensor.name!r} is {tensor.datatype}, which cannot be converted from {model.format} to ONNX"
            raise ConfigError("model", version.ref, problem, "give the model tensors of another type")
    if twice := {each.name for each in signature.inputs} & {each.name for each in signature.outputs}:
        problem = f"{min(twice)!r} names an input and an output, which ONNX does not allow"
        raise ConfigError("model", version.ref, problem, "register it with names of their own")


def _describe(version: ModelVersion, spec: ExportSpec) -> ModelDescription:
    manifest = version.manifest
    return ModelDescription(
        format=FORMAT,
        name=version.name,
        version=version.version,
        target=spec.to,
        source_format=manifest.model.format,
        source_sha256=manifest.sha256,
        inputs=to_tensor_metadata(manifest.signature.inputs),
        outputs=to_tensor_metadata(manifest.signature.outputs),
        max_batch_size=spec.max_batch_size,
        batch_dim=spec.make_options().batch_dim,
        finite=spec.finite,
        tolerance=spec.tolerance,
    )


def _write_examples(folder: Path, model: FolderModel, examples: Sequence[Example]) -> int:
    """Write requests and the model's answers, and the smallest request alone; returns their number."""
    stored: list[dict[str, msgspec.Raw]] = []
    for example in sorted(examples, key=lambda each: len(each.body)):
        if stored and len(example.body) > MAX_STORED_BYTES:
            continue
        response = model.answer("POST", f"/v2/models/{model.description.name}/infer", [], example.body)
        if response.status != 200:
            problem = f"the exported model does not answer it: {response.body.decode()}"
            raise ConfigError("examples", example.file, problem)
        stored.append({"request": msgspec.Raw(example.body), "answer": msgspec.Raw(response.body)})
        if len(stored) == 1:
            (folder / "request.json").write_bytes(example.body)
    (folder / EXAMPLES_FILE).write_bytes(msgspec.json.encode(stored))
    return len(stored)


def write_game(
    folder: Path,
    version: ModelVersion,
    experience: ExperienceSpec,
    registered: Predict,
    tolerance: float,
    action: str | None,
) -> tuple[int, float, str]:
    """Write what is beside policy.onnx. Raises ConfigError. action: how the runtimes act at first; None: as registered

    Returns the number of vectors, the largest difference from the registered model's outputs, and why the runtimes are
    left out, or "".
    """
    policy, difference = describe_policy(version, experience, action), 0.0
    vectors = make_vectors(policy, registered)
    texts = files("shoal.libs.export") / "game"
    if not policy.unsupported:
        difference = compare_vectors(experience, version, vectors, tolerance)
        for name in RUNTIMES:
            (folder / name).write_bytes((texts / name).read_bytes())
    encode = msgspec.json.encode
    (folder / "policy.json").write_bytes(msgspec.json.format(encode(policy)) + b"\n")
    (folder / "vectors.json").write_bytes(b"[\n" + b",\n".join(map(encode, vectors)) + b"\n]\n")
    (folder / "README.txt").write_text(_format_page((texts / "README.txt").read_text(), policy, version))
    copy_license(folder)
    return len(vectors), difference, policy.unsupported


def _format_page(text: str, policy: GamePolicy, version: ModelVersion) -> str:
    signature = version.manifest.signature
    tensors = [
        ", ".join(f"{each.name} {each.shape}" for each in side) for side in (signature.inputs, signature.outputs)
    ]
    bounds = ", ".join(f"{low:g} to {high:g}" for low, high in zip(policy.action_low, policy.action_high, strict=True))
    takes = f"{policy.observation_size} numbers, {list(policy.observation.shape)} in C order"
    gives = bounds or ", ".join(f"0 to {size - 1}" for size in policy.action_sizes)
    page = text if not policy.unsupported else text.partition("RUNTIMES")[0]
    return page.format(
        name=policy.name,
        version=policy.version,
        takes=takes + (f", with a mask of {policy.mask_size}" if policy.mask_size else ""),
        gives=f"an action of shape {policy.action_shape}: {gives}" if policy.action_shape else f"one of {gives}",
        tensors=" -> ".join(tensors),
        contents="sizes, bounds and weights, for the runtimes below"
        if not policy.unsupported
        else f"sizes and bounds; no weights and no runtimes, as {policy.unsupported}",
        shape=", ".join(map(str, policy.observation.shape)),
        unity_type="float" if policy.action_low else "int",
        action=policy.action,
    )
