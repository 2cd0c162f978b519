"""A share of a device's memory: what fits into it, errors beyond it, and outputs that pass through pinned memory."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from captures import count_captures
from gpu_tasks import require_cuda
from served_models import MAX_ROWS, answer, make_signature, make_times, make_times_version
from torch import Tensor, nn

from shoal.device_memory import limit_device_memory
from shoal.errors import InferenceError, WeightsError
from shoal.registry import ModelFactory
from shoal.serve.model.formats import torch_forward
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def limit(device: str) -> Iterator[Callable[[int], int]]:
    """Limits this process to about so many bytes, in addition to those that it has; returns them."""
    require_cuda(device)

    def set_limit(size_bytes: int) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        limit_device_memory((torch.cuda.memory_reserved() + size_bytes) / total)
        return size_bytes

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def test_a_share_of_a_device_is_a_share_of_its_memory(limit: Callable[[int], int]) -> None:
    limit(256 * MIB)
    assert torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").numel() == 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")


def test_a_version_beyond_the_share_is_rejected_and_the_former_one_answers(limit: Callable[[int], int]) -> None:
    limit(96 * MIB)
    size = 32 * MIB // 4
    subject = make_times(size, device="cuda", max_batch_size=1)
    first = subject.load(make_times_version(1, size))
    large = 256 * MIB // 4
    with pytest.raises(WeightsError, match=r"too small for version 2, whose weights are 256\.0 MiB .*a share of 0\.0"):
        make_times(large, device="cuda", max_batch_size=1).load(make_times_version(2, large))
    assert answer(first, np.full((1, size), 3, np.float32))[0, -1] == 3


class Wide(nn.Module):
    """32 MiB of intermediate results a row."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.expand(len(x), 8 * MIB) * 2).mean(1, keepdim=True)


def test_a_batch_beyond_the_share_is_an_error_and_a_smaller_one_is_answered(limit: Callable[[int], int]) -> None:
    limit(160 * MIB)
    options = ModelOptions.parse({"device": "cuda", "max_batch_size": MAX_ROWS, "warm_up": False})
    factory = ModelFactory(factory=f"{__name__}:Wide")
    model = Predictor(factory, make_signature([1], [1]), options).load(WeightSnapshot.of(1, {}))
    for _ in range(3):
        with pytest.raises(InferenceError, match="too small for 8 rows") as caught:
            answer(model, np.ones((8, 1), np.float32))
        assert caught.value.status == 500
        assert answer(model, np.ones((1, 1), np.float32)).tolist() == [[2.0]]


@pytest.mark.parametrize("graphs", [False, True])
def test_large_outputs_are_in_pinned_memory_that_no_later_batch_overwrites(
    graphs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_cuda(device)
    count_captures(monkeypatch, device)
    waits: list[int] = []
    wait = torch_forward._wait_for_copies
    monkeypatch.setattr(torch_forward, "_wait_for_copies", lambda: (waits.append(1), wait()))
    size = 2 * torch_forward.PINNED_BYTES // 4
    subject = make_times(size, **({"cuda_graphs": True} if graphs else {"device": device}), max_batch_size=2)
    models = [subject.load(make_times_version(version, size)) for version in (1, 2, 3)]
    waits.clear()
    found = [answer(model, np.full((2, size), 5, np.float32)) for _ in range(4) for model in models]
    assert len(waits) == 12
    for index, array in enumerate(found):
        assert (array == 5 * (1 + index % 3)).all()
        assert torch.from_numpy(array).is_pinned()
