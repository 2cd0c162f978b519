"""The norm of gradients that two meshes have parts of is that of the whole ones; so is what clipping leaves.

The plans' own gradients are clipped in `test_plans`, `test_pipeline` and `test_memory_options`.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from programs import run_ranks
from shoal.parallel import World
from shoal.parallel.state.gradients import clip, global_norm
from shoal.parallel.state.state_dict import gather_full_tensor

LAYOUTS: list[list[Placement]] = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
]
SIZES = [(7, 3), (1, 5)]  # which do not divide: some ranks have no row


def _clipped(world: World) -> tuple[float, float, float, list[bool]]:
    """The norm, the norm after clipping, the expected norm, and whether each gradient is the clipped whole one."""
    torch.manual_seed(3)
    meshes = [init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4, 1))]
    whole, parameters = [], []
    for mesh in meshes:
        for layout in LAYOUTS:
            for size in SIZES:
                whole.append(torch.randn(size))
                parameters.append(_make(distribute_tensor(whole[-1].clone(), mesh, layout)))
        whole.append(torch.randn(4, 2))  # of which each rank has a term
        terms = whole[-1] / mesh.size(0)
        parameters.append(_make(DTensor.from_local(terms, mesh, [Partial(), Replicate()])))
    whole.append(torch.randn(5))
    parameters.append(_make(whole[-1].clone()))
    expected = torch.stack([each.norm() for each in whole]).norm()
    norm = clip(parameters, 0.5, world.device)
    after = global_norm(parameters, world.device)
    found = [gather_full_tensor(each.grad) if isinstance(each.grad, DTensor) else each.grad for each in parameters]
    same = [torch.allclose(one, two * 0.5 / expected, atol=1e-6) for one, two in zip(found, whole, strict=True)]
    dist.barrier()
    return float(norm), float(after), float(expected), same


def _make(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_gradients_on_two_meshes_are_clipped_as_whole_ones() -> None:
    for norm, after, expected, same in run_ranks(_clipped, 4):
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(after, 0.5, rtol=1e-4, atol=0.0)
        assert all(same)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float64,), torch.float64),
        ((torch.bfloat16,), torch.float32),
        ((torch.bfloat16, torch.float64), torch.float64),
        ((torch.complex128, torch.float64), torch.float64),
        ((torch.complex64,), torch.float32),
    ],
)
def test_the_norm_is_in_the_widest_dtype_of_the_gradients(
    dtypes: tuple[torch.dtype, ...], expected: torch.dtype
) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(50, dtype=dtype) for dtype in dtypes]
    parameters = [_make(each.clone()) for each in gradients]
    norm = clip(parameters, 0.5, torch.device("cpu"))
    exact = torch.stack([each.to(torch.complex128).norm() for each in gradients]).norm()
    assert norm.dtype == expected
    torch.testing.assert_close(norm.double(), exact, rtol=1e-14 if expected == torch.float64 else 1e-6, atol=0.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * (0.5 / float(exact)))


def _measure(world: World) -> tuple[float, float, float]:
    """The norm of a float64 gradient that two ranks share, that of the whole one, and one over stages of two dtypes."""
    torch.manual_seed(3)
    whole = torch.randn(9, 4, dtype=torch.float64)
    shared = _make(distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(0)]))
    stage = _make(torch.ones((9, 16)[world.rank], dtype=(torch.float64, torch.float32)[world.rank]))
    stages = global_norm([stage], world.device, dist.group.WORLD)
    return float(global_norm([shared], world.device)), float(whole.norm()), float(stages)


def test_float64_gradients_of_several_ranks_have_the_norm_of_the_whole() -> None:
    for norm, expected, stages in run_ranks(_measure, 2):
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0.0)
        assert stages == 5.0
