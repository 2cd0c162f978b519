"""What is handed over arrives as it was, and lies in memory once."""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.batch_tree import map_tensors
from shoal.data.loader import can_be_pinned
from shoal.data.workers.shm_transfer import map_file, receive, send, write_file


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


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_tensors_arrive_as_they_were(layout: torch.layout) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, torch.nested.nested_tensor(rows, layout=layout))
        found = receive(theirs)
    assert found.layout == layout
    assert [row.tolist() for row in found.unbind()] == [row.tolist() for row in rows]


def test_what_many_read_is_mapped_once_and_written_by_each_for_itself() -> None:
    descriptor, modules = write_file({"values": np.zeros(1000), "tensor": torch.zeros(1000), "kind": Pair})
    assert __name__ in modules
    first, second = map_file(descriptor, private=True), map_file(descriptor, private=True)
    first["values"] += 1
    first["tensor"] += 1
    assert not second["values"].any()
    assert not second["tensor"].any()
    shared, also = map_file(descriptor), map_file(descriptor)
    shared["values"][3] = 5
    assert also["values"][3] == 5  # no copy was made
    os.close(descriptor)
    assert also["tensor"].sum() == 0  # the memory goes with the last that uses it


def test_an_array_that_is_mapped_from_a_file_is_mapped_again_and_not_copied(tmp_path: Path) -> None:
    content = np.arange(3 << 20, dtype=np.uint16).reshape(3, 1 << 20)
    np.save(tmp_path / "tokens.npy", content)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    turned = np.memmap(tmp_path / "turned", np.float64, "w+", 0, (2, 3), "F")
    turned[:] = [[1, 2, 3], [4, 5, 6]]
    value = {
        "whole": mapped,
        "part": mapped[1:, :][1],
        "bytes": mapped[1].view(np.uint8),
        "gaps": mapped[0, :10:2],
        "chosen": mapped[[2], :3],
        "to write": np.load(tmp_path / "tokens.npy", mmap_mode="r+"),
        "turned": np.memmap(tmp_path / "turned", np.float64, "r", 0, (2, 3), "F"),
    }
    descriptor, _ = write_file(value)
    assert os.fstat(descriptor).st_size < 1 << 16
    found = map_file(descriptor)
    os.close(descriptor)
    for name, array in value.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
    found["whole"][0, 0] = found["to write"][0, 1] = 7  # its own: the file is everybody's
    assert np.load(tmp_path / "tokens.npy")[0, :2].tolist() == [0, 1]
    unlinked = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    (tmp_path / "tokens.npy").unlink()
    descriptor, _ = write_file(unlinked)
    assert map_file(descriptor)[2, 5] == content[2, 5]
    os.close(descriptor)


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
