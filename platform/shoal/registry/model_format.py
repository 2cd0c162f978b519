"""The formats of registered models: what a version's payload is, and what opens it.

Owns the format of modules, and finds the others: of a library, or a `ModelFormat` in a module of the user's, named by
`shoal models add FILE --format my_format:FORMAT` (see `shoal.extend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.plugins.find import find_extension, load_reference, load_sound_extensions
from shoal.registry.code_import import load_object
from shoal.registry.manifest import Signature

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

    def require_option(self, field: str, value: object, has_it: bool) -> None:
        """Raises ConfigError for an option that is asked of a format without it."""
        if not has_it:
            raise ConfigError(field, value, f"is not for models of format {self.name}", self.advice)

    def read_signature(self, payload: bytes, file: str) -> Signature:
        """The signature that the payload has itself. Raises ConfigError, WeightsError."""
        signature: Signature = load_reference(self.signature)(payload, file)
        return signature


MODULE = ModelFormat(
    "module",
    "shoal.serve.model.formats.module:ModuleTemplate",
    precisions=("fp32", "bf16", "int8"),
    can_compile=True,
    can_capture=True,
)
# The names of versions' files in a registry, which is read where a format is not installed; of all others, `payload`.
PAYLOAD_FILES: Mapping[str, str] = {
    "module": "weights.safetensors",
    "torch_export": "model.pt2",
    "onnx": "model.onnx",
    "torchscript": "model.pt",
}


def find_format(name: str) -> ModelFormat:
    """The format that a manifest or an option names. Raises ConfigError."""
    if name == MODULE.name:
        return MODULE
    try:
        chosen = load_object(name) if ":" in name else find_extension(name, GROUP, {MODULE.name: ""})
    except ValueError as error:
        raise ConfigError("format", name, str(error)) from None
    if not isinstance(chosen, ModelFormat):
        raise ConfigError("format", name, "is no shoal.extend.ModelFormat", "name the object, as my_format:FORMAT")
    return chosen


def find_formats_of_files() -> dict[str, ModelFormat]:
    """The formats of files, by their suffix; without those that cannot be loaded."""
    formats = load_sound_extensions(GROUP).values()
    return {suffix: each for each in formats if isinstance(each, ModelFormat) for suffix in each.suffixes}


def get_payload_file(name: str) -> str:
    """The name of a version's file."""
    return PAYLOAD_FILES.get(name, "payload")
