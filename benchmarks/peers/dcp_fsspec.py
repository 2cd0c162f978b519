"""torch.distributed.checkpoint to S3, by fsspec and s3fs: saves when it is told to, and says how long training stood.

.venv-s3fs/bin/python benchmarks/peers/dcp_fsspec.py BUCKET SIZE_BYTES
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from benchmarks.talk import commands, say

NUM_LAYERS = 16


def main(bucket: str, size_bytes: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder)}/store", rank=0, world_size=1)
        width = int((size_bytes / 4 / 3 / NUM_LAYERS) ** 0.5)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        files = fsspec.filesystem("s3")
        say(ready=True)
        for number, command in enumerate(commands()):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            url = f"s3://{bucket}/peer/{number}"
            before_s, started_s = time.process_time(), time.perf_counter()
            saving = None
            if command["asynchronous"]:
                saving = dcp.async_save(state, storage_writer=FsspecWriter(url))
            else:
                dcp.save(state, storage_writer=FsspecWriter(url))
            stall_ms = 1e3 * (time.perf_counter() - started_s)
            if saving is not None:
                saving.result()
            whole_ms = 1e3 * (time.perf_counter() - started_s)
            say(stall_ms=stall_ms, whole_ms=whole_ms, cpu_s=time.process_time() - before_s)
            files.rm(url, recursive=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
