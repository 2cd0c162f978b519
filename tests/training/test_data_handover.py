"""What is handed over arrives as it was, and lies in memory once."""

from __future__ import annotations

import os
import socket
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.batches import map_tensors
from shoal.data.device import can_be_pinned
from shoal.data.handover import pack, receive, send, unpack


class Pair(NamedTuple):
    one: torch.Tensor
    other: str


TENSORS = {
    "float": torch.randn(3, 4),
    "turned": torch.randn(3, 4).T,
    "bf16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "single": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "complex": torch.view_as_complex(torch.randn(2, 2)).conj(),
}


def test_every_kind_arrives_as_it_was() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        value: dict[str, Any] = {**TENSORS, "array": np.arange(6).reshape(2, 3).T, "pair": Pair(torch.ones(2), "two")}
        send(ours, value)
        found = receive(theirs)
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor)
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found["array"].tolist() == value["array"].tolist()
        assert found["pair"].other == "two"
        found["float"] += 1  # ours to write to
        assert not torch.equal(found["float"], TENSORS["float"])
        weights = torch.ones(2, requires_grad=True)
        send(ours, weights)
        assert receive(theirs).requires_grad
        with pytest.raises(AttributeError):
            send(ours, lambda: None)
        theirs.settimeout(0.01)
        with pytest.raises(TimeoutError):
            receive(theirs)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


def test_what_many_read_is_mapped_once_and_written_by_each_for_itself() -> None:
    descriptor, modules = pack({"values": np.zeros(1000), "tensor": torch.zeros(1000), "kind": Pair})
    assert __name__ in modules
    first, second = unpack(descriptor, private=True), unpack(descriptor, private=True)
    first["values"] += 1
    first["tensor"] += 1
    assert not second["values"].any()
    assert not second["tensor"].any()
    shared, also = unpack(descriptor), unpack(descriptor)
    shared["values"][3] = 5
    assert also["values"][3] == 5  # no copy was made
    os.close(descriptor)
    assert also["tensor"].sum() == 0  # the memory goes with the last that uses it


def test_what_is_kept_holds_memory_and_no_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = os.listdir("/proc/self/fd")
        kept = []
        for number in range(20):  # as list(loader) does
            send(ours, {"tensor": torch.full((4,), number), "array": np.full(4, number)})
            kept.append(receive(theirs))
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert [int(each["tensor"].sum() + each["array"].sum()) for each in kept] == [8 * n for n in range(20)]


def test_the_structure_of_a_batch_is_kept_on_its_way_to_a_device() -> None:
    batch = {"a": [torch.ones(1), "name"], "b": Pair(torch.ones(1), "x"), "c": (3,)}
    moved = map_tensors(batch, lambda tensor: tensor * 2)
    assert moved == {"a": [torch.tensor([2.0]), "name"], "b": Pair(torch.tensor([2.0]), "x"), "c": (3,)}
    assert type(moved["b"]) is Pair


def test_what_is_not_plain_memory_of_the_host_is_not_pinned() -> None:
    there, sparse = torch.empty(2, device="meta"), torch.ones(2).to_sparse()
    for tensor in (there, sparse):
        with pytest.raises(RuntimeError):
            tensor.pin_memory()
    assert [can_be_pinned(each) for each in (there, sparse, torch.ones(2))] == [False, False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_arrives_on_the_device_before_it_is_computed_with() -> None:
    from torch.utils.data import TensorDataset

    from shoal.data import Loader

    values = torch.arange(4_000_000.0).reshape(400, -1)
    busy = torch.randn(4000, 4000, device="cuda")
    sums = []
    for (batch,) in Loader(TensorDataset(values), batch_size=40, shuffle=False, device="cuda"):
        busy = busy @ busy / 4000
        sums.append(batch.double().sum())
    assert torch.stack(sums).tolist() == values.double().reshape(10, -1).sum(1).tolist()
    there = TensorDataset(values.cuda(), torch.arange(400))  # of which a part lies on the device already
    (batch, rows), *_ = Loader(there, batch_size=40, shuffle=False, device="cuda")
    assert torch.equal(batch.cpu(), values[:40])
    assert rows.device.type == "cuda"
