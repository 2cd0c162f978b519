"""Tensors are written as they come, into one file or several with an index, and read one by one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from shoal.errors import WeightsError
from shoal.weights import tensor_files
from shoal.weights.store import WeightFile, WeightPart, WeightSnapshot
from shoal.weights.tensor_files import (
    DTYPES,
    VersionTensors,
    list_files,
    list_with_index,
    make_weight_file,
    open_tensors,
    read_tensors,
    write_tensors,
)


def make_tensors() -> dict[str, Tensor]:
    tensors = {f"w{name}": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return {"one": torch.tensor(3.0), **tensors, "none": torch.zeros(0, 3), "turned": torch.randn(5, 4).T}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    return write_tensors(path, {name: (each.dtype, each.shape) for name, each in tensors.items()}, tensors.items())


def test_one_file_has_the_bytes_of_the_library(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = write(tmp_path / "model.safetensors", tensors)
    expected = safetensors.torch.save({name: each.contiguous() for name, each in tensors.items()})
    assert path.read_bytes() == expected
    assert list_with_index(path) == [path]
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_is_looked_up_without_reading_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_tensors([write(tmp_path / "model.safetensors", make_tensors())])
    monkeypatch.delattr(tensor_files.TensorFiles, "__getitem__")
    assert "one" in found
    assert "other" not in found


def test_more_than_a_files_bytes_are_several_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 100)
    tensors = {**make_tensors(), "large": torch.randn(50)}
    index = write(tmp_path / "model.safetensors", tensors)
    assert index.name == "model.safetensors.index.json"
    described, files = json.loads(index.read_bytes()), list_files(index)
    assert described["metadata"] == {"total_size": sum(each.nbytes for each in tensors.values())}
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(file.name for file in [*files, index])
    for file in files:
        loaded = safetensors.torch.load_file(file)
        assert sum(each.nbytes for each in loaded.values()) <= 100 or list(loaded) == ["large"]
        for name, tensor in loaded.items():
            assert described["weight_map"][name] == file.name
            assert torch.equal(tensor, tensors[name])
    found = open_tensors(files)
    assert found.keys() == tensors.keys() == described["weight_map"].keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
    assert found.get_shape("turned") == (4, 5)
    assert torch.equal(found.read_part("turned", (slice(1, 3), slice(0, 5))), tensors["turned"][1:3])


def test_a_failure_leaves_what_was_there_and_takes_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 16)
    tensors = {name: torch.full((4,), 1.0) for name in "abc"}
    index = write(tmp_path / "model.safetensors", tensors)
    before = {file: file.read_bytes() for file in list_with_index(index)}
    taken = []

    def come() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            taken.append(name)
            if name == "b":  # the draft of its file is gone: as good as any other error of the disk
                (tmp_path / ".model-00002-of-00003.safetensors.draft").unlink()
            yield name, torch.full((4,), 2.0)

    types = {name: (each.dtype, each.shape) for name, each in tensors.items()}
    with pytest.raises(FileNotFoundError):
        write_tensors(tmp_path / "model.safetensors", types, come())
    assert taken == ["a", "b", "c"]
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    taken.clear()
    with pytest.raises(WeightsError, match=r"'c' is torch.complex128, which safetensors files do not hold"):
        write_tensors(tmp_path / "model.safetensors", {**types, "c": (torch.complex128, torch.Size([4]))}, come())
    assert taken == ["a", "b", "c"]


def test_what_is_no_index_or_file_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for content, says in [
        ("{}", "cannot be read as an index"),
        ("[]", "cannot be read as an index"),
        (
            '{"weight_map": {"w": "../other.safetensors"}}',
            r"names '\.\./other\.safetensors', which is no file of safetensors beside",
        ),
        ('{"weight_map": {"w": 3}}', "names 3"),
    ]:
        index.write_text(content)
        with pytest.raises(WeightsError, match=says):
            list_files(index)
    with pytest.raises(WeightsError, match=r"gone\.safetensors cannot be read as safetensors"):
        open_tensors([tmp_path / "gone.safetensors"])
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match=r"bad\.safetensors cannot be read as safetensors"):
        open_tensors([tmp_path / "bad.safetensors"])
    one = write(tmp_path / "one.safetensors", {"w": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"'w' is in .*one\.safetensors and in .*one\.safetensors"):
        open_tensors([one, one])


def test_a_version_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    found = VersionTensors(make_weight_file(1, write(tmp_path / "a.safetensors", tensors)))
    name, verify = next(iter(tensors)), WeightFile.verify_part

    def read_meanwhile(file: WeightFile, part: WeightPart) -> None:
        monkeypatch.undo()
        assert torch.equal(found[name], tensors[name])
        verify(file, part)

    monkeypatch.setattr(WeightFile, "verify_part", read_meanwhile)
    assert torch.equal(found[name], tensors[name])


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_file_is_read_in_pieces_up_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_verified: bool
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 5)
    tensors = make_tensors()
    path = write(tmp_path / "a.safetensors", tensors)
    file = make_weight_file(1, path)
    file.__dict__["is_verified"] = is_verified
    found = read_tensors(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    preadv = os.preadv

    def cut_off(*arguments: Any) -> int:
        os.truncate(path, 16)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", cut_off)
    with pytest.raises(WeightsError, match="was cut off while it was read"):
        read_tensors(file)


def test_a_payload_has_the_tensors_that_the_library_reads_and_no_others() -> None:
    tensors = {name: each.contiguous() for name, each in make_tensors().items()}
    payload = safetensors.torch.save(tensors, {"metadata": "is no tensor"})
    found = read_tensors(WeightSnapshot.from_payload(1, payload))
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), each.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "other",
    [
        {"shape": [3]}, {"shape": [-1]}, {"shape": [1 << 60]}, {"shape": None}, {"dtype": "F31"}, {"data_offsets": [0]},
        {"data_offsets": [0, 1]}, {"data_offsets": [4, 12]}, {"data_offsets": [-8, 0]}, {"data_offsets": ["0", "8"]},
    ],
)  # fmt: skip
def test_a_payload_whose_header_is_wrong_is_refused(other: dict[str, Any]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | other}).encode()
    with pytest.raises(WeightsError, match="weights version 1 are not safetensors"):
        read_tensors(WeightSnapshot.from_payload(1, len(header).to_bytes(8, "little") + header + bytes(8)))
