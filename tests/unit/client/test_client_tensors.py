"""A client's numbers and terms, as it sends them: the nearest that there are, or a refusal."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from refusals import refused
from shoal.client import requests
from shoal.client.payload import ArrayLike, as_arrays
from shoal.client.requests import Episode, build_episode_request
from shoal.errors import ConfigError, DataError
from shoal.open_inference.datatypes import bf16_values
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.protocol.pipeline import parse_sticky


def converted(datatype: str, values: ArrayLike) -> np.ndarray:
    """As the endpoint reads what is sent."""
    signature = [TensorMetadata("x", datatype, [-1])]
    array = as_arrays("m", signature, {"x": values})["x"]
    return bf16_values(array) if datatype == "BF16" else array


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("FP16", [70000.0, 1]),
        ("FP16", [70000, 1]),
        ("FP32", [1e300]),
        ("FP32", [np.inf, -1e300]),
        ("BF16", [-1e300]),
        ("BF16", np.array([3.4e38], np.float32)),  # finite, but nearest to what is not
    ],
)
def test_a_number_does_not_become_infinite(datatype: str, values: ArrayLike) -> None:
    with pytest.raises(ConfigError, match=f"'x': has values that {datatype} cannot hold"):
        converted(datatype, values)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_what_is_infinite_or_no_number_stays_so(datatype: str) -> None:
    values = [np.inf, -np.inf, np.nan, 65504.0, -1e-300]
    np.testing.assert_allclose(converted(datatype, values), np.array(values), rtol=2**-8, atol=1e-9)


def test_digits_may_be_lost() -> None:
    np.testing.assert_array_equal(converted("FP32", [2**24 + 1, 0.1]), np.array([2**24, 0.1], np.float32))


def test_whole_numbers_on_both_sides_of_the_largest_int64_are_sent_as_they_are() -> None:
    """Half of all 64-bit hashes are beyond it; NumPy makes floats of a list of both."""
    hashes = [1, 2**63 + 1, 2**64 - 1]
    assert converted("UINT64", hashes).tolist() == hashes
    assert converted("UINT64", np.array([hashes], object)).tolist() == [hashes]
    for beyond in (-1, 2**64):
        with pytest.raises(ConfigError, match="'x': has values that UINT64 cannot hold"):
            converted("UINT64", [beyond, 2**63])
    with pytest.raises(ConfigError, match="'x': is float64, the model takes UINT64"):
        converted("UINT64", [0.5, 2**63])


def test_words_are_sent_as_they_are() -> None:
    words = ["ß", b"\xff", np.str_("a"), np.bytes_(b"b")]
    assert converted("BYTES", words).tolist() == ["ß".encode(), b"\xff", b"a", b"b"]
    assert converted("BYTES", np.array([["ß", "a"]])).tolist() == [["ß".encode(), b"a"]]
    assert converted("BYTES", np.array([b"\xff"])).tolist() == [b"\xff"]
    assert converted("BYTES", "ok").tolist() == b"ok"
    assert converted("BYTES", []).shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["ok", None, float("nan")], r"'x': element 1 is None, no text"),
        (["ok", float("nan")], r"'x': element 1 is nan, no text"),
        ([["ok", "ok"], ["ok", 3]], r"'x': element \[1, 1\] is 3, no text"),
        (np.array([1, 2]), r"'x': element 0 is 1, no text"),
        (7, r"'x': is 7, no text"),
        (["\ud800"], r"'x': element 0 is '\\ud800', no text"),
    ],
)
def test_what_is_no_word_does_not_become_one(values: ArrayLike, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converted("BYTES", values)


@pytest.mark.parametrize(("observation", "reward"), [(None, float("nan")), (None, float("inf")), ([0.0, np.nan], None)])
def test_an_episode_takes_no_numbers_that_json_cannot_carry(
    observation: ArrayLike | None, reward: float | None
) -> None:
    """JSON has null for them, which would be no reward at all."""
    with pytest.raises(ConfigError, match="NaN or infinite"):
        build_episode_request("m", Episode("m", "e"), observation, reward)


@pytest.mark.parametrize("convert", [lambda frame: frame, pa.Table.from_pandas], ids=["pandas", "arrow"])
def test_a_frame_has_the_columns_of_the_model_in_its_order(convert: Callable[[pd.DataFrame], Any]) -> None:
    frame = pd.DataFrame({"load": [1.0, None], "day": pd.to_datetime(["2026-03-01", "2026-03-02"])})
    named = [TensorMetadata("x", "FP64", [-1, 2], ["day", "load"])]
    np.testing.assert_array_equal(
        as_arrays("m", named, convert(frame))["x"], [[1772323200.0, 1.0], [1772409600.0, np.nan]]
    )
    with pytest.raises(DataError, match=r"x = 'load': the frame lacks 'load' and has the unexpected 'lode'"):
        as_arrays("m", named, {"x": convert(frame.rename(columns={"load": "lode"}))})
    whole = [TensorMetadata("x", "INT64", [-1, 2], ["b", "a"])]
    assert as_arrays("m", whole, convert(pd.DataFrame({"a": [1], "b": [2**62 + 1]})))["x"].tolist() == [[2**62 + 1, 1]]
    text = [TensorMetadata("x", "BYTES", [-1, 1])]
    assert as_arrays("m", text, convert(pd.DataFrame({"a": ["p"]})))["x"].tolist() == [[b"p"]]


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
    with refused(400, "has 257 characters"):
        parse_sticky(quote("ü" * 257))
