"""Batch normalisation over all data ranks: the statistics are those of the global micro-batch, as in one process.

`nn.SyncBatchNorm` does the same on CUDA only. One collective forward (each rank's count, mean and variance) and one
backward. Called by every plan with more than one data rank, when it is made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.differentiation import is_each_operation_needed, is_plain_backward_needed
from shoal.errors import PlanError
from shoal.parallel.comm.collective_timer import HostWaits, StreamWaits, make_waits
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce

_OWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class DataGroup:
    """The ranks that share a global batch, and the seconds that this one has waited for the others.

    on_host: sums within one host; None if they span hosts, or if it is disabled
    """

    def __init__(self, group: dist.ProcessGroup, on_host: ShmAllReduce | None = None) -> None:
        self.group, self.shm_all_reduce = group, on_host
        self.size = dist.get_world_size(group)
        self._waits: dict[str, StreamWaits | HostWaits] = {}  # by the kind of device whose tensors travel

    @property
    def waited_s(self) -> float:
        waited_s = sum(each.total_s for each in self._waits.values())
        return waited_s + (self.shm_all_reduce.waited_s if self.shm_all_reduce else 0.0)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataGroup:
        return self  # a copy of a model uses the same ranks

    def control_device(self, device: torch.device) -> torch.device:
        """The device for gathering control values: the CPU if shared memory or gloo serves it, otherwise `device`."""
        is_told_by_host = self.shm_all_reduce is not None or "gloo" in dist.get_backend_config(self.group)
        return torch.device("cpu") if is_told_by_host else device

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's values, [R, *mine]."""
        if self.shm_all_reduce:
            return self.shm_all_reduce.gather(mine)
        waits = self._waits_for(mine)
        began = waits.begin()
        everyone = mine.new_empty(self.size * mine.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(everyone, mine.view(-1), self.group)
        waits.end(began)
        return everyone.view(self.size, *mine.shape)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.shm_all_reduce:
            return self.shm_all_reduce.sum(values)
        waits = self._waits_for(values)
        began = waits.begin()
        dist.all_reduce(values, group=self.group)
        waits.end(began)
        return values

    def _waits_for(self, tensor: Tensor) -> StreamWaits | HostWaits:
        kind = tensor.device.type
        if kind not in self._waits:
            self._waits[kind] = make_waits(tensor.device)
        return self._waits[kind]


class GlobalBatchNorm(_BatchNorm):
    """Mixed in before a layer's class: replaces its forward (and its name and hooks stay).

    ranks: None while this rank tries the model alone
    """

    ranks: DataGroup | None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalised: Tensor
        normalise = _normalise_plainly if is_each_operation_needed() else _Normalise.apply
        normalised, _, mean, variance, count = normalise(input, self.eps, self.ranks)
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = variance * (count / (count - 1).clamp(min=1))  # 0 for a single value in a trial
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        if not self.affine:
            return normalised.to(input.dtype)
        shape = [1, -1, *(1 for _ in input.shape[2:])]
        scaled = normalised * self.weight.view(shape)
        # torch's own type annotation lacks BatchNorm(bias=False)
        bias: Tensor | None = self.bias
        return (scaled if bias is None else scaled + bias.view(shape)).to(input.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over [N, C, ...], with the moments of all ranks' values together.

    The scale, 1 / sqrt(variance + eps), is an output too, with a gradient: so the backward is made of outputs of this
    function alone, and can itself be differentiated. d scale / d x = -scale² normalised / total.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, ranks: DataGroup | None) -> tuple[Tensor, ...]:
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [0, *range(2, input.ndim)]
        variance, mean = torch.var_mean(values, dims, correction=0)
        count = mean.new_tensor([values.numel() / values.shape[1]])
        mine = torch.cat([count, mean, variance])
        everyone = ranks.gather(mine) if ranks is not None else mine[None]
        counts, means, variances = everyone.split([1, len(mean), len(mean)], dim=1)  # [R, 1], [R, C], [R, C]
        share = counts / counts.sum()
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        shape = [1, -1, *(1 for _ in dims[1:])]
        scale = (variance + eps).rsqrt().view(shape)
        normalised = (values - mean.view(shape)) * scale
        total = counts.sum()
        ctx.save_for_backward(normalised, scale, total)
        ctx.ranks = ranks
        ctx.dims = dims
        ctx.dtype = input.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, variance, total)
        return normalised, scale, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, scale_grad: Tensor | None, *_: Any) -> tuple[Tensor, None, None]:
        normalised, scale, total = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(normalised)
        product = (grad * normalised).sum(ctx.dims)
        if scale_grad is not None:
            product = product + (scale * scale_grad).view(-1)
        sums = torch.stack([grad.sum(ctx.dims), product])  # [2, C]
        if ctx.ranks is not None:
            sums = _sum(sums, ctx.ranks) if is_plain_backward_needed(grad) else ctx.ranks.sum(sums)
        mean_grad, mean_product = (sums / total).view(2, *scale.shape)
        return (scale * (grad - mean_grad - normalised * mean_product)).to(ctx.dtype), None, None


