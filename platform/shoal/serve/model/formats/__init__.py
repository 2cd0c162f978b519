"""The formats of models and their templates: one module per format.

Called by the predictor, and by `shoal models` for a file's signature. A template is built once per model and device;
each version that it loads is a separate forward. Formats with their own libraries are imported when their first model
is opened.
"""

from __future__ import annotations

import torch

from shoal.errors import ConfigError
from shoal.registry.manifest import Format, ModelFactory
from shoal.serve.model.formats.module import ModuleTemplate
from shoal.serve.model.formats.template import Arrays, Forward, Template, TemplateConfig

__all__ = ["Arrays", "Forward", "Template", "TemplateConfig", "has_cuda", "open_template"]


def open_template(factory: ModelFactory, setting: TemplateConfig) -> Template:
    """Open a model's template. Raises ConfigError when it cannot be built, or when its format lacks an option."""
    options, kind = setting.options, factory.format
    if kind == "module":
        return ModuleTemplate(factory, setting)
    if options.cuda_graphs:
        raise ConfigError("cuda_graphs", True, f"is not for models of format {kind}", "register the module itself")
    if kind == "torch_export":
        from shoal.serve.model.formats.exported import ExportedTemplate

        if options.precision == "int8":
            raise ConfigError("precision", "int8", "is not for models of format torch_export", "export it quantised")
        return ExportedTemplate(setting)
    if options.compile or options.precision != "fp32":
        field, value = ("compile", True) if options.compile else ("precision", options.precision)
        runs = "onnxruntime" if kind == "onnx" else "TorchScript"
        raise ConfigError(field, value, f"is not for models of format {kind}", f"{runs} runs the file as it is")
    if kind == "torchscript":
        from shoal.serve.model.formats.torchscript import TorchScriptTemplate

        return TorchScriptTemplate(setting)
    from shoal.serve.model.formats.onnx import OnnxTemplate

    return OnnxTemplate(setting)


def has_cuda(kind: Format) -> bool:
    """Whether models of this format can run on a CUDA device here."""
    if kind == "onnx":
        from shoal.serve.model.formats.onnx import has_cuda as onnx_has_cuda

        return torch.cuda.is_available() and onnx_has_cuda()
    return torch.cuda.is_available()
