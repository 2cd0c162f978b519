"""The memory of a device that several processes share: a process's limit, and what an error beyond it says.

Called in processes that have reserved a fraction of a CUDA device. Ray counts fractions, and divides no memory. Their
limit is that of torch's tensors: the CUDA context, and other libraries such as onnxruntime, are not part of it.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_REQUESTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
GIB = 2**30


def limit_device_memory(share: float) -> None:
    """Limit this process to its share of the device's memory; a share of 0, or of 1 and more, is no limit."""
    import torch

    if 0 < share < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def read_memory_limit() -> int | None:
    """The bytes that this process's control group may use (version 2, else 1); None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def count_memory(device: torch.device) -> int:
    """The bytes that this process may use: its share of a GPU, or the machine's memory within a container's limit."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, read_memory_limit() or total)


def explain_out_of_memory(error: torch.OutOfMemoryError, what: str) -> str:
    """One line: what did not fit, the process's limit and use, and the remedy. Frees what the error's frames hold."""
    import torch

    traceback.clear_frames(error.__traceback__)
    match = _REQUESTED.search(str(error))
    requested = f" ({match[1]} more)" if match else ""
    there = ""
    if torch.cuda.is_available():
        share, total = torch.cuda.get_per_process_memory_fraction(), torch.cuda.mem_get_info()[1]
        used = torch.cuda.memory_allocated()
        there = (
            f": {share * total / GIB:.2f} GiB of {total / GIB:.2f} (a share of {share:g}) are this process's, and"
            f" {used / GIB:.2f} are in use"
        )
    remedy = "Reserve more with num_gpus, lower max_batch_size, or serve fewer models there"
    return f"the GPU's memory is too small for {what}{requested}{there}. {remedy}"
