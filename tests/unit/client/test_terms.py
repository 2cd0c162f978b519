"""What a client asks of a call, in the words of whichever client it is."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from shoal.client import requests
from shoal.errors import InferenceError
from shoal.serve.protocol.infer_call import parse_sticky


@pytest.mark.parametrize("key", ["customer 17", "müller", "50%", "100 %25", "%zz", "ключ", "a+b", "日本" * 128])
def test_a_sticky_key_is_the_same_from_every_client(key: str) -> None:
    ours = requests.build_infer_request("m", None, {}, b"", sticky=key, track="").headers["shoal-sticky"]
    assert ours.isascii()
    assert parse_sticky(ours) == key
    assert parse_sticky(quote(key, safe="")) == key  # as metadata of gRPC must be
    if "%2" not in key:
        assert parse_sticky(key.encode().decode("latin-1")) == key  # as curl sends it and a header is read


@pytest.mark.parametrize("text", ["m\xfcller", "m%FCller", "%ED%A0%80"])
def test_a_key_that_is_no_utf8_is_a_key(text: str) -> None:
    found = parse_sticky(text)
    assert found.isascii()
    assert found != parse_sticky(text.replace("FC", "FD").replace("\xfc", "\xfd").replace("80", "81"))


def test_a_key_is_measured_as_it_is_meant() -> None:
    assert parse_sticky(quote("ü" * 256)) == "ü" * 256
    with pytest.raises(InferenceError, match="has 257 characters") as refused:
        parse_sticky(quote("ü" * 257))
    assert refused.value.status == 400
