"""A model as ONNX: what is not ONNX yet is traced by torch, whose library is imported here alone.

Called by `export_model`, and by `shoal optimise` for networks that are not registered. The tracing exporter needs
`onnx` and no further package, as the newer one does. What it fixes by mistake, such as a branch on the batch's size,
shows where the answers are compared.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, WeightsError, needs_extra, summarize_error
from shoal.export.examples import Example
from shoal.registry import ModelVersion, TensorSignature
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from torch import Tensor, nn


def convert_to_onnx(found: ModelVersion, snapshot: WeightSnapshot, options: ModelOptions, example: Example) -> bytes:
    """Convert the model, traced with this example. Raises ConfigError, with the reason."""
    import torch

    from shoal.serve.model.formats.onnx import read_signature

    signature, parent = found.manifest.signature, found.manifest.lineage.get("parent")
    remedy = f"export {parent}, from which it was made" if parent else "use operations that ONNX has, or register ONNX"
    payload = trace_to_onnx(
        _open_module(found, snapshot),
        [torch.from_numpy(example.inputs[spec.name].copy()) for spec in signature.inputs],
        [spec.name for spec in signature.inputs],
        [spec.name for spec in signature.outputs],
        name_dynamic_axes((*signature.inputs, *signature.outputs), options),
        found.ref,
        remedy,
    )
    try:
        converted = read_signature(payload, found.ref)
    except WeightsError as error:  # of weights in bfloat16, for example
        problem = f"onnxruntime cannot compute its graph: {summarize_error(error.__cause__ or error)}"
        raise ConfigError("model", found.ref, problem, remedy) from error
    wanted, got = (
        [(each.name, each.datatype) for each in (*tensors.inputs, *tensors.outputs)]
        for tensors in (signature, converted)
    )
    if wanted != got:
        problem = f"its graph has the tensors {got}, the signature {wanted}"
        raise ConfigError("model", found.ref, problem, "use every input, and give outputs names of their own")
    return payload


def trace_to_onnx(
    module: nn.Module,
    tensors: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    ref: str,
    remedy: str,
) -> bytes:
    """Trace a module with these tensors. Raises ConfigError for the model `ref`, MissingExtra."""
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


def _open_module(found: ModelVersion, snapshot: WeightSnapshot) -> nn.Module:
    """Open the model as a module whose inputs and outputs are in the signature's order."""
    from torch import fx, nn

    from shoal.serve.model.formats.exported import bind_constants, flatten_program, load_program
    from shoal.serve.model.formats.torch_forward import select_outputs
    from shoal.serve.model.formats.torchscript import load_module
    from shoal.weights.tensor_files import read_tensors

    kind, signature = found.manifest.model.format, found.manifest.signature
    call: Any = None
    module: Any
    if kind == "torchscript":
        scripted: nn.Module = load_module(snapshot.payload, found.ref)
        return scripted  # which cannot be traced: it is converted as it is, branches included
    if kind == "torch_export":
        program = load_program(snapshot.payload, found.ref)
        flat = flatten_program(program.module(check_guards=False))
        module = fx.GraphModule(flat, flat.graph)  # the exporter calls `train`, which the program's own class refuses
        call = bind_constants(program, module)
    else:
        module = found.manifest.model.build()
        module.load_state_dict(read_tensors(snapshot))
        module.eval()
        if callable(predict := getattr(module, "predict", None)):
            names = [spec.name for spec in signature.inputs]
            call = lambda *tensors: predict(**dict(zip(names, tensors, strict=True)))  # noqa: E731

    class InOrder(nn.Module):
        """The model's outputs as a tuple."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            result = self.module(*tensors) if call is None else call(*tensors)
            return tuple(select_outputs(result, signature.outputs).values())

    return InOrder().eval()