def _normalise_plainly(input: Tensor, eps: float, ranks: DataGroup | None) -> tuple[Tensor, ...]:
    """As `_Normalise`, by operations that autograd sees: three sums over the ranks in place of one exchange."""
    values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    dims, shape = [0, *range(2, input.ndim)], [1, -1, *(1 for _ in input.shape[2:])]
    total = _sum(values.new_tensor([values.numel() / values.shape[1]]), ranks)
    mean = _sum(values.sum(dims), ranks) / total
    centred = values - mean.view(shape)
    variance = _sum(centred.square().sum(dims), ranks) / total
    scale = (variance + eps).rsqrt().view(shape)
    return centred * scale, scale, mean.detach(), variance.detach(), total


def _sum(values: Tensor, ranks: DataGroup | None) -> Tensor:
    """Differentiable sum over the ranks."""
    added: Tensor = values if ranks is None else _SumOverRanks.apply(values, ranks)  # type: ignore[no-untyped-call]
    return added


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' values. Each rank's loss depends on it, so its gradient is the sum of theirs.

    Every rank differentiates the same operations in the same order, as all run one program.
    """

    @staticmethod
    def forward(values: Tensor, ranks: DataGroup) -> Tensor:
        return ranks.sum(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, DataGroup], output: Tensor) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.ranks), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _sum(tangent, ctx.ranks)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], values: Tensor, ranks: DataGroup) -> tuple[Tensor, int]:
        return _sum(values, ranks), in_dims[0]


def check_batch_norm(model: nn.Module) -> None:
    """Raises PlanError, naming the layer, for a batch normalisation that several data ranks cannot compute together."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.running_mean is None:
            problem = "has no running statistics: an evaluation would normalise by what each share of a batch has"
            raise PlanError("model", name, problem, "use track_running_stats=True, nn.GroupNorm, or one data rank")
        if type(module).forward not in _OWN_FORWARDS:
            problem = f"is a {type(module).__name__}, a batch normalisation whose forward is not torch's own"
            remedy = "let a module of your own call an nn.BatchNorm and do the rest, or use one data rank"
            raise PlanError("model", name, problem, remedy)


def globalise_batch_norm(model: nn.Module, ranks: DataGroup | None) -> None:
    """Let every batch normalisation of `model` use the statistics of all data ranks, in place.

    ranks: None before they are known: for passes of this rank alone, even with one sample
    """
    classes: dict[type[_BatchNorm], type[_BatchNorm]] = {}  # layers of one class keep a common class
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            continue
        if not isinstance(module, GlobalBatchNorm):
            layer = type(module)
            if layer not in classes:
                classes[layer] = type(f"Global{layer.__name__}", (GlobalBatchNorm, layer), {})
            module.__class__ = classes[layer]
        assert isinstance(module, GlobalBatchNorm)
        module.ranks = ranks
