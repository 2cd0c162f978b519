"""Models for pipelines, and one run of each beside one process: what differs, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from cases import Mixture, SmallTransformer, full
from torch import Tensor, nn
from torch.nn import functional

from shoal.parallel.comm.world import World
from shoal.parallel.pipeline.model import PipelineModel, build_pipeline
from shoal.parallel.spec import ParallelSpec, ScheduleName
from shoal.parallel.spmd.base import SingleProcessModel

EPS = 1e-3  # of Adam: rounding errors where a gradient is zero (a bias before batch norm) are not to become steps
NUM_SAMPLES, MICRO_BATCHES, STEPS, SEED = 16, 4, 3, 11
VOCABULARY, LENGTH, WIDTH = 23, 6, 16


class Learnable:
    """A classifier of the last tensor of a batch."""

    cuts: list[str] | None = None

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(batch[:-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return functional.cross_entropy(logits.flatten(0, -2), batch[-1].flatten())

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return {"accuracy": (logits.argmax(-1) == batch[-1]).float().mean()}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return self.cuts


class Named(Learnable):
    """The same of a dict, with the stages that the user wants."""

    cuts: list[str] | None = ["blocks.2"]  # noqa: RUF012

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch["tokens"],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, (batch["targets"],))

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return super().metrics(outputs, (batch["targets"],))


class Flat(Learnable):
    """The cuts of a CNN with stages that hand on views; and a metric with a dimension."""

    cuts: list[str] | None = ["3", "8", "9"]  # noqa: RUF012

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {name: value.reshape(1) for name, value in super().metrics(outputs, batch).items()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = mask @ x / LENGTH
        return self.drop(self.outer(functional.gelu(self.inner(self.norm(mixed)))))


class Transformer(nn.Module):
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
        return self.head(self.drop(self.norm(x)))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(4 * 36, 16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    no_functional_dropout = {"attn_pdrop": 0.0}  # drawn by the attention kernel: data ranks and stages draw their own
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_functional_dropout))


MODELS = {"transformer": Transformer, "cnn": cnn, "gpt2": gpt2, "mixture": Mixture, "layers": SmallTransformer}


def batch_of(model: str, num_samples: int = NUM_SAMPLES) -> Any:
    torch.manual_seed(5)
    if model == "cnn":
        return torch.randn(num_samples, 1, 6, 6), torch.randint(0, 5, (num_samples,))
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1))
    return tokens[:, :-1], tokens[:, -1] if model in ("mixture", "layers") else tokens[:, 1:]


@dataclass
class Difference:
    """The greatest differences from one process over all steps, and what else there was to see.

    Those of gradients are relative to the greatest of a parameter, where that is above 1; those of norms are relative.
    """

    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    weight: float = 0.0
    evaluated: float = 0.0
    strange: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)


def build(
    world: World, model: str, schedule: ScheduleName, learnable: Any = None, data: int = 1, **more: Any
) -> tuple[PipelineModel, nn.Module, Any]:
    """The pipeline, the same model whole, and this rank's share of the batch."""
    spec = ParallelSpec(data=data, pipeline=None, schedule=schedule, micro_batches=MICRO_BATCHES, **more)
    degrees = spec.resolve_dims(world.size)
    at, each = degrees.coordinates(world.rank).data, NUM_SAMPLES // data
    share = tuple(tensor[at * each : (at + 1) * each] for tensor in batch_of(model))
    if isinstance(learnable, Named):
        share = {"tokens": share[0], "targets": share[1]}
    torch.manual_seed(0)
    whole = MODELS[model]()
    torch.manual_seed(0)
    pipeline = build_pipeline(MODELS[model](), learnable or Learnable(), spec, degrees, world, share, SEED)
    assert isinstance(pipeline, PipelineModel)
    return pipeline, whole, share


