"""What passes between the protocols and the models."""

import numpy as np

from shoal.serve.messages.inference import size_bytes


def test_the_size_of_inputs_is_what_they_keep_in_memory() -> None:
    assert size_bytes({"x": np.zeros((2, 3), np.float32), "y": np.zeros((2, 0), np.int64)}) == 24
    assert size_bytes({"x": np.frombuffer(bytes(100), np.uint8)[:10]}) == 10
    words = np.array([[b"a" * 1000], [b""]], object)
    assert 1000 <= size_bytes({"words": words}) - size_bytes({"words": np.array([[b""], [b""]], object)}) < 1100
