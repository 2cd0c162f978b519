"""Which requests of several lengths share a batch when they are padded, and what that may cost in memory."""

import math
from collections import defaultdict
from itertools import product

import numpy as np

from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.model.padding import MAX_SHARED_ROW_ELEMENTS, RequestCollator


def padding(*shapes: list[int]) -> RequestCollator:
    inputs = [TensorSignature(name=f"x{place}", datatype="FP32", shape=shape) for place, shape in enumerate(shapes)]
    output = TensorSignature(name="y", datatype="FP32", shape=[-1, 1])
    return RequestCollator(Signature(inputs=inputs, outputs=[output]), 0.0)


def request(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Of these shapes, without the memory."""
    return {f"x{place}": np.broadcast_to(np.float32(1), shape) for place, shape in enumerate(shapes)}


def test_two_small_requests_cannot_make_a_large_batch() -> None:
    joiner = padding([-1, -1, -1])
    assert joiner.compute_bucket(request((1, 60_000, 1))) != joiner.compute_bucket(request((1, 1, 60_000)))


def test_a_padded_row_is_small_or_hardly_larger_than_the_request_s_own() -> None:
    joiner = padding([-1, -1, -1, 3])
    together = defaultdict(list)
    for sizes in product((0, 1, 7, 40, 209, 210, 900, 60_000), repeat=2):
        together[joiner.compute_bucket(request((1, *sizes, 3)))].append((*sizes, 3))
    for rows in together.values():
        padded = math.prod(map(max, zip(*rows, strict=True)))
        assert padded <= MAX_SHARED_ROW_ELEMENTS or padded <= 4 * min(map(math.prod, rows))
    assert max(map(len, together.values())) == 5 * 5, "small ones share a batch, whatever their sizes"


def test_the_lengths_of_sentences_share_a_batch() -> None:
    for wide in ((), (768,)):
        joiner = padding([-1, -1, *wide], [-1, -1])
        assert {joiner.compute_bucket(request((1, length, *wide), (1, length))) for length in range(4, 129)} == {None}


def test_an_answer_is_cut_to_the_input_that_it_is_as_long_as() -> None:
    """Of two that it could be, one alone cannot be told from the other: where they differ nothing is padded."""
    names = [TensorSignature(name=f"x{place}", datatype="FP32", shape=[-1, -1]) for place in range(2)]
    joiner = RequestCollator(
        Signature(inputs=names, outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, -1])]), 0.0
    )
    translations = [request((1, 2), (1, 4)), request((1, 4), (1, 3)), request((1, 2), (1, 4)), request((1, 4), (1, 4))]
    first, second, third, masked = [joiner.compute_bucket(each) for each in translations]
    assert first == third
    assert len({first, second, masked}) == 3
    assert masked == joiner.compute_bucket(request((1, 9), (1, 9))), "as the lengths of a sentence and of its mask are"


def test_every_input_counts() -> None:
    joiner = padding([-1, -1], [-1, -1], [-1, 4])
    long, longer = request((1, 8), (1, 200_000), (1, 4)), request((1, 8), (1, 300_000), (1, 4))
    assert joiner.compute_bucket(long) == joiner.compute_bucket(request((1, 9), (1, 140_000), (1, 4)))
    assert joiner.compute_bucket(long) != joiner.compute_bucket(longer)


def test_an_input_without_the_batch_is_stored_once_for_all_rows() -> None:
    both = [TensorSignature(name=name, datatype="FP32", shape=[-1, 3]) for name in ("x", "map")]
    joiner = RequestCollator(Signature(inputs=both, outputs=both[:1]), None, ["map"])
    map_view = np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3))
    requests = [{"x": np.full((2, 3), each, np.float32), "map": map_view} for each in range(3)]
    assert len({joiner.compute_bucket(each) for each in requests}) == 1
    joined = joiner.collate(requests)
    assert joined.bounds == [0, 2, 4, 6]
    assert joined.inputs["map"].shape == (6, 3)
    assert joined.inputs["map"].strides[0] == 0
    assert joined.inputs["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
