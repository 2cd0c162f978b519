"""The models that every plan is tried on, and one process's answer to compare with."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learnable import Classifier
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel

SEED = 11
BATCH = 16
VOCABULARY = 72
LENGTH = 6
WIDTH = 16
ODD = 7
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = mask @ x / LENGTH
        return self.drop(self.outer(functional.gelu(self.inner(self.norm(mixed)))))


class Decoder(nn.Module):
    """Residuals outside the blocks, tied embeddings, a dropout called twice; parameters unused, frozen, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril())
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.blocks[1].norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.positions)
        for block in self.blocks:
            x = x + block(x, self.mask)
        return self.head(self.drop(self.norm(x)))[:, -1]


Factory = Callable[[], nn.Module]
MODELS: dict[str, Factory] = {"mixture": Mixture, "transformer": SmallTransformer, "decoder": Decoder}


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
    degrees, learnable = spec.resolve_dims(world.size), learnable or Classifier()
    example = learnable.pack(share(global_batch(0), 0, degrees.data))
    return parallelize(make(model), learnable, spec, degrees, world, example, SEED)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """Every parameter's gradient, whole. Collective."""
    return {name: None if each.grad is None else full(each.grad).clone() for name, each in named}


def trained(
    model: str | Factory,
    spec: ParallelSpec,
    world: World,
    num_steps: int = 3,
    learnable: Any = None,
    num_samples: int = BATCH,
) -> dict[str, Any]:
    """What a few steps give under a plan: mean losses, gradients of the first step, evaluation, weights. Collective.

    weights:    of the whole model, on one rank at least
    parameters: those of this rank's part
    """
    learnable = learnable or Classifier()
    parallel = build(model, spec, world, learnable)
    optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], 0.02, eps=EPS)
    losses = []
    first = {}
    norm = torch.zeros(())
    for step in range(num_steps):
        samples = tuple(each[:num_samples] for each in global_batch(step))
        loss = parallel.train_step(learnable.pack(share(samples, parallel.data_rank, parallel.num_data_ranks)), step)
        losses.append(float(parallel.sum_over_data_ranks(loss) / parallel.num_data_ranks))
        if step == 0:
            first = whole_gradients(parallel.named_parameters())
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        parallel.on_optimizer_step()
        if step == 0:
            evaluated(parallel, learnable)  # of other shapes: the next step is as without
    parallel.check_buffers()
    found = {"losses": losses, "gradients": first, "norm": norm, "evaluation": evaluated(parallel, learnable)}
    found["weights"] = parallel.full_weights()
    found["parameters"] = {name: full(each.detach()).clone() for name, each in parallel.named_parameters()}
    parallel.close()
    return found


def evaluated(parallel: ParallelModel, learnable: Any) -> Tensor:
    """Loss and accuracy of ODD samples: data ranks have five, two, and none. Collective."""
    rank, last = parallel.data_rank, parallel.num_data_ranks == 1
    begin, end = (0, ODD) if last else [*pairwise((0, 5, ODD)), *[(0, 0)] * 6][rank]
    batch = tuple(each[begin : max(end, begin + 1)] for each in global_batch(99))
    sums = parallel.evaluate(learnable.pack(batch), end - begin)
    return parallel.sum_over_data_ranks(torch.stack([sums["loss"], sums["accuracy"]])) / ODD


def assert_equal(found: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """What one rank of a plan has of losses, gradients, norm, evaluation and weights, against one process's."""
    for name in ("losses", "norm", "evaluation"):
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    for name, gradient in found["gradients"].items():
        assert (gradient is None) == (expected["gradients"][name] is None), name
    _assert_close(found["gradients"], expected["gradients"], rtol, atol)
    assert not found["weights"] or list(found["weights"]) == list(expected["weights"])
    _assert_close(found["weights"] | found["parameters"], expected["weights"], 10 * rtol, 10 * atol)


def _assert_close(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float, atol: float
) -> None:
    for name, value in found.items():
        if value is not None:
            torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
