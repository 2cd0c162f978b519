"""Text comes in whole characters, and never the begin of a stop text."""

from __future__ import annotations

import random

import pytest
from tests.libs.language.tiny_language import Bytes

from shoal.libs.language.engine.text import TextStream

DECODE = Bytes().decode


def test_characters_come_whole() -> None:
    stream = TextStream(DECODE, b"once ", ())
    parts = [stream.push(byte) for byte in "aé€😀".encode()]
    assert [part for part in parts if part] == ["a", "é", "€", "😀"]
    assert stream.finish() == ""


def test_bytes_that_are_no_character_are_replaced_and_do_not_hold_back_the_rest() -> None:
    stream = TextStream(DECODE, b"", ())
    parts = [stream.push(byte) for byte in b"\xff\xff\xff\xff\xffabc\xe2\x82"]
    assert "".join(parts).endswith("abc")
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_text_is_found_wherever_it_lies(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice("abé") for _ in range(40))
    stops = ["".join(chance.choice("abé") for _ in range(chance.randint(2, 5))) for _ in range(3)]
    places = [text.index(stop) for stop in stops if stop in text]
    stream = TextStream(DECODE, b"x", stops)
    seen = ""
    for byte in text.encode():
        seen += stream.push(byte)
        if stream.stopped is not None:
            break
        assert not any(stop in seen for stop in stops)
    seen += stream.finish()
    # of stop texts that overlap, the one that is complete first ends the answer
    ends = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    expected = text if ends is None else min((p for p in places if p < ends), default=0)
    assert seen == expected or (ends is not None and text.startswith(seen) and len(seen) in places)
