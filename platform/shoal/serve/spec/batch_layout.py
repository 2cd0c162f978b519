"""Where the batch is in a model's tensors, and the batch-first form in which its requests share a batch.

Called by the predictor and by whatever brings it requests. Pure functions of signatures, options and arrays; no torch.
A request has the model's own shapes; the batcher, padding and the examples of a warm-up count rows in dimension 0.

| option                       | batch-first                                  | requests that share a batch  |
|------------------------------|----------------------------------------------|------------------------------|
| `max_batch_size: 0`          | a dimension of 1 ahead: a request is one row | none                         |
| `batch_dim: {state: 1}`      | dimension 1 moved to the front               | those that do without it     |
| `batch_dim: {rate: null}`    | the tensor repeated for each row, as a view  | those of an equal `rate`     |
"""

from __future__ import annotations

import numpy as np

from shoal.errors import ConfigError
from shoal.open_inference.messages import TensorDescription
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.spec.model_options import ModelOptions

Arrays = dict[str, np.ndarray]


class BatchLayout:
    """The layout of one model with these options. Raises ConfigError for a tensor without the batch that they name,
    and for a model without inputs.

    signature:     batch-first
    is_first:      whether dimension 0 is the batch of every tensor, so that both forms are the same
    shared_inputs: inputs without the batch that other inputs have
    """

    def __init__(self, signature: Signature, options: ModelOptions) -> None:
        if not signature.inputs:
            problem = "was registered without inputs, since its module has no `forward` for what a batch has"
            raise ConfigError("model", "", problem, "write `forward`, train again, and name the new version")
        tensors = [*signature.inputs, *signature.outputs]
        names = {spec.name for spec in tensors}
        if unknown := sorted(set(options.batch_dim) - names):
            problem, remedy = f"the model has no tensor {unknown[0]!r}", f"its tensors are {', '.join(sorted(names))}"
            raise ConfigError("batch_dim", options.batch_dim, problem, remedy)
        self.dimensions = {name: options.get_batch_dim(name) for name in names}
        if options.max_batch_size:
            for spec in tensors:
                _require_batch(spec, options)
        self.is_first = all(dimension == 0 for dimension in self.dimensions.values())
        without = [spec.name for spec in signature.inputs if self.dimensions[spec.name] is None]
        self.shared_inputs = without if options.max_batch_size else []
        if self.shared_inputs and len(without) == len(signature.inputs):
            remedy = "max_batch_size: 0 serves a model without a batch"
            raise ConfigError("batch_dim", options.batch_dim, "leaves no input with the batch", remedy)
        self.signature = signature
        if not self.is_first:

            def move_batch(spec: TensorSignature) -> TensorSignature:
                dimension = self.dimensions[spec.name]
                rest = spec.shape if dimension is None else spec.shape[:dimension] + spec.shape[dimension + 1 :]
                return spec.model_copy(update={"shape": [-1, *rest]})

            inputs, outputs = (list(map(move_batch, side)) for side in (signature.inputs, signature.outputs))
            self.signature = Signature(inputs=inputs, outputs=outputs)

    def to_batch_first(self, arrays: Arrays, num_rows: int) -> Arrays:
        """Views of arrays in the model's shapes, with their rows in dimension 0."""
        if self.is_first:
            return arrays
        moved = {}
        for name, array in arrays.items():
            dimension = self.dimensions[name]
            if dimension is None:
                moved[name] = array[np.newaxis] if num_rows == 1 else np.broadcast_to(array, (num_rows, *array.shape))
            else:
                moved[name] = np.moveaxis(array, dimension, 0)
        return moved

    def to_model_shapes(self, arrays: Arrays) -> Arrays:
        """Views of batch-first arrays in the model's shapes."""
        if self.is_first:
            return arrays
        moved = {}
        for name, array in arrays.items():
            dimension = self.dimensions[name]
            moved[name] = array[0, ...] if dimension is None else np.moveaxis(array, 0, dimension)
        return moved


def has_batch_first(tensor: TensorDescription) -> bool:
    """Whether dimension 0 can be the batch: it is neither fixed nor missing."""
    return tensor.shape[:1] == [-1]


def _require_batch(spec: TensorSignature, options: ModelOptions) -> None:
    dimension = options.get_batch_dim(spec.name)
    if dimension is None or spec.shape[dimension : dimension + 1] == [-1]:
        return
    problem = f"{spec.name!r} is {spec.datatype} {spec.shape}, and dimension {dimension} of it is not open (-1)"
    if spec.name in options.batch_dim:
        raise ConfigError("batch_dim", options.batch_dim, problem, "name its open dimension, or null if it has none")
    remedy = (
        f"batch_dim: {{{spec.name}: 1}} names the dimension of its batch, null says that it has none;"
        " max_batch_size: 0 serves a model without a batch"
    )
    raise ConfigError("max_batch_size", options.max_batch_size, problem, remedy)
