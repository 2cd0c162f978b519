"""The devices on which a model may run; outputs on their way to the host, without a device; what a warm-up measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.serve.model import device
from shoal.serve.model.device import devices, is_device_lost
from shoal.serve.model.formats import torch_forward
from shoal.serve.model.warm_up import MAX_MEASURE_S, batch_sizes, time_warm_forwards
from shoal.serve.spec.model_options import ModelOptions


@pytest.mark.parametrize(
    ("options", "without", "with_cuda"),
    [
        ({}, ["cpu"], ["cpu", "cuda"]),  # a process that has reserved no GPU sees none
        ({"device": "cpu"}, ["cpu"], ["cpu"]),
        ({"precision": "int8"}, ["cpu"], ["cpu"]),
        ({"device": "cuda"}, "device", ["cuda"]),
        ({"cuda_graphs": True}, "cuda_graphs", ["cuda"]),
        ({"cuda_graphs": True, "compile": True}, "cuda_graphs", ["cuda"]),
        ({"device": "cpu", "cuda_graphs": True}, "device", "device"),
        ({"device": "cuda", "precision": "int8"}, "precision", "precision"),
    ],
)
def test_a_model_runs_where_its_options_and_the_process_allow(
    options: dict[str, Any], without: list[str] | str, with_cuda: list[str] | str
) -> None:
    for has_cuda, expected in ((False, without), (True, with_cuda)):
        if isinstance(expected, list):
            assert devices(ModelOptions.parse(options), has_cuda) == expected
            continue
        with pytest.raises(ConfigError) as caught:
            devices(ModelOptions.parse(options), has_cuda)
        assert caught.value.field == expected


def test_a_device_is_lost_when_every_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    try:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        assert not is_device_lost()
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        assert is_device_lost()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        assert is_device_lost()
    finally:
        device.device_lost.clear()


def test_large_outputs_are_pinned_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    waits: list[int] = []

    def allocate(like: Tensor) -> Tensor:
        pinned.append(torch.empty(like.shape, dtype=like.dtype))
        return pinned[-1]

    monkeypatch.setattr(torch_forward, "_allocate_pinned", allocate)
    monkeypatch.setattr(torch_forward, "_wait_for_copies", lambda: waits.append(len(pinned)))
    monkeypatch.setattr(torch_forward, "PINNED_BYTES", 64)
    outputs = [torch.arange(16.0), torch.arange(15.0), "text", torch.arange(32.0).view(4, 8).t(), torch.tensor(3)]
    found = torch_forward.copy_to_host(outputs)
    assert waits == [2]
    assert (found[0] is pinned[0], found[2], found[3] is pinned[1]) == (True, "text", True)
    for copied, output in zip(found, outputs, strict=True):
        if isinstance(output, Tensor):
            assert torch.equal(copied, output)
            assert copied.data_ptr() != output.data_ptr()
    assert [each.tolist() for each in torch_forward.copy_to_host(outputs[1:2])] == [outputs[1].tolist()]
    assert waits == [2]


def test_warm_up_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert [batch_sizes(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


class Machine:
    """Forwards that take as long as they are told, on a clock that nothing else moves."""

    def __init__(self, *seconds: float) -> None:
        self.now_s, self._seconds = 0.0, list(seconds)
        self.sizes: list[int] = []

    def forward(self, size: int) -> None:
        self.sizes.append(size)
        self.now_s += self._seconds.pop(0)

    def measured(self, *sizes: int) -> list[tuple[int, float]]:
        return time_warm_forwards(self.forward, sizes, lambda: self.now_s)


def test_what_else_the_machine_does_is_not_measured() -> None:
    machine = Machine(0.01, 0.5, 0.3, 0.02)
    assert machine.measured(1, 2) == [(1, pytest.approx(0.01)), (2, pytest.approx(0.02))]
    assert machine.sizes == [1, 1, 2, 2]


def test_a_slow_model_is_measured_as_far_as_the_time_reaches() -> None:
    machine = Machine(0.4 * MAX_MEASURE_S, 0.4 * MAX_MEASURE_S, 5.0, 7.0)
    assert machine.measured(1, 2, 4) == [(1, pytest.approx(0.4 * MAX_MEASURE_S)), (2, pytest.approx(5.0))]
    assert machine.sizes == [1, 1, 2]
