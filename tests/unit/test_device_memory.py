"""A process's share of its machine: of a device's memory, without a device, and of the cores."""

import os
from pathlib import Path

import pytest
import torch

from shoal import cpu_count
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


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 64),
        ({"cpu.max": "max 100000\n"}, 99),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 99),
        ({}, 99),
    ],
)
def test_cores_are_those_that_the_control_group_pays_for(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    assert cpu_count.count_usable_cores(tmp_path) == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})  # `taskset`
    assert cpu_count.count_usable_cores(tmp_path) == 1
