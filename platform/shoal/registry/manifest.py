"""The manifest of a registered model version, and how to build and call the model.

Owns the specs that are stored with the weights as `manifest.json`. Called by the registry, by jobs that register a
model and by the endpoints that serve one. Never reads or writes a file, and imports torch only if a factory does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.registry.code_import import activate_code, import_module
from shoal.registry.model_code import ModelCode, collect_code

# The names of the Open Inference Protocol v2, and the newer BF16.
DATATYPES = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
)
ColumnKind = Annotated[str, Field(pattern="^(number(:[.,])?|word|date(:.+)?|truth)?$")]


class TensorSignature(Spec):
    """One input or output of a model.

    name:     its name in requests
    datatype: a name of the Open Inference Protocol v2, such as FP32
    shape:    -1 is a dimension of variable size; the first one is the batch, unless an endpoint's options say otherwise
    columns:  names along the last dimension, by which named tables are aligned; empty: without names
    kind:     of an input that is one column of a table, [-1] of FP64 or, for words, of BYTES; it may have gaps, NaN or
              b"". A truth is 0 or 1, a date seconds since 1970; `date:%m/%d/%Y`, `number:,`: in rows. Empty: plain
    """

    name: str
    datatype: str
    shape: list[int]
    columns: list[str] = Field(default_factory=list)
    kind: ColumnKind = ""

    @field_validator("datatype")
    @classmethod
    def _known_datatype(cls, datatype: str) -> str:
        if datatype not in DATATYPES:
            raise ValueError(f"not a datatype of the Open Inference Protocol; one of {', '.join(DATATYPES)}")
        return datatype

    @field_validator("shape")
    @classmethod
    def _sensible_shape(cls, shape: list[int]) -> list[int]:
        if any(size < 1 and size != -1 for size in shape):
            raise ValueError("each dimension of a shape is positive, or -1 for variable")
        return shape

    @field_validator("columns")
    @classmethod
    def _one_column_for_each_value(cls, columns: list[str], info: ValidationInfo) -> list[str]:
        shape = info.data.get("shape", [])
        if columns and (len(shape) < 2 or len(columns) != shape[-1] or len(set(columns)) < len(columns)):
            raise ValueError(f"{len(columns)} names for the last dimension of {shape}: each of its values has its own")
        return columns

    @field_validator("kind")
    @classmethod
    def _column_of_a_table(cls, kind: ColumnKind, info: ValidationInfo) -> ColumnKind:
        datatype, shape = info.data.get("datatype", ""), info.data.get("shape", [])
        wanted = "BYTES" if kind == "word" else "FP64"
        if kind and (datatype != wanted or shape != [-1]):
            raise ValueError(f"a column of {kind}s is {wanted} [-1], not {datatype} {shape}")
        return kind


class Signature(Spec):
    """A model's inputs and outputs, in order."""

    inputs: list[TensorSignature]
    outputs: list[TensorSignature]

    @property
    def has_distribution(self) -> bool:
        """Whether the outputs are those of a policy: the best action, and the distribution of actions."""
        names = {spec.name for spec in self.outputs}
        return "action" in names and ("logits" in names or {"mean", "log_std"} <= names)


