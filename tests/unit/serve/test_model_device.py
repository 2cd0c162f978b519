"""The devices on which a model may run, by its options and what this process sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.serve.model import device
from shoal.serve.model.device import devices, is_device_lost
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
