"""Weights in memory that other processes map: the same arrays, one copy, and what cannot be opened."""

import os

import numpy as np
import pytest
import safetensors.numpy

from python_program import run_python
from shoal.channel.memory import MemoryAddress, map_memory
from shoal.errors import WeightsError
from shoal.weights import WeightSnapshot, decode_tensors, encode_tensors
from shoal.weights.shared_memory import KEPT, LEAST_BYTES, SharedPayloads, view_tensors
from shoal.weights.store import DTYPES

TENSORS = {
    "large": np.arange(LEAST_BYTES, dtype=np.float32).reshape(2, -1),
    "half": np.ones((3, 0, 2), np.float16),
    "number": np.array(7, np.int64),
    "flags": np.array([True, False, True]),
    "bytes": np.arange(5, dtype=np.uint8),
}


def make(version: int) -> WeightSnapshot:
    return WeightSnapshot.of(version, {**TENSORS, "version": np.full(3, version, np.int32)})


@pytest.fixture
def payloads() -> SharedPayloads:
    return SharedPayloads()


def put(payloads: SharedPayloads, version: int) -> MemoryAddress:
    address = payloads.put(make(version))
    assert address is not None
    return address


def test_the_mapped_arrays_are_those_that_were_put(payloads: SharedPayloads) -> None:
    address = put(payloads, 3)
    assert payloads.put(make(3)) == address  # one copy, however many actors ask
    mapped = map_memory(address)
    assert mapped is not None
    found = view_tensors(mapped)
    payloads.close()
    assert found.keys() == {*TENSORS, "version"}
    for name, each in TENSORS.items():
        np.testing.assert_array_equal(found[name], each, strict=True)
    with pytest.raises(ValueError, match="read-only"):
        found["large"][0, 0] = 1
    assert map_memory(address) is None  # nothing can be opened any more, and what is mapped stays
    assert found["version"].tolist() == [3, 3, 3]


def test_another_process_maps_it_and_cannot_change_it(payloads: SharedPayloads) -> None:
    address = put(payloads, 5)
    program = f"""
import os
from shoal.channel.memory import MemoryAddress, map_memory
from shoal.weights.shared_memory import view_tensors
from shoal.weights.store import DTYPES
address = MemoryAddress(*{tuple(address)})
print(view_tensors(map_memory(address))["version"].tolist())
try:
    os.pwrite(os.open(f"/proc/{{address.pid}}/fd/{{address.fd}}", os.O_RDWR), b"x", 0)
except PermissionError as error:
    print("sealed")
"""
    assert run_python(program).split("\n")[:2] == ["[5, 5, 5]", "sealed"]
    payloads.close()


def test_the_newest_versions_can_be_opened_and_what_else_has_the_number_is_not_taken(payloads: SharedPayloads) -> None:
    first = put(payloads, 1)
    assert map_memory(first) is not None
    newest = [put(payloads, version) for version in range(2, 2 + KEPT)]
    assert map_memory(first) is None
    assert all(map_memory(each) is not None for each in newest)
    assert map_memory(newest[0]._replace(inode=newest[0].inode + 1)) is None
    assert map_memory(newest[0]._replace(size=newest[0].size - 1)) is None
    assert map_memory(newest[0]._replace(pid=2**22)) is None
    reading, writing = os.pipe()
    assert map_memory(newest[0]._replace(fd=reading)) is None  # at once
    os.close(reading), os.close(writing)
    payloads.close()
    payloads.close()


def test_small_weights_are_not_shared(payloads: SharedPayloads) -> None:
    assert payloads.put(WeightSnapshot.of(1, {"a": np.zeros(8, np.float32)})) is None


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0[1, 2]  ", encode_tensors({"a": np.zeros(4)})[:-8]])
def test_what_is_no_safetensors_is_named(damage: bytes) -> None:
    with pytest.raises(WeightsError, match="not safetensors"):
        view_tensors(damage)


def test_tensors_are_written_as_the_library_writes_them() -> None:
    random = np.random.default_rng(0)
    tensors = {f"{dtype}-{index}": random.integers(0, 2, (index, 3)).astype(dtype)
               for dtype in DTYPES.values() if dtype != "V2" for index in (2, 0, 1)}  # fmt: skip
    tensors |= {'a "name" of ünicode\n': np.ones((2, 2)), "number": np.array(7), "turned": np.eye(3)[::-1].T}
    expected = safetensors.numpy.save({name: np.asarray(each, order="C") for name, each in tensors.items()})
    assert encode_tensors(tensors) == bytes(expected)
    assert encode_tensors({}) == bytes(safetensors.numpy.save({}))
    big_endian = {"a": np.arange(3, dtype=">f4")}
    assert decode_tensors(encode_tensors(big_endian))["a"].tolist() == [0, 1, 2]
