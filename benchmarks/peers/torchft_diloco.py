"""One replica of torchft's DiLoCo: LeNet on Fashion-MNIST, whose steps also sleep.

    .venv-torchft/bin/python benchmarks/peers/torchft_diloco.py INDEX NUM_REPLICAS LIGHTHOUSE STEP_S TARGET SEED

Replica 0 evaluates each 58 steps, a quarter of an epoch of all replicas, and says when, and how many of 10,000 images
are right. The network, its normalisation, batch and inner optimizer are those of our side.
"""

from __future__ import annotations

import gzip
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from benchmarks.talk import say

FOLDER = Path("/usr/share/datasets/fashion-mnist")
LOCAL_BATCH, SYNC_EVERY, EVALUATE_EVERY = 64, 20, 58
TIMEOUT, QUORUM_TIMEOUT = timedelta(seconds=10), timedelta(hours=1)


def read(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    with gzip.open(FOLDER / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(FOLDER / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return (torch.from_numpy(images.copy()).float() - 73.0) / 90.0, torch.from_numpy(labels.astype(np.int64))


def make_lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def main() -> None:
    index, num_replicas, lighthouse = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    step_s, target, seed = float(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = read("train")
    images, labels = images[index::num_replicas], labels[index::num_replicas]
    held_out = read("t10k") if index == 0 else None
    model = make_lenet()
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=None, state_dict=None, min_replica_size=1,
        use_async_quorum=False, timeout=TIMEOUT, quorum_timeout=QUORUM_TIMEOUT, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"replica_{index}",
        hostname="127.0.0.1",
    )  # fmt: skip
    manager.register_state_dict_fn("inner", inner.load_state_dict, inner.state_dict)
    generator = torch.Generator().manual_seed(seed)
    step = 0
    with DiLoCo(manager, [model], inner, outer, SYNC_EVERY, pin_memory=False):
        while True:
            for batch in torch.randperm(len(labels), generator=generator).split(LOCAL_BATCH):
                time.sleep(step_s)
                inner.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                inner.step()
                step += 1
                if step == 1:
                    say(step=step)
                if held_out is not None and step % EVALUATE_EVERY == 0:
                    with torch.no_grad():
                        accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
                    say(step=step, accuracy=accuracy)
                    if accuracy >= target:
                        return


if __name__ == "__main__":
    main()
