"""A small decoder-only transformer learns to write, byte by byte, on text that comes with every Python.

    shoal run transformer                                             # a cluster, the job and a live picture
    shoal run transformer args.text=my.txt args.width=128 args.depth=4
    shoal run transformer parallel=ddp workers=2                      # two workers share each batch
    shoal run transformer parallel=fsdp workers=2                     # ... and the parameters
    shoal run transformer parallel=tensor workers=2                   # half of the heads each
    shoal run transformer parallel=pipeline workers=2                 # half of the blocks each
    shoal run transformer parallel='{data: 2, tensor: 2}' workers=4
    shoal run transformer parallel='{data: 2, shard: true, tensor: 2, pipeline: 2}' workers=8
    ray job submit --working-dir . -- python jobs/transformer.py      # the same on a cluster that is up
    python -m shoal.train task=transformer                            # in this process, without Ray

`args.tied=true` lets input and output share one table.
"""

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data import Data
from shoal.models.decoder import Decoder
from shoal.train import Task, TrainSpec

NUM_TOKENS = 256  # a token is a byte


class TextTask(Task):
    """The next byte of a text, from at most `context` bytes before it.

    text: a file; empty: the reference of the Python language (0.5 MB)
    """

    parts: ClassVar = {
        "positions": {"positions": False},
        "second block": {"depth": 1},
        "several heads": {"heads": 1},
        "context": {"context": 16},
    }

    def __init__(
        self,
        *,
        text: str = "",
        context: int = 64,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
        positions: bool = True,
    ) -> None:
        self.text, self.context = text, context
        self.shape: dict[str, Any] = {
            "width": width,
            "depth": depth,
            "heads": heads,
            "tied": tied,
            "positions": positions,
        }
        self.dropout = dropout

    def model(self) -> nn.Module:
        return Decoder(NUM_TOKENS, self.context, dropout=self.dropout, **self.shape)

    def data(self) -> Data:
        """The last tenth of the text is for validation."""
        text = Path(self.text).read_bytes() if self.text else reference()
        split = len(text) * 9 // 10
        train = TextWindows(text[:split], self.context, stride=self.context // 2)
        return Data(train, validation=TextWindows(text[split:], self.context, stride=self.context))

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[:, :-1].long(),)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].long().flatten())

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """The perplexity of the text is e ** loss. A mean over windows is only that of the windows' own, which is
        larger: the first bytes of each have little to go by."""
        targets = batch[:, 1:].long()
        losses = nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)  # [B]
        return {
            "bits_per_byte": losses.mean() / math.log(2),
            "window_perplexity": losses.exp().mean(),
            "accuracy": (outputs.argmax(-1) == targets).float().mean(),
        }


def reference() -> bytes:
    """The reference of the Python language, as `help("lambda")` shows it."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class TextWindows:
    """Pieces of `context` + 1 bytes, uint8 [B, context + 1], each `stride` bytes after the one before."""

    deterministic = True  # draws no random numbers

    def __init__(self, text: bytes, context: int, stride: int) -> None:
        self.bytes = np.frombuffer(text, np.uint8)
        self.context, self.stride = context, stride

    def __len__(self) -> int:
        return max((len(self.bytes) - self.context - 1) // self.stride + 1, 0)

    def __getitem__(self, index: int) -> Tensor:
        return self.batch(np.array([range(len(self))[index]]))[0]

    def batch(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(self.bytes[indices[:, None] * self.stride + np.arange(self.context + 1)])


def spec() -> TrainSpec:
    """The recipe: AdamW, warm-up and a cosine, clipped gradients."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "text",
            "batch_size": 64,
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
            "schedule": {"name": "cosine", "warmup": 0.1, "final": 0.1},
            "clip_norm": 1.0,
            "stop": {"steps": 300},
            "evaluate": {"every_steps": 100},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
