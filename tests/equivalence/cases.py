"""The models that every plan is tried on, and one process's answer to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel

SEED, BATCH, VOCABULARY, LENGTH = 11, 16, 72, 6
# Of Adam: a bias that batch norm cancels has a gradient of rounding errors, which a small eps would make a whole step.
EPS = 1e-3


class Mixture(nn.Module):
    """Batch norm, dropout (one layer called twice), tied weights, an unused parameter and a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(
            nn.Conv1d(8, 12, 3, padding=1), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout1d(0.2), nn.Flatten()
        )
        self.drop = nn.Dropout(0.3)
        self.up, self.down = nn.Linear(12 * LENGTH, 20), nn.Linear(20, 8)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embedding(tokens).transpose(1, 2))
        hidden = self.down(functional.gelu(self.up(self.drop(hidden))))
        return self.head(self.norm(self.drop(hidden) * self.frozen + self.shift))


class SmallTransformer(nn.Module):
    """Decoder-only, of torch's own layers: attention, feed-forward blocks with dropout, tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        layer.dropout = nn.Dropout(0.25)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens), mask=self.mask, is_causal=True))[:, -1]


class Tokens:
    """A learnable: tokens in, one token out."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


Factory = Callable[[], nn.Module]
MODELS: dict[str, Factory] = {"mixture": Mixture, "transformer": SmallTransformer}


def make(model: str | Factory) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(SEED)
    return MODELS[model]() if isinstance(model, str) else model()


def global_batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(VOCABULARY, (BATCH,), generator=generator)


def share(batch: tuple[Tensor, ...], rank: int, size: int) -> tuple[Tensor, ...]:
    """Contiguous, as the loader gives it."""
    return tuple(tensor.chunk(size)[rank] for tensor in batch)


def build(model: str | Factory, spec: ParallelSpec, world: World, learnable: Any = None) -> ParallelModel:
    degrees = spec.resolve_dims(world.size)
    example = share(global_batch(0), 0, degrees.data)
    return parallelize(make(model), learnable or Tokens(), spec, degrees, world, example, SEED)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """Every parameter's gradient, whole. Collective."""
    return {name: None if each.grad is None else full(each.grad).clone() for name, each in named}


def trained(
    model: str | Factory, spec: ParallelSpec, world: World, num_steps: int = 3, learnable: Any = None
) -> dict[str, Any]:
    """What a few steps give under a plan: mean losses, gradients of the first step, evaluation, weights. Collective."""
    parallel = build(model, spec, world, learnable)
    optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], 0.02, eps=EPS)
    losses, first, norm = [], {}, torch.zeros(())
    for step in range(num_steps):
        batch = share(global_batch(step), parallel.data_rank, parallel.num_data_ranks)
        loss = parallel.train_step(batch, step)
        losses.append(float(parallel.sum_over_data_ranks(loss) / parallel.num_data_ranks))
        if step == 0:
            first = whole_gradients(parallel.named_parameters())
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        parallel.on_optimizer_step()
    parallel.check_buffers()
    batch = share(global_batch(99), parallel.data_rank, parallel.num_data_ranks)
    sums = parallel.evaluate(batch, len(batch[1]))
    totals = parallel.sum_over_data_ranks(torch.stack([sums["loss"], sums["accuracy"]])) / BATCH
    weights = parallel.full_weights()
    parallel.close()
    return {"losses": losses, "gradients": first, "norm": norm, "evaluation": totals, "weights": weights}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Losses, gradients, norm, evaluation and weights of a plan against one process's."""
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=rtol, atol=atol)
    assert list(found["gradients"]) == list(expected["gradients"])
    for name, gradient in expected["gradients"].items():
        assert (gradient is None) == (found["gradients"][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(
                found["gradients"][name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
    torch.testing.assert_close(found["norm"], expected["norm"], rtol=rtol, atol=atol)
    torch.testing.assert_close(found["evaluation"], expected["evaluation"], rtol=rtol, atol=atol)
    if found["weights"]:
        assert list(found["weights"]) == list(expected["weights"])
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][name], weight, rtol=10 * rtol, atol=10 * atol, msg=lambda m, n=name: f"{n}: {m}"
            )
