"""Models that workers share, and workers without Ray: threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from programs import ENVIRONMENT, start_server
from registered import tensors
from shoal.channel.connection import ChannelAddress
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.member import GangMember
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot, tensor_files
from shoal.weights.tensor_files import make_weight_file, read_tensors, write_tensors

if TYPE_CHECKING:
    import pytest

WIDTH = 16
VOCABULARY = 12
LENGTH = 6
CLASSES = 5


class Block(nn.Module):
    """Attention and a perceptron, before which it normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """tokens [B, T] to logits [B, T, V]; embedding and head share a weight, a mask follows from the tokens."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, :].expand(-1, tokens.shape[1], -1)
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class ConvNet(nn.Sequential):
    """images [B, 3, 8, 8] to classes, with running statistics."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES),
        )  # fmt: skip


SIGNATURES = {
    "Transformer": Signature(
        inputs=tensors(tokens=("INT64", [-1, LENGTH])),
        outputs=tensors(logits=[-1, LENGTH, VOCABULARY]),
    ),
    "ConvNet": Signature(
        inputs=tensors(x=[-1, 3, 8, 8]),
        outputs=tensors(y=[-1, CLASSES]),
    ),
}


def register(model: str, seed: int = 0) -> ModelVersion:
    """The next version, with random weights and statistics."""
    torch.manual_seed(seed)
    module: nn.Module = globals()[model]()
    state = {name: each.clone() for name, each in module.state_dict().items()}
    state |= {name: torch.rand_like(each) + 0.5 for name, each in state.items() if "running" in name}
    snapshot = WeightSnapshot.from_payload(1, save({name: each.contiguous() for name, each in state.items()}))
    factory = ModelFactory(factory=f"{__name__}:{model}")
    return Registry().register(model, snapshot, model=factory, signature=SIGNATURES[model])


def register_parts(single_file: ModelVersion, folder: Path, patch: pytest.MonkeyPatch) -> ModelVersion:
    """The next version, with the same weights in several files."""
    patch.setattr(tensor_files, "MAX_FILE_BYTES", 4000)
    tensors = read_tensors(single_file.weight_file())
    types = {name: (each.dtype, each.shape) for name, each in tensors.items()}
    file = make_weight_file(1, write_tensors(folder / "model.safetensors", types, tensors.items()))
    assert len(file.parts) > 2
    manifest = single_file.manifest
    return Registry().register(single_file.name, file, model=manifest.model, signature=manifest.signature, aliases=())


OPTIONS = ModelOptions(max_batch_size=16)


@contextmanager
def started(launcher: Any, size: int = 2, split: Any = "pipeline") -> Iterator[Gang]:
    with closing(Gang(launcher, size, split)) as gang:
        gang.start()
        yield gang


def predictor_of(version: ModelVersion, gang: Gang | None, options: ModelOptions = OPTIONS) -> Predictor:
    share = None if gang is None else gang.open_template
    return Predictor(version.manifest.model, version.manifest.signature, options, share=share)


class ThreadLauncher:
    """Workers in threads of this process: those of a pipeline."""

    def __init__(self) -> None:
        self.members: list[GangMember] = []

    def start(self, count: int) -> list[ChannelAddress]:
        self.members = [GangMember("127.0.0.1") for _ in range(count)]
        for member in self.members:
            threading.Thread(target=member.serve, daemon=True).start()
        return [member.address for member in self.members]

    def stop(self) -> None:
        for member in self.members:
            member.close()


class ProcessLauncher:
    """Workers in processes, which a test may kill."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def start(self, count: int) -> list[ChannelAddress]:
        context, addresses = multiprocessing.get_context("forkserver"), []
        start_server()
        for _ in range(count):
            ours, theirs = context.Pipe(duplex=False)
            self.processes.append(context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True))
            self.processes[-1].start()
            theirs.close()
            addresses.append(ours.recv())
        return addresses

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()


def _serve(pipe: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment | ENVIRONMENT)
    member = GangMember("127.0.0.1", lambda: os._exit(0))
    pipe.send(member.address)
    member.serve()
