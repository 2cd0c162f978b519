"""A pipeline's losses, gradients and weights are those of one process that accumulates over the same micro-batches.

Tolerance, fp32: 1e-5 for losses and gradients (sums in another order, which batch norm over 4 samples amplifies); 1e-4
for weights, after three steps of Adam.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import full
from pipeline_cases import MODELS, VOCABULARY, WIDTH, Learnable, Named, Transformer, batch_of, build, compare

from programs import RanksFailed, run_ranks
from shoal.errors import PlanError, SpecMismatch
from shoal.parallel.pipeline.schedules import SCHEDULE_CLASSES

TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
CASES: dict[str, dict[str, Any]] = {
    **{schedule: {"model": "transformer", "schedule": schedule} for schedule in SCHEDULE_CLASSES},
    "accumulate": {"model": "transformer", "schedule": "1f1b", "accumulate": 2},
    "cnn": {"model": "cnn", "schedule": "1f1b"},
    "cnn-zbv": {"model": "cnn", "schedule": "zbv"},
    "bf16": {"model": "layers", "schedule": "1f1b", "precision": "bf16"},
    "mixture": {"model": "mixture", "schedule": "interleaved_zero_bubble"},
    "layers": {"model": "layers", "schedule": "1f1b"},
    "views": {"model": "cnn", "schedule": "zbv", "flat": True},
    "gpt2": {"model": "gpt2", "schedule": "1f1b"},
    "gpt2-interleaved_zero_bubble": {"model": "gpt2", "schedule": "interleaved_zero_bubble"},
}
WITH_DATA: dict[str, dict[str, Any]] = {
    "cnn": {"model": "cnn", "schedule": "1f1b", "data": 2},
    "transformer": {"model": "transformer", "schedule": "interleaved_1f1b", "data": 2},
    "sharded": {"model": "transformer", "schedule": "interleaved_1f1b", "data": 2, "shard": True, "accumulate": 2},
    "sharded mixture": {"model": "mixture", "schedule": "gpipe", "data": 2, "shard": True},
    "tensor": {"model": "layers", "schedule": "1f1b", "tensor": 2},
    "tensor mixture": {"model": "mixture", "schedule": "interleaved_zero_bubble", "tensor": 2},
}
ALL_DEGREES: dict[str, dict[str, Any]] = {
    "all": {"model": "layers", "schedule": "1f1b", "data": 2, "shard": True, "tensor": 2, "accumulate": 2},
    "hybrid": {"model": "transformer", "schedule": "1f1b", "data": 4, "shard": True, "replicate": 2},
}


def compare_all(world: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {name: compare(world, **case) for name, case in cases.items()}
    if world.size == 2:
        found["named"] = compare(world, "transformer", "gpipe", Named())
        found |= {"trouble": trouble(world), "state": states(world)}
    return found


def trouble(world: Any) -> dict[str, str]:
    """What is refused, on every rank alike, and leaves the group usable."""

    class Wrong(Learnable):
        cuts = ["blocks.1.inner"]  # noqa: RUF012

    found: dict[str, str] = {}
    refused: dict[str, tuple[Any, ...]] = {
        "too few cuts": ("transformer", "zbv", Named()),
        "inside a residual": ("transformer", "1f1b", Wrong()),
    }
    for name, arguments in refused.items():
        try:
            build(world, *arguments)
        except PlanError as error:
            found[name] = str(error)
    return found


def states(world: Any) -> dict[str, Any]:
    """What is saved, and taken back."""
    pipeline, _, share = build(world, "transformer", "1f1b")
    optimizer = torch.optim.Adam([parameter for _, parameter in pipeline.named_parameters()])
    pipeline.train_step(share, 0)
    optimizer.step()
    saved = {name: value.clone() for name, value in pipeline.model_state().items()}
    settings = pipeline.optimizer_state(optimizer)
    optimizer.step()
    changed = any(not torch.equal(saved[name], value) for name, value in pipeline.model_state().items())
    pipeline.load_model_state(saved)
    pipeline.load_optimizer_state(optimizer, settings)
    back = all(torch.equal(saved[name], value) for name, value in pipeline.model_state().items())
    try:
        pipeline.load_model_state(saved | {"other": torch.zeros(1)})
    except SpecMismatch as error:
        refused = str(error)
    return {
        "changed": changed,
        "back": back,
        "refused": refused,
        "optimizer": sorted(settings),
        "memory": sum(parameter.untyped_storage().nbytes() for parameter in pipeline.modules[0].parameters()),
        "waited": pipeline.communication_s,
        "idle": pipeline.measure_idle_share(),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(compare_all, 2, CASES)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(compare_all, 4, WITH_DATA)


@pytest.fixture(scope="module")
def eight_ranks() -> list[dict[str, Any]]:
    return run_ranks(compare_all, 8, ALL_DEGREES)


def check(found: Any) -> None:
    assert found.loss < TOLERANCE
    assert found.gradient < TOLERANCE
    assert found.norm < TOLERANCE
    assert found.weight < WEIGHT_TOLERANCE
    assert found.evaluated < 7 * TOLERANCE
    assert found.strange == []


@pytest.mark.parametrize("case", [*CASES, "named"])
def test_stages_train_as_one_process(two_ranks: list[dict[str, Any]], case: str) -> None:
    for found in two_ranks:
        check(found[case])


@pytest.mark.parametrize("case", WITH_DATA)
def test_stages_with_data_ranks_train_as_one_process(four_ranks: list[dict[str, Any]], case: str) -> None:
    for found in four_ranks:
        check(found[case])


@pytest.mark.soak
@pytest.mark.parametrize("case", ALL_DEGREES)
def test_every_degree_composes_with_every_other(eight_ranks: list[dict[str, Any]], case: str) -> None:
    for found in eight_ranks:
        check(found[case])


def test_each_rank_keeps_its_stages_only(two_ranks: list[dict[str, Any]]) -> None:
    first, last = (set(found["named"].names) for found in two_ranks)
    assert first & last == {"embedding.weight", "head.weight"}  # tied: both hold it
    assert {"positions", "mask", "blocks.1.inner.weight", "unused.weight"} <= first
    assert {"blocks.2.inner.weight", "norm.bias"} <= last
    assert two_ranks[0]["named"].cuts == ["blocks.2"]
    whole = sum(parameter.numel() * 4 for parameter in Transformer().parameters())
    assert all(found["state"]["memory"] < 0.85 * whole for found in two_ranks)


def test_blocks_share_out_evenly(two_ranks: list[dict[str, Any]]) -> None:
    """Measured, so the middle may shift by a block or two on a busy machine; never to an end."""
    (cut,) = two_ranks[0]["1f1b"].cuts
    assert cut.startswith("blocks.")
    assert all(len(found["zbv"].cuts) == 3 for found in two_ranks)


def test_state_goes_and_comes_back(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        state = found["state"]
        assert state["changed"]
        assert state["back"]
        assert "other" in state["refused"]
        assert "embedding.weight" in state["optimizer"]
        assert state["waited"] > 0
        assert 0 < state["idle"] < 1


def test_what_cannot_be_cut_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "name 3 of its modules" in found["trouble"]["too few cuts"]
        assert "blocks.1.inner" in found["trouble"]["inside a residual"]
        assert "cut at" in found["trouble"]["inside a residual"]


def die(world: Any, how: str) -> None:
    class Fails(Learnable):
        calls = 0

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            self.calls += 1
            if world.rank == 1 and self.calls == 6:  # the second step's second micro-batch
                if how == "exit":
                    os._exit(7)
                raise ZeroDivisionError("of the user's own")
            return super().loss(outputs, batch)

    pipeline, _, share = build(world, "transformer", "1f1b", Fails())
    for step in range(3):
        pipeline.train_step(share, step)


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_rank_that_fails_ends_the_others(how: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die, 2, how)
    causes = caught.value.causes
    if how == "exit":
        assert causes[1] == "died with exit code 7"
    else:
        assert "ZeroDivisionError: of the user's own" in causes[1]
    assert "did not end" not in causes[0]
    assert "RuntimeError" in causes[0]


class Chooses(torch.nn.Module):
    """The last of its layers is another one in every pass, as a router's is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, VOCABULARY) for _ in range(4))
        self.register_buffer("choice", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.experts[int(self.choice)](self.middle(self.embedding(tokens)))


def choose_another(world: Any) -> None:
    learnable = Learnable()
    learnable.cuts, MODELS["chooses"] = ["middle"], Chooses
    pipeline, _, share = build(world, "chooses", "1f1b", learnable)
    pipeline.train_step(share, 0)
    pipeline.modules[0].choice.fill_(2)
    pipeline.train_step(share, 1)


def test_a_layer_that_no_stage_was_seen_to_run_is_not_run_without_its_weights() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(choose_another, 2)
    assert "experts.2'" in caught.value.causes[1]
    assert "was not called in this stage" in caught.value.causes[1]


class Either(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x @ (self.right if int(choice) else self.left)


class Eithers(torch.nn.Module):
    """Two blocks, each of which uses one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.blocks = torch.nn.ModuleList(Either() for _ in range(2))
        self.register_buffer("choice", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.choice)
        return self.head(x)


def use_unlike(world: Any) -> tuple[list[float], str]:
    """The second data rank uses other parameters: how far gradients are from one process's, and what is said."""
    learnable = Learnable()
    learnable.cuts, MODELS["eithers"] = ["blocks.1"], Eithers
    pipeline, whole, share = build(world, "eithers", "1f1b", learnable, data=2, shard=True, dynamic=True)
    pipeline.modules[0].choice.fill_(pipeline.data_rank)
    pipeline.train_step(share, 0)
    for choice, part in enumerate(zip(*(tensor.chunk(2) for tensor in batch_of("eithers")), strict=True)):
        whole.choice.fill_(choice)
        (learnable.loss(whole(part[0]), part) / 2).backward()
    expected = dict(whole.named_parameters())
    pairs = [(full(each.grad), expected[name].grad) for name, each in pipeline.named_parameters()]
    pipeline, _, share = build(world, "eithers", "1f1b", learnable, data=2, shard=True)
    pipeline.modules[0].choice.fill_(pipeline.data_rank)
    with pytest.raises(PlanError) as caught:
        pipeline.train_step(share, 0)
    return [float((mine - theirs).abs().max()) for mine, theirs in pairs], str(caught.value)


def test_data_ranks_of_sharded_stages_may_use_other_parameters_where_that_was_said() -> None:
    for rank, (differences, refused) in enumerate(run_ranks(use_unlike, 4)):
        assert max(differences) < TOLERANCE
        assert f"blocks.{rank // 2}.left has a gradient on one of the data ranks 0 and 1" in refused
