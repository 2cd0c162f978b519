"""The formats of registered models: what a version's payload is, and who opens it.

Owns the table of formats. Imports none of their libraries. A format of the user's own is a `ModelFormat` in a module of
theirs, named by `shoal models add FILE --format my_format:FORMAT` (see `shoal.extend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.plugins.find import find_extension
from shoal.registry.code_import import load_object

GROUP = "shoal.formats"  # of entry points
INDEX_FILE = "model.safetensors.index.json"  # of a module's weights that are several files


@dataclass(frozen=True)
class ModelFormat:
    """A format.

    name:         as it is in a manifest: of the user's own, the `module:NAME` of this object, or its entry point
    template:     `module:Class`, called with a TemplateConfig; its `load(snapshot)` returns a version's forward, which
                  takes and returns arrays by name (see `shoal.serve.model.formats.template`)
    suffixes:     of the files that `shoal models add` takes for it
    signature:    `module:function` of (payload, file), which returns the Signature that the payload itself has; "": it
                  has none, and is registered with one
    check:        `module:function` of (payload, file), which raises WeightsError for what cannot be opened
    cuda:         `module:function` that says whether it runs on a CUDA device here; "": wherever torch does
    precisions:   of the option `precision` that it has
    can_compile, can_capture: whether it has the options `compile` and `cuda_graphs`
    advice:       what to do in place of an option that it lacks
    payload_file: the name of a version's file in the registry; of the user's own, always the default
    """

    name: str
    template: str
    suffixes: tuple[str, ...] = ()
    signature: str = ""
    check: str = ""
    cuda: str = ""
    precisions: tuple[str, ...] = ("fp32",)
    can_compile: bool = False
    can_capture: bool = False
    advice: str = "its file runs as it is"
    payload_file: str = "payload"

    def require_option(self, field: str, value: object, has_it: bool) -> None:
        """Raises ConfigError for an option that is asked of a format without it."""
        if not has_it:
            raise ConfigError(field, value, f"is not for models of format {self.name}", self.advice)


_HOME = "shoal.serve.model.formats"
MODULE = ModelFormat(
    "module",
    f"{_HOME}.module:ModuleTemplate",
    payload_file="weights.safetensors",
    precisions=("fp32", "bf16", "int8"),
    can_compile=True,
    can_capture=True,
)
TORCH_EXPORT = ModelFormat(
    "torch_export",
    f"{_HOME}.exported:ExportedTemplate",
    (".pt2",),
    f"{_HOME}.exported:read_signature",
    precisions=("fp32", "bf16"),
    can_compile=True,
    advice="register the module itself, or export it quantised",
    payload_file="model.pt2",
)
TORCHSCRIPT = ModelFormat(
    "torchscript",
    f"{_HOME}.torchscript:TorchScriptTemplate",
    (".pt", ".ts", ".jit", ".torchscript"),
    check=f"{_HOME}.torchscript:load_module",
    advice="TorchScript runs the file as it is; register the module itself",
    payload_file="model.pt",
)
ONNX = ModelFormat(
    "onnx",
    f"{_HOME}.onnx:OnnxTemplate",
    (".onnx",),
    f"{_HOME}.onnx:read_signature",
    cuda=f"{_HOME}.onnx:has_cuda",
    advice="onnxruntime runs the file as it is; register the module itself",
    payload_file="model.onnx",
)
FORMATS: Mapping[str, ModelFormat] = {each.name: each for each in (MODULE, TORCH_EXPORT, ONNX, TORCHSCRIPT)}


def find_format(name: str) -> ModelFormat:
    """The format that a manifest or an option names. Raises ConfigError."""
    if name in FORMATS:
        return FORMATS[name]
    try:
        chosen = load_object(name) if ":" in name else find_extension(name, GROUP, dict.fromkeys(FORMATS, ""))
    except ValueError as error:
        raise ConfigError("format", name, str(error)) from None
    if not isinstance(chosen, ModelFormat):
        raise ConfigError("format", name, "is no shoal.extend.ModelFormat", "name the object, as my_format:FORMAT")
    return chosen


def find_format_of_file(suffix: str) -> ModelFormat | None:
    """The format of ours whose files end so."""
    return next((each for each in FORMATS.values() if suffix in each.suffixes), None)


def get_payload_file(name: str) -> str:
    """The name of a version's file. Imports nothing: a registry is read where a user's format is not installed."""
    return FORMATS[name].payload_file if name in FORMATS else "payload"
