"""Outputs on their way to the host, without a device: which are pinned, and that one wait is for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.serve.model.formats import host_copy


def test_large_outputs_are_pinned_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    waits: list[int] = []

    def allocate(like: Tensor) -> Tensor:
        pinned.append(torch.empty(like.shape, dtype=like.dtype))
        return pinned[-1]

    monkeypatch.setattr(host_copy, "_allocate_pinned", allocate)
    monkeypatch.setattr(host_copy, "_wait_for_copies", lambda: waits.append(len(pinned)))
    monkeypatch.setattr(host_copy, "PINNED_BYTES", 64)
    outputs = [torch.arange(16.0), torch.arange(15.0), "text", torch.arange(32.0).view(4, 8).t(), torch.tensor(3)]
    found = host_copy.copy_to_host(outputs)
    assert waits == [2]
    assert (found[0] is pinned[0], found[2], found[3] is pinned[1]) == (True, "text", True)
    for copied, output in zip(found, outputs, strict=True):
        if isinstance(output, Tensor):
            assert torch.equal(copied, output)
            assert copied.data_ptr() != output.data_ptr()
    assert [each.tolist() for each in host_copy.copy_to_host(outputs[1:2])] == [outputs[1].tolist()]
    assert waits == [2]
