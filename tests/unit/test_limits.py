"""What a request may cost: heads, the pace of bodies, shapes, compression."""

import gzip
import math
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InferenceError
from shoal.serve.limits import Limits

LIMITS = Limits(max_body_bytes=100, max_headers=3, max_header_bytes=40, max_path_chars=10, max_elements=1000)


def refused(call: Callable[[], object]) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value


def test_a_head_within_its_limits_passes_and_each_limit_has_its_status() -> None:
    headers = [(b"a", b"b" * 10)] * 3
    LIMITS.check_head("/v2/health", headers)
    assert refused(lambda: LIMITS.check_head("/v2/health/", headers)).status == 414
    assert refused(lambda: LIMITS.check_head("/", [*headers, (b"", b"")])).status == 431
    error = refused(lambda: LIMITS.check_head("/", [(b"a", b"b" * 40)]))
    assert error.status == 431
    assert "41 bytes" in str(error)


@given(st.lists(st.integers(0, 1 << 62), max_size=8))
def test_no_shape_has_more_elements_than_allowed(shape: list[int]) -> None:
    if math.prod(shape) <= LIMITS.max_elements:
        assert LIMITS.check_shape("x", shape) == math.prod(shape)
    else:
        error = refused(lambda: LIMITS.check_shape("x", shape))
        assert error.status == 413
        assert "'x'" in str(error)


def test_a_negative_size_is_not_a_shape() -> None:
    assert refused(lambda: LIMITS.check_shape("x", [-1, -5])).status == 422


def test_what_arrives_fast_enough_has_time() -> None:
    assert LIMITS.body_deadline_s(0) == 10.0
    assert LIMITS.body_deadline_s(32 * 1024 * 6) == 16.0


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"Deflate", zlib.compress)])
def test_compressed_bodies(encoding: bytes, compress: Callable[[bytes], bytes]) -> None:
    assert LIMITS.decompress(compress(b"x" * 100), encoding) == b"x" * 100
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 10_000_000), encoding)).status == 413
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 100)[:-6], encoding)).status == 400
    assert refused(lambda: LIMITS.decompress(b"no such thing", encoding)).status == 400


def test_another_encoding_is_refused() -> None:
    error = refused(lambda: LIMITS.decompress(b"", b"br"))
    assert error.status == 415
    assert "'br'" in str(error)
