"""Which requests of several lengths share a batch, by what forwards take and what padding costs in memory."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registered import tensors
from shoal.registry.manifest import Signature
from shoal.serve.model.padding import MAX_SHARED_ROW_ELEMENTS, PaddingCostModel, RequestCollator

TEXT = Signature(
    inputs=tensors(x=("INT64", [-1, -1])),
    outputs=tensors(y=[-1, 4]),
)
PICTURES = Signature(
    inputs=tensors(picture=("UINT8", [-1, -1, -1, 3]), words=("INT64", [-1, -1])),
    outputs=tensors(y=[-1, 4]),
)
Request = dict[str, np.ndarray]


class Device:
    """Takes `fixed_s` for a forward, and `element_s` for each element of it, padded."""

    def __init__(self, fixed_s: float, element_s: float, signature: Signature = TEXT) -> None:
        self.fixed_s = fixed_s
        self.element_s = element_s
        self.now_s = 0.0
        self.lengths = PaddingCostModel(signature, lambda: self.now_s)

    def seconds(self, requests: Sequence[Request]) -> float:
        rows = sum(len(next(iter(each.values()))) for each in requests)
        padded = sum(np.prod(np.max([each[name].shape[1:] for each in requests], axis=0)) for name in requests[0])
        return self.fixed_s + self.element_s * rows * int(padded)

    def compute(self, requests: Sequence[Request]) -> tuple[float, int]:
        """What a batch takes, and in how many parts."""
        parts, began_s = self.lengths.split_batch(requests), self.now_s
        for part in parts:
            chosen = [requests[place] for place in part]
            seconds = self.seconds(chosen)
            self.now_s += seconds
            self.lengths.observe(chosen, seconds)
        return self.now_s - began_s, len(parts)


def of(shape: tuple[int, ...], name: str = "x") -> Request:
    """An input of this shape, without the memory."""
    return {name: np.broadcast_to(np.int64(1), shape)}


def texts(draw: random.Random, num: int) -> list[Request]:
    return [of((1, draw.randint(4, 128))) for _ in range(num)]


def test_on_a_device_for_which_more_takes_no_longer_a_batch_stays_whole() -> None:
    device, draw = Device(fixed_s=0.020, element_s=1e-7), random.Random(0)
    first = [device.compute(texts(draw, 32))[0] for _ in range(10)]
    assert sum(first) <= 2 * 10 * 0.0204, "to find that out costs little"
    assert max(first) <= 4 * 0.0204, "nor much at once"
    assert {device.compute(texts(draw, 32))[1] for _ in range(100)} == {1}


@pytest.mark.parametrize("fixed_s", [0.0, 0.0004])
def test_where_time_goes_with_the_elements_the_short_do_not_pay_for_the_long(fixed_s: float) -> None:
    device, draw = Device(fixed_s, element_s=15e-6), random.Random(0)
    for _ in range(20):
        device.compute(texts(draw, 32))
    taken_s = whole_s = least_s = 0.0
    for _ in range(100):
        batch = texts(draw, 32)
        taken_s += device.compute(batch)[0]
        whole_s += device.seconds(batch)
        least_s += least(device, batch)
    assert taken_s < 0.65 * whole_s
    assert taken_s < 1.1 * least_s


def least(device: Device, batch: Sequence[Request]) -> float:
    """What the best cuts of a sorted batch take, where requests stay in pairs, as in a batch of 32."""
    ascending = sorted(batch, key=lambda each: each["x"].shape[1])
    best = [0.0]
    for end in range(2, len(batch) + 1, 2):
        best.append(min(best[at // 2] + device.seconds(ascending[at:end]) for at in range(0, end, 2)))
    return best[-1]


def test_what_no_longer_pays_is_no_longer_done() -> None:
    """As after another process has left the processor, or a model was compiled."""
    device, draw = Device(0.0004, element_s=15e-6), random.Random(0)
    assert max(device.compute(texts(draw, 16))[1] for _ in range(20)) > 1
    device.fixed_s, device.element_s = 0.010, 1e-8
    for _ in range(200):
        device.compute(texts(draw, 16))
    assert {device.compute(texts(draw, 16))[1] for _ in range(50)} == {1}


SIZES = st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300), st.integers(0, 50))
COSTS = st.floats(0, 0.05), st.floats(0, 1e-4)


@given(batches=st.lists(st.lists(SIZES, min_size=1, max_size=70), max_size=6), costs=st.tuples(*COSTS))
def test_everybody_is_computed_once(batches: list[list[tuple[int, int, int, int]]], costs: tuple[float, float]) -> None:
    device = Device(*costs, PICTURES)
    for sizes in batches:
        batch = [
            of((rows, high, wide, 3), name="picture") | of((rows, words), name="words")
            for rows, high, wide, words in sizes
        ]
        places = [place for part in device.lengths.split_batch(batch) for place in part]
        assert sorted(places) == list(range(len(batch)))
        device.compute(batch)


def test_requests_of_one_length_are_not_taken_apart() -> None:
    device, draw = Device(0.0, element_s=1e-3), random.Random(0)
    for _ in range(20):
        device.compute(texts(draw, 16))
    assert device.compute([of((1, 50))] * 32)[1] == 1
    assert device.compute([of((1, 50)), of((1, 51)), of((1, 50))])[1] == 1, "nor those of nearly one"


def padding(*shapes: list[int]) -> RequestCollator:
    inputs = tensors(**{f"x{place}": shape for place, shape in enumerate(shapes)})
    return RequestCollator(Signature(inputs=inputs, outputs=tensors(y=[-1, 1])), 0.0)


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
    names = tensors(x0=[-1, -1], x1=[-1, -1])
    joiner = RequestCollator(Signature(inputs=names, outputs=tensors(y=[-1, -1])), 0.0)
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
    both = tensors(x=[-1, 3], map=[-1, 3])
    joiner = RequestCollator(Signature(inputs=both, outputs=both[:1]), None, ["map"])
    map_view = np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3))
    requests = [{"x": np.full((2, 3), each, np.float32), "map": map_view} for each in range(3)]
    assert len({joiner.compute_bucket(each) for each in requests}) == 1
    joined = joiner.collate(requests)
    assert joined.bounds == [0, 2, 4, 6]
    assert joined.inputs["map"].shape == (6, 3)
    assert joined.inputs["map"].strides[0] == 0
    assert joined.inputs["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
