"""Formats of files that have a model's operations with its weights: torch.export, TorchScript, ONNX.

`shoal.registry` finds each by its name or by a file's suffix. A module of a format is imported when its first model is
opened.
"""

from shoal.extend import ModelFormat

TORCH_EXPORT = ModelFormat(
    "torch_export",
    f"{__name__}.exported:ExportedTemplate",
    (".pt2",),
    f"{__name__}.exported:read_signature",
    precisions=("fp32", "bf16"),
    can_compile=True,
    advice="register the module itself, or export it quantised",
)
TORCHSCRIPT = ModelFormat(
    "torchscript",
    f"{__name__}.torchscript:TorchScriptTemplate",
    (".pt", ".ts", ".jit", ".torchscript"),
    check=f"{__name__}.torchscript:load_module",
    advice="TorchScript runs the file as it is; register the module itself",
)
ONNX = ModelFormat(
    "onnx",
    f"{__name__}.onnx:OnnxTemplate",
    (".onnx",),
    f"{__name__}.onnx:read_signature",
    cuda=f"{__name__}.onnx:has_cuda",
    advice="onnxruntime runs the file as it is; register the module itself",
)