class ModelFactory(Spec):
    """How to build a model from its registered payload.

    format:  of its payload (see `shoal.registry.model_format`): `module` builds `factory`, of the form module:Class,
             with `kwargs`, and loads weights into it; files of all other formats contain both, and need no factory
    kwargs:  of the factory and of the hooks below
    preprocess, postprocess: an endpoint's steps before and after the model, unless its options override them: a
             `module:function` that returns the step (a function from a dict of arrays to another) for the model's
             `kwargs`
    code:    the user's own modules among these, as they are stored with a version; None: those that can be imported
    action:  of a policy: whether an endpoint takes its best action or samples, unless a request says otherwise
    """

    factory: str = ""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    format: str = "module"
    preprocess: str = ""
    postprocess: str = ""
    code: ModelCode | None = None
    action: Literal["best", "sampled"] = "best"

    @model_validator(mode="after")
    def _modules_alone_have_a_factory(self) -> ModelFactory:
        has_hook = bool(self.preprocess or self.postprocess)
        if self.format != "module" and (self.factory or (self.kwargs and not has_hook)):
            raise ValueError(f"a model of format {self.format} is all in its file: leave factory and kwargs out")
        return self

    def build(self) -> object:
        """Import the factory and call it. Raises ConfigError with the reason."""
        with activate_code(self.code):
            result = find_callable("model.factory", self.factory)
            try:
                return result(**self.kwargs)
            except (TypeError, ValueError) as error:
                raise ConfigError("model.kwargs", self.kwargs, f"{self.factory} refused them ({error})") from error

    def make_hook(self, name: Literal["preprocess", "postprocess"]) -> Any:
        """Import the factory of a hook and call it; None without one. Raises ConfigError, and what it raises."""
        reference: str = getattr(self, name)
        if not reference:
            return None
        with activate_code(self.code):
            return find_callable(f"model.{name}", reference)(**self.kwargs)

    def with_code(self, *folders: Path) -> ModelFactory:
        """With the code of the user's modules as they lie here now, unless it has code. Raises ConfigError.

        folders: where modules are looked for besides `sys.path`
        """
        if self.code is not None:
            return self
        return self.model_copy(update={"code": collect_code(self.model_dump(exclude={"code"}), *folders)})


def find_callable(field: str, reference: str) -> Any:
    """Import the class or function `module:name`, of the active code or as it can be imported here.

    Raises ConfigError for `field`, with the reason.
    """
    remedy = "write it as module:name, and make the module importable here"
    module_name, separator, path = reference.partition(":")
    if not (module_name and separator and path):
        raise ConfigError(field, reference, "is not of the form module:name", remedy)
    try:
        result: Any = import_module(module_name)
    except ImportError as error:
        raise ConfigError(field, reference, f"cannot be imported ({error})", remedy) from error
    for part in path.split("."):
        if not hasattr(result, part):
            raise ConfigError(field, reference, f"{module_name!r} has no {path!r}", remedy)
        result = getattr(result, part)
    if not callable(result):
        raise ConfigError(field, reference, "is not a class or function", remedy)
    return result


FORMAT = 2  # of a manifest with parts; one without them has 1


class ManifestPart(Spec):
    """One of several files with a version's weights: its name, the hex digest of its content, its bytes."""

    file: str
    sha256: str
    size_bytes: int = Field(ge=0)


class Manifest(Spec):
    """One version without its payload.

    format:          the number of the file's format
    version:         the model's version in the registry, from 1
    created_at:      the time of registration in seconds since the epoch
    run_id:          the run that made it; None when no run did
    weights_version: the weights' version within that run
    sha256:          hex digest of the payload: weights.safetensors, the index of its parts, or the model's file
    size_bytes:      of the payload, or of all parts
    parts:           the files of weights that are several; else []
    data:            fingerprints of its datasets, by part: train, validation, test
    lineage:         of a search's best: the search's run, the trial or member, and its hyper-parameters; of a table's
                     model its file, rows, target and categories; of others, what they were made from. `base` is the
                     reference of a version that it needs
    files:           hex digests of further files of the version, by name: a tokenizer's, say
    example:         a row, as an endpoint takes it, for those who try the model; none of the data's own
    """

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")  # metrics, which JSON cannot represent

    format: int = 1
    name: str
    version: int = Field(ge=1)
    created_at: float = Field(default_factory=time.time)
    run_id: str | None = None
    weights_version: int = Field(ge=0)
    sha256: str
    size_bytes: int = Field(ge=0)
    parts: list[ManifestPart] = Field(default_factory=list)
    model: ModelFactory
    signature: Signature
    metrics: dict[str, float] = Field(default_factory=dict)
    data: dict[str, str] = Field(default_factory=dict)
    lineage: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    example: dict[str, Any] = Field(default_factory=dict)
