"""Errors of an endpoint, by status and words: `with refused(422, "'x'"):`."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.errors import InferenceError


@contextmanager
def refused(status: int, words: str = "") -> Iterator[None]:
    """A block that ends with an InferenceError of this status, whose message has a match of `words`."""
    with pytest.raises(InferenceError, match=words or None) as caught:
        yield
    assert caught.value.status == status