def compare(
    world: World, model: str, schedule: ScheduleName, learnable: Any = None, *, flat: bool = False, **more: Any
) -> Difference:
    """Three steps of each, with a clipped gradient and Adam; then an evaluation of a number that does not divide."""
    learnable = learnable or (Flat() if flat else Learnable())
    pipeline, whole, share = build(world, model, schedule, learnable, **more)
    parts = MICRO_BATCHES * more.get("accumulate", 1)
    alike = ParallelSpec(accumulate=parts, precision=more.get("precision", "fp32"))
    single = SingleProcessModel(whole, learnable, alike, World.single("cpu"), SEED)
    batch: Any = batch_of(model)
    if isinstance(learnable, Named):
        batch = {"tokens": batch[0], "targets": batch[1]}
    found = Difference(cuts=[cut.module for cut in pipeline.partition.split_points])
    mine = torch.optim.AdamW([parameter for _, parameter in pipeline.named_parameters()], lr=1e-2, eps=EPS)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=EPS)
    expected = dict(whole.named_parameters())
    for step in range(STEPS):
        loss = pipeline.train_step(share, step)
        reference = single.train_step(batch, step)
        loss = pipeline.sum_over_data_ranks(loss[None])[0] / pipeline.num_data_ranks
        found.loss = max(found.loss, abs(float(loss - reference)))
        for name, parameter in pipeline.named_parameters():
            if (parameter.grad is None) != (expected[name].grad is None):
                found.strange.append(f"{name} at step {step}")
            elif parameter.grad is not None:
                reference = expected[name].grad
                difference = float((full(parameter.grad) - reference).abs().max() / (1.0 + reference.abs().max()))
                found.gradient = max(found.gradient, difference)
        norm = single.clip_gradients(0.5)
        found.norm = max(found.norm, float((pipeline.clip_gradients(0.5) - norm).abs() / norm))
        mine.step()
        theirs.step()
        if step == 0 and not isinstance(learnable, Named):
            pipeline.evaluate(batch_of(model, 7), 7)  # of other shapes: training goes on undisturbed
    pipeline.check_buffers()
    own = {name: value for name, value in whole.state_dict().items() if name in pipeline.model_state()}
    found.weight = _difference(pipeline.model_state(), own)
    gathered = pipeline.full_weights()
    if world.is_first:
        found.weight = max(found.weight, _difference(gathered, whole.state_dict()))
    found.names = sorted(pipeline.model_state())
    found.strange += _copies_that_differ(world, pipeline)
    if not isinstance(learnable, Named):
        _evaluate_odd(pipeline, single, model, found)
    pipeline.close()
    return found


def _evaluate_odd(pipeline: PipelineModel, single: SingleProcessModel, model: str, found: Difference) -> None:
    """Seven samples: all of them, or five and two, or none, as there are data ranks."""
    odd = batch_of(model, 7)
    shares = [(0, 7)] if pipeline.num_data_ranks == 1 else [(0, 5), (5, 7), (0, 0), (0, 0)]
    begin, end = shares[pipeline.data_rank]
    sums = pipeline.evaluate(tuple(each[begin : max(end, 1)] for each in odd), end - begin)
    totals = pipeline.sum_over_data_ranks(torch.stack(list(sums.values())))
    for (name, expected), value in zip(single.evaluate(odd, 7).items(), totals, strict=True):
        found.evaluated = max(found.evaluated, float((expected - value).abs().max()))
        found.strange += [] if name in sums else [name]
    found.strange += [name for name, value in pipeline.evaluate(odd, 0).items() if value.any()]


def _difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    return max(
        float((full(mine[name]).double() - value.double()).nan_to_num().abs().max()) for name, value in theirs.items()
    )


def _copies_that_differ(world: World, pipeline: PipelineModel) -> list[str]:
    """Parameters of which two ranks hold copies that are not equal bit for bit."""
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, {name: full(value).detach() for name, value in pipeline.named_parameters()})
    first: dict[str, Tensor] = {}
    return [
        name
        for weights in everyone
        for name, value in weights.items()
        if not torch.equal(first.setdefault(name, value), value)
    ]
