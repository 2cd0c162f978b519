"""Damaged inputs at each parser of what comes from outside: nothing but its own errors comes out.

A million of each as a soak test; of what only the run's own user writes, fewer.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from registered import tensors
from shoal.config import parse_overrides
from shoal.errors import ConfigError, InferenceError, ProtocolViolation, WeightsError
from shoal.rl.spec import RLSpec
from shoal.serve.http.codec import HttpCodec, RowCodec
from shoal.weights import decode_tensors, encode_tensors
from shoal.wire import MessageLimits, decode
from shoal.yaml_text import parse_yaml
from wire_cases import damaged_messages, frames_of, valid_segment

INPUTS = tensors(x=[-1, 2], word=("BYTES", [-1]))
OUTPUTS = tensors(y=[-1, 2])
TENSORS = [
    {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]},
    {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["a"]},
]
WEIGHTS = {"a": np.ones((2, 3), np.float32), "b": np.zeros((), np.int64)}


PIECES = [
    b'"',
    b"[",
    b"{",
    b"}",
    b",",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"0x1",
    b"\xff",
    b"\\u0000",
    b"[" * 2000,
    b"",
]
Damage = Callable[[Sequence[Any], int, int], Iterator[Any]]


class Parser(NamedTuple):
    """What parses, inputs that it takes, the errors that it may raise, and what damages inputs."""

    parse: Callable[[Any], Any]
    valid: Sequence[Any]
    errors: tuple[type[Exception], ...]
    damage: Damage


def damage_bytes(valid: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Cut, flipped, spliced, repeated, and with pieces that mean something put in."""
    noise = random.Random(seed)
    for _ in range(count):
        one, other = noise.choice(valid), noise.choice(valid)
        begin, end = sorted(noise.randrange(len(one) + 1) for _ in range(2))
        middle = noise.choice([b"", one[begin:end] * 2, noise.choice(PIECES), noise.randbytes(end - begin)])
        yield noise.choice([one[:begin] + middle + one[end:], one[:begin] + other[begin:], one])


def dump(*bodies: Any) -> list[bytes]:
    return [json.dumps(each).encode() for each in bodies]


def parse_words(content: bytes) -> Any:
    return parse_overrides(RLSpec, content.decode(errors="replace").splitlines())


PARSERS = {
    "wire": Parser(
        lambda frames: decode(frames, MessageLimits()),
        [frames_of(valid_segment(num), num) for num in (1, 3, 8)],
        (ProtocolViolation,),
        damaged_messages,
    ),
    "tensors": Parser(
        HttpCodec("m", INPUTS, OUTPUTS, 8).decode,
        dump({"inputs": TENSORS}, {"id": "a", "inputs": TENSORS, "outputs": [{"name": "y"}]}),
        (InferenceError,),
        damage_bytes,
    ),
    "rows": Parser(
        RowCodec("m", INPUTS, OUTPUTS, 8).decode,
        dump({"x": [1, 2], "word": "a"}, [{"x": [1, 2], "word": "b"}] * 3),
        (InferenceError,),
        damage_bytes,
    ),
    "weights": Parser(decode_tensors, [encode_tensors(WEIGHTS)], (WeightsError,), damage_bytes),
    "words": Parser(
        parse_words,
        [b"hidden=[16, 8]\nlearner.batch_steps=512\nenv=CartPole-v1\nalgorithm=ppo"],
        (ConfigError,),
        damage_bytes,
    ),
    "yaml": Parser(
        lambda content: parse_yaml(content.decode(errors="replace")),
        [b"a: 1\nb: [x, 2.5, {c: 2026-01-02}]\nd: |\n  text\n"],
        (yaml.YAMLError,),
        damage_bytes,
    ),
}


def fuzz(parser: Parser, count: int) -> Counter[str]:
    outcomes = Counter[str]()
    for damaged in parser.damage(parser.valid, count, 7):
        try:
            parser.parse(damaged)
            outcomes["taken"] += 1
        except parser.errors as error:
            outcomes[type(error).__name__] += 1
    return outcomes


@pytest.mark.parametrize("name", PARSERS)
def test_nothing_but_its_own_errors_comes_out_of_a_parser(name: str) -> None:
    outcomes = fuzz(PARSERS[name], 400)
    assert len(outcomes) > 1, f"the noise should be taken and refused: {outcomes}"


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PARSERS)
def test_nothing_but_its_own_errors_comes_out_of_a_million_inputs(name: str) -> None:
    fuzz(PARSERS[name], 10_000 if name in ("words", "yaml") else 1_000_000)  # these two take milliseconds
