"""A module as an ONNX graph, traced by torch.

Called by `shoal export` and `shoal optimise`. The tracing exporter needs `onnx` and no further package, as the newer
one does.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, needs_extra, summarize_error
from shoal.registry import TensorSignature
from shoal.serve.spec.model_options import ModelOptions

if TYPE_CHECKING:
    from torch import Tensor, nn


def trace_to_onnx(
    module: nn.Module,
    tensors: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    ref: str,
    remedy: str,
    opset: int | None = None,
) -> bytes:
    """Trace a module with these tensors. Raises ConfigError for the model `ref`, MissingExtra. opset: None: torch's"""
    with needs_extra("export"):
        import onnx  # noqa: F401 - torch's exporter needs it
    import torch

    file = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(io.StringIO()):  # torch prints a failed graph
            warnings.simplefilter("ignore")  # of the exporter's age, and of what the comparison finds
            torch.onnx.export(
                module,
                tuple(tensors),
                file,  # type: ignore[arg-type]
                dynamo=False,
                opset_version=opset,
                input_names=input_names,
                output_names=output_names,
                dynamic_axes=dynamic_axes,
            )
    except Exception as error:  # of the exporter, or of user code under its tracing
        problem = f"torch.onnx cannot convert it: {summarize_error(error)}"
        raise ConfigError("model", ref, problem, remedy) from error
    return file.getvalue()


def name_dynamic_axes(tensors: Iterable[TensorSignature], options: ModelOptions) -> dict[str, dict[int, str]]:
    """Name the open dimensions of tensors, the batch alike in all of them."""
    return {
        spec.name: {
            index: "batch" if index == options.get_batch_dim(spec.name) else f"{spec.name}_{index}"
            for index, size in enumerate(spec.shape)
            if size == -1
        }
        for spec in tensors
    }
