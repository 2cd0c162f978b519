"""Segments and messages for the tests of the wire: valid ones, and noise made of them."""

import random
from collections.abc import Iterator, Sequence

import msgpack
import numpy as np

from shoal.wire import ExperienceSpec, PolicySpec, Segment, TensorSpec, pack_segment

POLICY = PolicySpec("mlp_categorical", "tanh", (("policy.0.weight", "policy.0.bias"),))
SPEC = ExperienceSpec(TensorSpec("float32", (4,), -10.0, 10.0), TensorSpec("int64", (), 0, 1), 8, POLICY)


def valid_segment(num_steps: int = 3) -> Segment:
    return Segment(
        np.linspace(-1, 1, 4 * (num_steps + 1), dtype=np.float32).reshape(-1, 4),
        np.arange(num_steps) % 2,
        np.ones(num_steps, np.float32),
        np.full(num_steps, -0.7, np.float32),
        np.full(num_steps, 5, np.int64),
    )


def frames_of(segment: Segment, seq: int = 0) -> list[bytes]:
    return [bytes(frame) for frame in pack_segment(segment, seq)]


VALUES = [None, True, -1, 0, 2**63, 2**64 - 1, 1.5, float("nan"), "", "segment", b"\0", [], {}, [0] * 50, {"kind": 1}]


def _flipped(noise: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(noise.randint(1, 4)):
        if changed:
            changed[noise.randrange(len(changed))] ^= 1 << noise.randrange(8)
    return bytes(changed)


def _replaced(noise: random.Random, frames: list[bytes]) -> list[bytes]:
    """One value of the header, somewhere in the tree, exchanged for one that does not belong there."""
    header = msgpack.unpackb(frames[0])
    place = noise.choice([header, *header["tensors"]]) if "tensors" in header else header
    place[noise.choice(list(place))] = noise.choice(VALUES)
    return [msgpack.packb(header), *frames[1:]]


def _damaged(noise: random.Random, frames: list[bytes], other: list[bytes]) -> list[bytes]:
    """One kind of damage, taken at random."""
    at = noise.randrange(len(frames))
    before = frames[:at]
    frame = frames[at]
    after = frames[at + 1 :]
    cut = noise.randrange(len(frame) + 1)
    match noise.randrange(8):
        case 0:
            return [noise.randbytes(noise.randint(0, 80)) for _ in frames]
        case 1:
            return [*before, frame[:cut], *after]
        case 2:
            return [*before, _flipped(noise, frame), *after]
        case 3:
            return [*before, frame[:cut] + other[0][cut:], *other[1:]]  # two messages spliced
        case 4:
            return [frames[0], *other[1:]]
        case 5:
            return [*before, *after]
        case 6:
            return _replaced(noise, frames)
        case _:
            return noise.sample(frames, len(frames))


def damaged_messages(valid: Sequence[list[bytes]], count: int, seed: int) -> Iterator[list[bytes]]:
    """Random, truncated, flipped, spliced and shuffled messages; some of them are still valid."""
    noise = random.Random(seed)
    for _ in range(count):
        yield _damaged(noise, noise.choice(valid), noise.choice(valid))
