"""A process's share of a device's memory, without a device: what is set, and what an error says."""

from __future__ import annotations

import pytest
import torch

from shoal.device_memory import explain_out_of_memory, limit_device_memory


@pytest.mark.parametrize(("share", "limits"), [(0.25, [0.25]), (0.0, []), (1.0, []), (2.0, [])])
def test_a_fraction_of_a_device_is_a_fraction_of_its_memory(
    share: float, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    limit_device_memory(share)
    assert found == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limit_device_memory(share)
    assert found == limits


def test_an_error_says_what_did_not_fit_how_much_there_is_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")
    expected = "the GPU's memory is too small for 8 rows (2.00 GiB more). Reserve more with num_gpus"
    assert explain_out_of_memory(error, "8 rows").startswith(expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.25)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**30)
    found = explain_out_of_memory(torch.OutOfMemoryError(""), "8 rows")
    assert "8 rows: 4.00 GiB of 16.00 (a share of 0.25) are this process's, and 3.00 are in use. Reserve" in found


def test_an_error_that_is_explained_holds_no_tensor() -> None:
    class Alive:
        count = 0

        def __init__(self) -> None:
            type(self).count += 1

        def __del__(self) -> None:
            type(self).count -= 1

    def allocate() -> None:
        held = Alive()
        raise torch.OutOfMemoryError(str(held.count))

    try:
        allocate()
    except torch.OutOfMemoryError as error:
        assert Alive.count == 1
        explain_out_of_memory(error, "it")
        assert Alive.count == 0
