"""Language models of Hugging Face as Tasks: their weights, their data, their losses, adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import yaml
from tiny_models import save_model, write_lines

import shoal
from shoal.api import make_train_spec
from shoal.data.loader import Loader
from shoal.errors import ConfigError, DataError, RegistryError, SpecMismatch
from shoal.libs.hf.finetune import make_spec, translate
from shoal.libs.hf.network import PACKABLE, build_network
from shoal.libs.hf.tasks import CausalLM
from shoal.parallel.deferred.build import build_deferred
from shoal.registry import Registry
from shoal.train.initial_weights import load_initial_weights
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.task import make_task

TEXTS = [{"text": "the cat sat on the mat"}, {"text": "a dog"}, {"text": "birds sing in the morning"}, {"text": "no"}]
REFERENCE = "shoal.libs.hf.tasks:CausalLM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lines(tmp_path / "texts.jsonl", TEXTS)


def load_network(task: CausalLM) -> torch.nn.Module:
    network = task.model().eval()
    load_initial_weights(network, task.initial_weights())
    return network


def test_a_folder_is_trained_and_registered(folder: Path, data: str) -> None:
    task = shoal.hf.causal_lm(str(folder), data=data, validation=0.25)
    result = shoal.fit(task, stop={"epochs": 4}, batch_size=2, say=None, optimizer={"learning_rate": 1e-2})
    assert 0 < result.metrics["loss"] < 6
    for lora, rate in ((None, 2e-5), ({"rank": 2}, 2e-4)):
        spec = make_train_spec(shoal.hf.causal_lm(str(folder), data=data, lora=lora), {"stop": {"steps": 9}})
        assert (spec.optimizer.name, spec.optimizer.learning_rate, spec.stop.epochs) == ("adamw", rate, 1)
    found = Registry().get("causallm@champion")
    assert found.manifest.files.keys() >= {"tokenizer.json", "tokenizer_config.json"}
    assert "model" not in found.manifest.model.kwargs["args"], "another host has no such folder"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_network_begins_with_the_weights_of_the_folder(kind: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", kind, tie_word_embeddings=True)
    network = load_network(CausalLM(model=str(tmp_path / "model")))
    tokens = torch.randint(0, 259, (2, 7))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert torch.equal(network(tokens, torch.ones_like(tokens)), expected)
    assert network.state_dict().keys() == model.state_dict().keys()


def test_tensors_in_several_files_are_read_one_by_one(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    network = load_network(CausalLM(model=str(tmp_path / "model")))
    for name, tensor in model.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name


def test_a_run_begins_with_a_folder_that_init_names(folder: Path) -> None:
    network = CausalLM(model=str(folder)).model()
    load_initial_weights(network, str(folder))
    assert torch.equal(network.state_dict()["lm_head.weight"], load_network(CausalLM(model=str(folder))).lm_head.weight)
    with pytest.raises(SpecMismatch, match="has other tensors"):
        load_initial_weights(torch.nn.Linear(2, 2), str(folder))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_samples_have_the_losses_that_each_has_alone(kind: str, tmp_path: Path, data: str) -> None:
    save_model(tmp_path / "model", kind)
    single = CausalLM(model=str(tmp_path / "model"), data=data)
    packed = CausalLM(model=str(tmp_path / "model"), data=data, packing=True, max_length=40)
    rows = packed.data().train
    assert len(rows) < len(TEXTS)
    total, count = 0.0, 0
    network = load_network(single)
    for index in range(len(TEXTS)):
        batch = single.data().train.batch([index])
        loss = single.loss(network(*single.inputs(batch)), batch)
        total, count = total + loss.total.item(), count + int(loss.count)
    batch = packed.data().train.batch(range(len(rows)))
    loss = packed.loss(load_network(packed)(*packed.inputs(batch)), batch)
    assert int(loss.count) == count
    assert loss.total.item() / count == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("converted", [False, True])
def test_a_base_is_read_when_the_network_gets_its_memory(converted: bool, folder: Path) -> None:
    if converted:  # by transformers, which builds and fills a model of its own
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    task = CausalLM(model=str(folder), lora={"rank": 2})
    torch.manual_seed(0)
    network, weights = build_deferred(task.model)
    weights.fill(network, torch.device("cpu"))
    torch.manual_seed(0)
    expected = task.model()
    for find in (torch.nn.Module.named_parameters, torch.nn.Module.named_buffers):
        for (name, value), (other, same) in zip(find(expected), find(network), strict=True):
            assert name == other
            torch.testing.assert_close(same, value, rtol=0, atol=0, msg=name)


def test_fewer_samples_than_a_batch_are_one_batch(folder: Path, data: str) -> None:
    words = [f"model={folder}", f"data={data}"]
    assert make_spec(translate(words)).batch_size == len(TEXTS)
    assert spec_from_overrides(["task=finetune", *words]) == make_spec(translate(words))
    assert make_spec(translate([*words, "validation=0.25"])).batch_size == len(TEXTS) - 1
    assert make_spec(translate([*words, "batch_size=2"])).batch_size == 2
    task = CausalLM(model=str(folder), data=data)
    assert make_train_spec(task, {}).batch_size == len(TEXTS)
    with pytest.raises(DataError, match=r"texts\.jsonl': has 4 samples, not one whole batch of 8"):
        Loader(task.data().train, batch_size=8)


def test_only_what_is_to_be_answered_is_learnt(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    samples = [{"prompt": "ab", "completion": "cd"}, {"messages": [*chat, *chat]}]
    task = CausalLM(model=str(folder), data=write_lines(tmp_path / "some.jsonl", samples))
    batch = task.data().train.batch([0, 1])
    from shoal.libs.hf.source import load_tokenizer

    labels = [[each for each in row if each >= 0] for row in batch["labels"].tolist()]
    words = [load_tokenizer(task.folder).decode(each) for each in labels]
    assert words == ["cd<end>", "yes\nyes\n"]
    first = batch["labels"][0].tolist()
    assert first[1] == batch["input_ids"][0, 2], "each label is the token that follows"


def test_a_share_for_validation_is_the_same_each_time(folder: Path, data: str) -> None:
    first, second = (CausalLM(model=str(folder), data=data, validation=0.5, max_length=length) for length in (64, 65))
    for part in ("train", "validation"):
        tokens = [getattr(each.data(), part).batch([0, 1])["input_ids"] for each in (first, second)]
        assert torch.equal(*tokens)


def test_adapters_are_trained_alone_and_served_with_their_base(folder: Path, data: str) -> None:
    args = {"model": str(folder), "data": data, "lora": {"rank": 2}}
    result = shoal.fit(CausalLM(**args), stop={"steps": 3}, batch_size=2, say=None, optimizer={"learning_rate": 0.1})
    assert result.weights is not None
    found = Registry().get("causallm")
    assert found.manifest.size_bytes < 10_000
    base = Registry().get(found.manifest.lineage["base"])
    assert base.manifest.sha256 == found.manifest.lineage["base_sha256"]
    adapted = found.manifest.model.build()
    load_initial_weights(adapted, found.ref)
    tokens = torch.randint(0, 259, (2, 5))
    plain = base.manifest.model.build()
    load_initial_weights(plain, base.ref)
    with torch.no_grad():
        difference = adapted.eval()(tokens, torch.ones_like(tokens)) - plain.eval()(tokens, torch.ones_like(tokens))
    assert difference.abs().max() > 1e-3
    assert CausalLM(**args).registration().lineage["base"] == base.ref
    assert len(Registry().list(base.name)) == 1, "the base is registered once"
    with pytest.raises(RegistryError, match=f"is the base of {found.ref}"):
        Registry().remove(base.name)


def test_run_and_manifest_record_the_scale_of_adapters_as_peft_has_it(folder: Path, data: str) -> None:
    used = {"rank": 4, "alpha": peft.LoraConfig().lora_alpha, "dropout": 0.0, "modules": None}
    used |= {"rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    spec = make_spec(translate([f"model={folder}", f"data={data}", "lora.rank=4"]))
    assert spec.args["lora"] == used
    task = CausalLM(model=str(folder), data=data, lora={"rank": 4})
    layer = next(each for each in task.model().modules() if isinstance(each, peft.tuners.lora.Linear))
    assert layer.scaling["default"] == 2.0
    result = shoal.fit(task, stop={"steps": 1}, batch_size=2, say=None)
    assert yaml.safe_load(shoal.load_run(result.run_id).spec)["args"]["lora"] == used
    assert Registry().get("causallm").manifest.model.kwargs["args"]["lora"] == used
    merging = CausalLM(model=str(folder), data=data, lora={"rank": 4}, merge=True)
    assert merging.registration().lineage["lora"] == used


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_adapters_compute_as_they_did_apart(kind: str, tmp_path: Path, data: str) -> None:
    save_model(tmp_path / "model", kind)
    task = CausalLM(model=str(tmp_path / "model"), data=data, lora={"rank": 2}, merge=True)
    network = task.model().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    merged = make_task(REFERENCE, task.registration().args).model().eval()
    merged.load_state_dict(dict(task.merge_weights(network.state_dict())))
    tokens = torch.randint(0, 259, (2, 5))
    with torch.no_grad():
        expected = network(tokens, torch.ones_like(tokens))
        np.testing.assert_allclose(merged(tokens, torch.ones_like(tokens)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"model": "nowhere"}, "is no folder"),
        ({"model": ""}, "is not given"),
        ({"model": "some-team/some-model"}, "hf download some-team/some-model"),
        ({"model": "none.gguf"}, "is no file.*nothing is downloaded.*hub's cache on this machine"),
        ({"model": "some/none.gguf"}, "is no file"),
        ({"dtype": "int8"}, "no floating-point"),
        ({"lora": {"rank": 2, "modules": ["nothing"]}}, "q_proj"),
        ({"lora": {"ranks": 2}}, "rank"),
        (
            {"lora": {"modules": ["lm_head", "q_proj"]}},
            r"lora.modules.*on lm_head, whose weight is tied.*leave lm_head out",
        ),
        ({"lora": {"modules": ["embed_tokens"]}}, "leave embed_tokens out"),
    ],
)
def test_a_model_that_is_not_there_is_named(args: dict[str, object], problem: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=problem):
        CausalLM(**{"model": str(folder), **args}).model()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has neither model.safetensors"),
    ],
)
def test_a_folder_without_a_file_is_refused_by_its_name(change: str, problem: str, folder: Path, data: str) -> None:
    for path in folder.glob("tokenizer*" if "tokenizer" in change else change):
        path.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    task = CausalLM(model=str(folder), data=data)
    with pytest.raises(ConfigError, match=problem):
        task.data(), task.initial_weights()


def test_an_unknown_type_of_model_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ConfigError, match=r"'no-such-type'.*transformers"):
        CausalLM(model=str(folder)).model()


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([], "is empty"),
        ([{"texts": "a"}], "texts.jsonl:1.*has texts"),
        ([{"text": "a"}, {"text": "b" * 80}], "texts.jsonl:2.*has 81 tokens, more than max_length=64"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "no message of the assistant"),
        ([3], "is no JSON object"),
    ],
)
def test_a_bad_sample_is_named_by_its_line(samples: list[object], problem: str, folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "texts.jsonl", samples)
    with pytest.raises(ConfigError, match=problem):
        CausalLM(model=str(folder), data=path, max_length=64).data()


SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
OTHERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}


def _build(kind: str) -> torch.nn.Module:
    grouped = {} if kind in ("gpt_neox", *OTHERS) else {"num_key_value_heads": 2, "head_dim": 8}
    sizes = {**SIZES, **grouped, **OTHERS.get(kind, {}), "model_type": kind}
    inputs = ("input_ids", "position_ids")
    return build_network("AutoModelForCausalLM", sizes, "float32", inputs).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PACKABLE)
def test_a_sample_does_not_see_the_one_before_in_its_row(kind: str) -> None:
    torch.manual_seed(0)
    network = _build(kind)
    first, other, second = torch.randint(1, 64, (3, 1, 5))
    positions = torch.arange(5).repeat(2)[None]
    with torch.no_grad():
        one, two = (network(torch.cat([each, second], 1), positions)[:, 5:] for each in (first, other))
        alone = network(second, torch.arange(5)[None])
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)


def test_other_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not known to keep the samples of a row apart"):
        _build("opt")
