"""The verbs of this library, and its name in `shoal`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "hf",
    verbs={
        "models push": ("shoal.libs.hf.commands:push", "Write a version as a folder of Hugging Face."),
        "models pull": ("shoal.libs.hf.commands:pull", "Register a folder of Hugging Face."),
    },
    names={"hf": "shoal.libs.hf"},
    extensions={"shoal.weight_folders": {"adapter_config.json": "shoal.libs.hf.adapters:open_adapters"}},
)
