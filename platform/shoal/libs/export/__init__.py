"""A registered model as a folder that serves itself: ONNX, a handler, and no Shoal. `shoal export` calls it."""

from shoal.plugins.library import Library

_FORMATS = "shoal.libs.export.formats"
LIBRARY = Library(
    "export",
    verbs={
        "export": (
            "shoal.libs.export.command:export",
            "Write a registered model as a folder: a container, a Lambda function, or a policy for a game.",
        ),
    },
    extensions={
        "shoal.converters": {"onnx": "shoal.libs.export.export_model:write_onnx"},
        "shoal.formats": {
            "torch_export": f"{_FORMATS}:TORCH_EXPORT",
            "onnx": f"{_FORMATS}:ONNX",
            "torchscript": f"{_FORMATS}:TORCHSCRIPT",
        },
    },
    heading="serve",
)
