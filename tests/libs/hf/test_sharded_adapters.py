"""Adapters on a base that is sharded: each rank holds its part alone, and the numbers are those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model, write_lines
from torch import Tensor

from programs import PRELOADED, TRANSFORMERS, run_ranks
from shoal.cost.measure.memory import bytes_of
from shoal.libs.hf.tasks import CausalLM, SequenceClassification
from shoal.parallel import World
from shoal.testing.run import MemoryLog
from shoal.train.spec import TrainSpec
from shoal.weights.tensor_files import list_files, open_tensors

PRELOADED += TRANSFORMERS
STEPS = 4
KINDS = ["llama", "gpt2", "bert", "half"]
# Sums over ranks are taken in another order than over the rows of one batch: float32, a few steps of AdamW.
TOLERANCE = 1e-4
CLASSES = [{"text": text, "label": index % 2} for index, text in enumerate(["good", "bad", "fine", "poor"] * 2)]
TEXTS = [{"text": text} for text in ["the cat sat", "a dog", "birds sing", "no", "one", "two", "three", "four"]]


Results = dict[str, dict[str, Any]]  # by kind of model
Runs = tuple[Results, list[Results]]


def make_task(folder: Path, kind: str) -> CausalLM | SequenceClassification:
    lora = {"rank": 2}
    if kind == "bert":
        labels = {"labels": 2, "data": str(folder / "classes.jsonl")}
        return SequenceClassification(model=str(folder / kind), lora=lora, **labels)
    dtype = "bfloat16" if kind == "half" else "float32"
    name = "llama" if kind == "half" else kind
    return CausalLM(model=str(folder / name), lora=lora, data=str(folder / "texts.jsonl"), dtype=dtype)


def train(world: World, folder: Path, kind: str, run: str, steps: int = STEPS, plan: Any = None) -> dict[str, Any]:
    """The program of a rank: what it trained, and holds."""
    from shoal.train.loop.trainer import Trainer

    fields = {
        "task": "shoal.libs.hf.tasks:CausalLM",
        "parallel": plan or ("fsdp" if world.size > 1 else "single"),
        "workers": world.size,
        "batch_size": 4,
        "stop": {"steps": steps},
        "log_every_steps": 1,
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "clip_norm": 1.0,
        "average": 0.9,
        "checkpoint": {"every_steps": 2} if "begun" in run else {"every_s": 1e9},
    }
    journal = MemoryLog()
    trainer = Trainer(TrainSpec.parse(fields), make_task(folder, kind), world, folder / run, journal=journal)
    model = trainer._parts.model
    outcome = trainer.run()
    events = dict(journal.events)
    tensors: list[Tensor] = [each for module in model.modules for each in (*module.parameters(), *module.buffers())]
    written = outcome.weights and dict(open_tensors(list_files(outcome.weights)))
    held = bytes_of(tensors) + bytes_of(trainer._parts.average.tensors)
    saved = sorted(json.loads(max((folder / run).rglob("index.json")).read_text())["tensors"])
    return {
        "losses": [*journal.losses.values()],
        "eager": events.get("built_eagerly", {}).get("error", ""),
        "restored": events.get("restored", {}).get("step"),
        "bytes": held,
        "weights": written,
        "saved": saved,
    }


def train_sharded(world: World, folder: Path) -> Results:
    """The program of a rank: every kind, other plans, the first half of a run, and the second half of another's."""
    found = {kind: train(world, folder, kind, f"sharded-{kind}") for kind in KINDS}
    found |= {plan: train(world, folder, "llama", plan, plan=plan) for plan in ("tensor", "pipeline")}
    train(world, folder, "llama", "begun-by-two", STEPS // 2)
    return {**found, "resumed": train(world, folder, "llama", "begun-by-one")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of one process, and of each of two ranks."""
    folder, world = tmp_path_factory.mktemp("models"), World.single("cpu")
    save_model(folder / "llama", tie_word_embeddings=True)
    save_model(folder / "gpt2", "gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    save_model(folder / "bert", "bert", "AutoModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    write_lines(folder / "texts.jsonl", TEXTS)
    write_lines(folder / "classes.jsonl", CLASSES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products wait for threads
    try:
        alone = {kind: train(world, folder, kind, f"alone-{kind}") for kind in KINDS}
        train(world, folder, "llama", "begun-by-one", STEPS // 2)
        ranks = run_ranks(train_sharded, 2, folder)
        return {**alone, "resumed": train(world, folder, "llama", "begun-by-two")}, ranks
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_holds_its_part_of_the_base_and_learns_as_one_process(kind: str, runs: Runs) -> None:
    one, ranks = runs[0][kind], [each[kind] for each in runs[1]]
    tolerance = 0.1 if kind == "half" else TOLERANCE  # where losses are multiples of 1/32
    assert len(one["losses"]) == STEPS
    assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=tolerance)
    for rank in ranks:
        assert rank["eager"] == "", "the rank has built the model in full"
        assert 0.45 < rank["bytes"] / one["bytes"] < 0.55


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_plans_that_split_the_model_split_the_base(plan: str, runs: Runs) -> None:
    one, ranks = runs[0]["llama"], [each[plan] for each in runs[1]]
    assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=TOLERANCE)
    assert ranks[0]["weights"].keys() == one["weights"].keys()
    assert all(rank["bytes"] < 0.95 * one["bytes"] for rank in ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_registered_are_adapters_and_head(kind: str, runs: Runs) -> None:
    one, found = runs[0][kind]["weights"], runs[1][0][kind]["weights"]
    assert found.keys() == one.keys()
    others = {name for name in found if "lora_" not in name}
    head = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias")
    assert others == (set(head) if kind == "bert" else set())
    for name, value in found.items():
        torch.testing.assert_close(value, one[name], atol=0.2 if kind == "half" else 10 * TOLERANCE, rtol=0)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(runs: Runs) -> None:
    alone, ranks = runs
    for resumed in (alone["resumed"], ranks[0]["resumed"]):
        assert resumed["restored"] == STEPS // 2
        assert resumed["losses"] == pytest.approx(alone["llama"]["losses"], abs=TOLERANCE)
        assert resumed["saved"] == alone["llama"]["saved"]
    assert all("lora_" in name for name in alone["llama"]["saved"] if name != "average.num_updates")
