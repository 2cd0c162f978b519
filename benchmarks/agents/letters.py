"""The task of these benchmarks: five letters are sorted, by a Llama of 0.4 million parameters whose tokens are bytes.

Both sides import it: neither Shoal nor TRL is needed. As `benchmarks.agents.letters:grade` it is an environment of
`shoal run agents`.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

NUM_LETTERS, MAX_TOKENS = 5, 7
GROUPS, GROUP_SIZE = 8, 8
LEARNING_RATE, CLIP = 5e-4, 0.2
START_REWARD, MAX_STEPS = 0.3, 2000  # of the supervised steps that both sides start from
CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TEMPLATE = (
    "{% if tools %}<|im_start|>s{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}CALLS<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
).replace("CALLS", CALLS)


def tasks(seed: int) -> dict[str, Any]:
    """The task of this seed, as the driver takes it."""
    letters = "".join(random.Random(seed).choices(string.ascii_lowercase[:10], k=NUM_LETTERS))
    return {"prompt": letters, "data": {"answer": "".join(sorted(letters))}}


def grade(task: Any, answer: str) -> float:
    """The reward of an answer to a task of the driver."""
    return compute_reward(answer, task.data["answer"])


def compute_reward(text: str, answer: str) -> float:
    """A tenth for each letter in its place, and 1 for all."""
    return 1.0 if text == answer else sum(a == b for a, b in zip(text, answer, strict=False)) / 10


def compute_vowel_reward(text: str, answer: str) -> float:
    """The share of vowels: for a model that writes sentences, which hardly ever get the same reward."""
    return sum(each in "aeiou" for each in text) / max(1, len(text))


REWARDS = {"letters": compute_reward, "vowels": compute_vowel_reward}


def make_tokenizer() -> Any:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: Any, hidden: int = 96, layers: int = 3, context: int = 1024) -> Any:
    """A Llama with fresh weights, the same ones each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def encode_prompt(tokenizer: Any, letters: str) -> list[int]:
    messages = [{"role": "user", "content": letters}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def pretrain(folder: Path) -> Path:
    """The start of both sides, in `folder`: supervised steps on answers, until the sampled reward is START_REWARD. Half
    a minute, and nothing where it is there."""
    import torch

    if (folder / "tokenizer.json").exists():
        return folder
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(MAX_STEPS):
        if step % 25 == 0 and measure_reward(model, tokenizer) >= START_REWARD:
            break
        made = [tasks(1_000_000 + 64 * step + row) for row in range(64)]
        prompts = [encode_prompt(tokenizer, each["prompt"]) for each in made]
        answers = [tokenizer.encode(each["data"]["answer"], add_special_tokens=False) for each in made]
        tokens = torch.tensor([[*a, *b, tokenizer.eos_token_id] for a, b in zip(prompts, answers, strict=True)])
        labels = tokens.clone()
        labels[:, : len(prompts[0])] = -100
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure_reward(model: Any, tokenizer: Any, num: int = 256) -> float:
    """The mean reward of sampled answers."""
    import torch

    made = [tasks(2_000_000 + number) for number in range(num)]
    tokens = torch.tensor([encode_prompt(tokenizer, each["prompt"]) for each in made])
    size, generator = tokens.shape[1], torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _ in range(MAX_TOKENS):
            chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, chances.multinomial(1, generator=generator)], 1)
    total = 0.0
    for row, task in zip(tokens[:, size:].tolist(), made, strict=True):
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None
        total += compute_reward(tokenizer.decode(row[:end], skip_special_tokens=True), task["data"]["answer"])
    return total / num
