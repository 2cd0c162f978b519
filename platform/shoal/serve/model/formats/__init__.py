"""The templates of models, and the format `module`. Libraries have other formats (see `shoal.registry.model_format`).

Called by the predictor. A template is built once per model and device; each version that it loads is a separate
forward. A format is imported when its first model is opened.
"""

from __future__ import annotations

import torch

from shoal.registry.code_import import load_object
from shoal.registry.model_format import find_format
from shoal.serve.model.formats.template import Arrays, Forward, Template, TemplateConfig

__all__ = ["Arrays", "Forward", "Template", "TemplateConfig", "has_cuda", "open_template"]


def open_template(setting: TemplateConfig) -> Template:
    """Open a model's template. Raises ConfigError when it cannot be built, or when its format lacks an option."""
    options, kind = setting.options, find_format(setting.factory.format)
    kind.require_option("cuda_graphs", True, kind.can_capture or not options.cuda_graphs)
    kind.require_option("compile", True, kind.can_compile or not options.compile)
    kind.require_option("precision", options.precision, options.precision in kind.precisions)
    template: Template = load_object(kind.template)(setting)
    return template


def has_cuda(format_name: str) -> bool:
    """Whether models of this format can run on a CUDA device here."""
    kind = find_format(format_name)
    return torch.cuda.is_available() and (not kind.cuda or bool(load_object(kind.cuda)()))
