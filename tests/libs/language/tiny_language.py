"""A small decoder that has opinions, its uncached continuation, and a tokenizer of bytes."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.libs.language.engine import TokenEvent
from shoal.models.decoder import Decoder

CONTEXT, VOCABULARY = 96, 256


def make_decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(num_tokens=VOCABULARY, context=CONTEXT, width=32, depth=2, heads=4).eval()
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)  # else nearly all tokens are as likely
    return decoder


def copy_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(module.state_dict()))


@torch.no_grad()
def compute_logprobs(module: nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V] without a cache."""
    found = module(torch.tensor([tokens]))
    return (found if isinstance(found, torch.Tensor) else found.logits)[0].float().log_softmax(-1)


def continue_greedily(module: nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(compute_logprobs(module, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def list_tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


class Bytes:
    """As llguidance and the engine take a tokenizer; token 0 ends a text."""

    eos_token_id, bos_token_id = 0, None
    special_token_ids = (0,)
    tokens = tuple(bytes([value]) for value in range(VOCABULARY))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def make_byte_tokenizer(**words: str) -> Any:
    """As transformers has it. words: its special tokens"""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words)


def make_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Those of a tokenizer of bytes, as transformers saves them: a folder that is written."""
    make_byte_tokenizer().save_pretrained(folder)
    return {each.name: each.read_bytes() for each in folder.iterdir()}
