"""A worker's part of one version: the module with its share of the weights, read from the registry tensor by tensor.

Called by `member`. No process reads more of a tensor than it has. Persistent buffers are read by every worker: a
model's own code may use them in any stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.errors import WeightsError
from shoal.extend.parallel import set_parameters, split_layers
from shoal.extend.serve import TemplateConfig, check_finite, check_names, check_shape, choose_kernels
from shoal.libs.gang.plan import GangPlan, Stage, build_model, make_absent
from shoal.weights import WeightFile
from shoal.weights.tensor_files import VersionTensors

Shard = Callable[[tuple[Any, ...], Tensor | None], Any]  # of a stage; or of layers that are split, which receive None


def load_shard(config: TemplateConfig, plan: GangPlan, file: WeightFile, rank: int, mesh: DeviceMesh | None) -> Shard:
    """This worker's part of a version. Raises WeightsError when the file is missing, damaged or of another model.

    mesh: of the workers that split layers
    """
    model = build_model(config.factory)
    state = model.state_dict(keep_vars=True)
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    reader = _TensorReader(file, config.options.finite)
    check_names(file.version, expected, reader.names)
    if plan.layers is not None:
        assert mesh is not None
        split_layers(model, plan.layers, mesh)
    aliases = _group_names(model)
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if plan.stages is not None and rank not in plan.stages.parameters[name]:
            values[name] = make_absent(name, parameter)
            continue
        stored = next((each for each in aliases[name] if each in reader.names), name)
        values[name] = reader.read_parameter(stored, parameter, expected[name])
    set_parameters(model, {name: each.requires_grad_(False) for name, each in values.items()})
    for name, buffer in model.named_buffers():
        if name in expected:
            buffer.copy_(reader.read(name, expected[name], may_be_infinite=not bool(torch.isfinite(buffer).all())))
    if plan.layers is None:
        choose_kernels(model)
    model.requires_grad_(False)
    return (lambda inputs, _: model(*inputs)) if plan.stages is None else Stage(model, plan.stages, rank)


def _group_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[first[parameter]].append(name)
    return names


class _TensorReader:
    """Reads tensors one by one. A file is verified, or downloaded, before the first of its tensors is read."""

    def __init__(self, file: WeightFile, is_finite: bool) -> None:
        self._version, self._is_finite = file.version, is_finite
        for part in file.parts:
            if file.origin is None and not part.path.exists():
                problem = f"weights version {file.version} cannot be read: there is no {part.path}"
                raise WeightsError(f"{problem}; a worker's host needs the registry at the same path")
        self._tensors = VersionTensors(file)
        self.names = frozenset(self._tensors)

    def read(self, name: str, expected: tuple[Any, Any], *, part: Any = None, may_be_infinite: bool = False) -> Tensor:
        """The tensor, or the slices of it that `part` has. Raises WeightsError."""
        if part is None:
            tensor = self._tensors[name]
            shape = tensor.shape
        else:
            shape = self._tensors.get_shape(name)
            tensor = self._tensors.read_part(name, part) if shape == expected[0] else torch.empty(0, dtype=expected[1])
        check_shape(self._version, name, (shape, tensor.dtype), expected)
        if self._is_finite and not may_be_infinite:
            check_finite(self._version, name, tensor)
        return tensor

    def read_parameter(self, name: str, parameter: Tensor, expected: tuple[Any, Any]) -> Tensor:
        """The parameter, or of a split one this worker's part."""
        if not isinstance(parameter, DTensor):
            return self.read(name, expected)
        mesh, layout = parameter.device_mesh, parameter.placements
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, layout)
        part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        own = self.read(name, expected, part=part)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(own, mesh, layout, run_check=False, shape=shape, stride=stride)
