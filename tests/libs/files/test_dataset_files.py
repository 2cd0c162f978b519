"""Each format gives what was written into its file, and says what is wrong with a file."""

import copy
import gzip
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as arrow
import pytest
import torch
from PIL import Image
from pyarrow import feather, ipc, parquet

from python_program import run_python
from shoal.data import Loader, LoaderSpec, fingerprint
from shoal.data.formats import Arrow, Hdf5, Idx, ImageFolder, NumpyFiles, Parquet, RayData
from shoal.errors import ConfigError, DataError

IMAGES = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"uint8": 8, "int32": 12, "float32": 13}[array.dtype.name]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(IMAGES))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(LABELS)))
    return tmp_path


def test_idx(mnist: Path) -> None:
    dataset = pickle.loads(pickle.dumps(Idx.mnist(mnist, train=True)))
    images, labels = dataset.batch(np.array([4, 0]))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (2, 1, 4, 3)
    np.testing.assert_allclose(images[:, 0], IMAGES[[4, 0]] / 255, rtol=1e-6)
    assert labels.tolist() == [5, 3]
    assert dataset[5][1] == 9
    raw = Idx(mnist / "train-images-idx3-ubyte", scale=False)
    assert raw[1][0].numpy().tolist() == IMAGES[1].tolist()
    assert len(list(Loader(dataset, batch_size=3))) == 2
    (mnist / "numbers").write_bytes(idx_bytes(np.array([[1.5, 2.0], [0.0, -3.0]], dtype=np.float32)))
    assert Idx(mnist / "numbers")[1][0].tolist() == [0.0, -3.0]


def test_idx_files_that_are_not_right(mnist: Path) -> None:
    images = mnist / "train-images-idx3-ubyte"
    with pytest.raises(DataError, match="has no t10k-images-idx3-ubyte"):
        Idx.mnist(mnist, train=False)
    with pytest.raises(DataError, match="does not exist"):
        Idx(mnist / "nothing")
    (mnist / "short").write_bytes(idx_bytes(IMAGES)[:-1])
    with pytest.raises(DataError, match="truncated or damaged: 6 x 4 x 3 uint8 take 88 bytes, it says 87"):
        Idx(mnist / "short")
    (mnist / "short.gz").write_bytes(gzip.compress(idx_bytes(IMAGES))[:-9])
    with pytest.raises(DataError, match=r"cannot be read|truncated"):
        Idx(mnist / "short.gz")
    (mnist / "few").write_bytes(idx_bytes(LABELS[:4]))
    with pytest.raises(DataError, match=r"ragged: .*train-images-idx3-ubyte 6, few 4"):
        Idx(images, mnist / "few")
    (mnist / "text").write_text("hello there")
    with pytest.raises(DataError, match=r"not an IDX file \(it begins with 68656c6c\)"):
        Idx(mnist / "text")
    (mnist / "none").write_bytes(idx_bytes(IMAGES[:0]))
    with pytest.raises(DataError, match="is empty"):
        Idx(mnist / "none")


X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
Y = np.arange(50, dtype=np.int64) * 2
MIXED = np.array([31, 4, 5, 4, 49, 0, 7, 30])  # runs, gaps, one twice


def assert_batch(batch: Any) -> None:
    """A dict of the rows of X and Y in MIXED order."""
    assert torch.equal(batch["inputs"], torch.from_numpy(X[MIXED]))
    assert batch["target"].tolist() == Y[MIXED].tolist()


@pytest.mark.parametrize("chunks", [None, (4, 3)])
def test_hdf5(tmp_path: Path, chunks: tuple[int, int] | None) -> None:
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("some/x", data=X, chunks=chunks, compression="gzip" if chunks else None)
        file["y"] = Y
        file["words"] = ["a", "bc"]
        file["short"] = Y[:7]
        file["one"] = 1.0
    dataset = pickle.loads(pickle.dumps(Hdf5(path, {"inputs": "some/x", "target": "y"})))
    assert_batch(dataset.batch(MIXED))
    assert len(dataset) == 50
    x, y = Hdf5(path, ["some/x", "y"])[-1]
    assert torch.equal(x, torch.from_numpy(X[-1]))
    assert y == 98
    for fields, problem in [
        (["x"], r"fields = 'x': is no dataset in data.h5. there are: one, short, some/x, words, y"),
        (["some"], "is no dataset"),
        (["y", "short"], r"ragged: its fields have unequal lengths \(y 50, short 7\)"),
        (["words"], "ragged or no numbers: its dtype is object"),
        (["one"], "single value"),
        ("y", "names nothing to read"),
    ]:
        with pytest.raises(DataError, match=problem):
            Hdf5(path, fields)
    (tmp_path / "half.h5").write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"half.h5': cannot be opened as HDF5"):
        Hdf5(tmp_path / "half.h5", ["y"])
    with pytest.raises(DataError, match="does not exist"):
        Hdf5(tmp_path / "none.h5", ["y"])


@pytest.mark.parametrize("chunks", [None, (20, 3)])
def test_hdf5_reads_no_more_in_one_go_than_its_bound(
    tmp_path: Path, chunks: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=chunks)
    monkeypatch.setattr("shoal.libs.files.hdf5._READ_BYTES", 8 * X[0].nbytes)
    sizes: list[int] = []
    read = h5py.Dataset.__getitem__

    def noted(dataset: h5py.Dataset, rows: slice) -> Any:
        sizes.append(rows.stop - rows.start)
        return read(dataset, rows)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
    (batch,) = Hdf5(tmp_path / "data.h5", ["x"]).batch(MIXED)
    assert torch.equal(batch, torch.from_numpy(X[MIXED]))
    assert max(sizes) <= 8
    sizes.clear()
    monkeypatch.setattr("shoal.libs.files.hdf5._READ_BYTES", 1)  # a row is read all the same
    assert torch.equal(Hdf5(tmp_path / "data.h5", ["x"]).batch(MIXED)[0], torch.from_numpy(X[MIXED]))
    assert set(sizes) == {1}


def test_hdf5_is_opened_by_the_process_that_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["y"] = Y
    dataset = Hdf5(path, ["y"])
    opened: list[int] = []
    monkeypatch.setattr(Hdf5, "_open", lambda self: opened.append(os.getpid()) or {"y": h5py.File(path)["y"]})
    for process in (1, 1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        assert dataset[3] == (6,)
    assert opened == [1, 2]
    assert pickle.loads(pickle.dumps(dataset)).num_samples == 50


def test_numpy_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "both.npz", inputs=X, target=Y)
    np.savez_compressed(tmp_path / "y.npz", Y)
    places = [{"inputs": tmp_path / "x.npy", "target": f"{tmp_path}/both.npz:target"}, tmp_path / "both.npz"]
    for place in places:
        assert_batch(pickle.loads(pickle.dumps(NumpyFiles(place))).batch(MIXED))
    first, second = NumpyFiles([tmp_path / "x.npy", tmp_path / "y.npz"])[2]
    assert torch.equal(first, torch.from_numpy(X[2]))
    assert second == 4
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    np.save(tmp_path / "big.npy", Y.astype(">i4"))
    assert NumpyFiles([tmp_path / "big.npy"])[4] == (8,)
    np.save(tmp_path / "objects.npy", np.array([[1], [1, 2]], dtype=object))
    np.save(tmp_path / "none.npy", X[:0])
    (tmp_path / "half.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-1])
    (tmp_path / "half.npz").write_bytes((tmp_path / "both.npz").read_bytes()[:-90])
    packed = bytearray((tmp_path / "y.npz").read_bytes())
    packed[45:60] = b"\xff" * 15  # behind the zip's own header: nothing that zlib could unpack
    (tmp_path / "unpackable.npz").write_bytes(packed)
    (tmp_path / "text.npy").write_text("1, 2, 3")
    shutil.copy(tmp_path / "both.npz", tmp_path / "zip.npy")
    np.save(tmp_path / "turned.npy", np.asfortranarray(X))
    assert torch.equal(NumpyFiles([tmp_path / "turned.npy"]).batch(MIXED)[0], torch.from_numpy(X[MIXED]))
    for fields, problem in [
        ([tmp_path / "half.npy"], "half.npy': is truncated or damaged"),
        (tmp_path / "half.npz", "half.npz': is truncated or damaged"),
        (tmp_path / "unpackable.npz", "unpackable.npz': is truncated or damaged"),
        (tmp_path / "x.npy", r"x.npy': holds one array, without a name\. give a list"),
        ([tmp_path / "objects.npy"], "objects.npy': holds Python objects, no numbers. save an array of numbers"),
        ([tmp_path / "text.npy"], r"text.npy': is no .npy file \(it begins with 312c20322c20\). write it with numpy"),
        ([tmp_path / "zip.npy"], r"zip.npy': is no .npy file \(it begins with 504b.*name it .npz"),
        ([tmp_path / "words.npy"], "ragged or no numbers: <U1"),
        ([tmp_path / "none.npy"], "is empty"),
        ([tmp_path / "both.npz"], r"holds inputs, target. say which: .*both.npz:NAME"),
        ([f"{tmp_path}/both.npz:y"], r"'y': is not in both.npz. there is inputs, target"),
        ([tmp_path / "x.npy", tmp_path / "words.npy"], "ragged"),
        ([tmp_path / "gone.npy"], "does not exist"),
    ]:
        with pytest.raises(DataError, match=problem):
            NumpyFiles(fields)


def write_parquet(table: arrow.Table, path: Path) -> None:
    parquet.write_table(table, path, row_group_size=7)


def write_arrow(table: arrow.Table, path: Path) -> None:
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_stream(table: arrow.Table, path: Path) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_feather(table: arrow.Table, path: Path) -> None:
    feather.write_feather(table, path, compression="lz4", chunksize=7)


@pytest.mark.parametrize(
    ("reader", "suffix", "write"),
    [
        (Parquet, "parquet", write_parquet),
        (Arrow, "arrow", write_arrow),
        (Arrow, "ipc", write_stream),
        (Arrow, "feather", write_feather),
    ],
)
def test_columns(tmp_path: Path, reader: Any, suffix: str, write: Callable[[arrow.Table, Path], None]) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(X.reshape(-1)), 3)
    table = arrow.table({"x": lists, "y": Y, "lists": arrow.array(X.tolist()), "word": [str(n) for n in Y]})
    write(table, tmp_path / f"all.{suffix}")
    write(table.slice(0, 20), folder / f"a.{suffix}")
    write(table.slice(20), folder / f"b.{suffix}")
    (folder / "README.md").write_text("is no part of it")
    for place in (tmp_path / f"all.{suffix}", folder):
        for column in ("x", "lists"):
            batch = pickle.loads(pickle.dumps(reader(place, {"inputs": column, "target": "y"}))).batch(MIXED)
            assert_batch({**batch, "inputs": batch["inputs"].float()})
        assert len(reader(place, ["y"])) == len(Y)
    assert reader(folder, ["y"])[21] == (42,)
    write(arrow.table({"gap": [1.0, None], "ragged": [[1], [1, 2]], "y": [1.5, 2.5]}), tmp_path / f"bad.{suffix}")
    (tmp_path / f"half.{suffix}").write_bytes((tmp_path / f"all.{suffix}").read_bytes()[:-200])
    (tmp_path / f"none.{suffix}").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path, column, problem in [
        (f"all.{suffix}", "z", f"is no column of all.{suffix}. there are: x, y, lists, word"),
        (f"all.{suffix}", "word", "holds (large_)?string, which no tensor can"),
        (f"half.{suffix}", "y", f"cannot be read as {reader.kind}"),
        (f"none.{suffix}", "y", f"cannot be read as {reader.kind}"),
        ("empty", "y", f"has no .*{suffix} in it|has no .*{suffix} or .* in it"),
        (f"bad.{suffix}", "gap", "has 1 missing values of 2"),
        (f"bad.{suffix}", "ragged", "is ragged: its lists have from 1 to 2 values"),
    ]:
        with pytest.raises(DataError, match=problem):
            reader(tmp_path / path, [column]).batch(np.array([0]))
    shutil.copy(tmp_path / f"bad.{suffix}", folder / f"c.{suffix}")
    with pytest.raises(DataError, match="its type differs from file to file"):
        reader(folder, ["y"])


@pytest.mark.parametrize(("reader", "write"), [(Parquet, write_parquet), (Arrow, write_arrow)])
def test_files_of_one_folder_may_differ_in_nullability(
    tmp_path: Path, reader: Any, write: Callable[[arrow.Table, Path], None]
) -> None:
    for name, rows, nullable in (("a", Y[:20], True), ("b", Y[20:], False)):
        schema = arrow.schema([arrow.field("y", arrow.int64(), nullable=nullable)])
        write(arrow.table({"y": rows}, schema=schema), tmp_path / f"{name}{reader.suffixes[0]}")
    dataset = reader(tmp_path, {"target": "y"})
    assert dataset.batch(MIXED)["target"].tolist() == Y[MIXED].tolist()
    assert pickle.loads(pickle.dumps(dataset))[49]["target"] == Y[49]


def test_the_pages_of_parquet_are_checked(tmp_path: Path) -> None:
    flipped = tmp_path / "flipped.parquet"
    how: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    parquet.write_table(arrow.table({"y": Y}), flipped, **how)
    content = bytearray(flipped.read_bytes())
    content[content.index(Y.tobytes())] ^= 1
    flipped.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as Parquet .*CRC"):
        Parquet(flipped, ["y"]).batch(np.array([0]))


def test_a_field_that_is_listed_twice_comes_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = X
        file["x'"] = X + 1
        file["y"] = Y
    write_parquet(arrow.table({"x": X[:, 0], "y": Y}), tmp_path / "data.parquet")
    array = torch.from_numpy(X)
    for dataset, expected in [
        (NumpyFiles([tmp_path / "x.npy", str(tmp_path / "x.npy")]), [array, array]),
        (Hdf5(tmp_path / "data.h5", ["x", "y", "x", "x'"]), [array, torch.from_numpy(Y), array, array + 1]),
        (Parquet(tmp_path / "data.parquet", ["x", "x", "y"]), [array[:, 0], array[:, 0], torch.from_numpy(Y)]),
    ]:
        batch = pickle.loads(pickle.dumps(dataset)).batch(MIXED)
        assert isinstance(batch, tuple)
        for found, values in zip(batch, expected, strict=True):
            assert torch.equal(found, values[MIXED])
        assert len(dataset[0]) == len(dataset.shapes()) == len(expected)


def test_image_folder(tmp_path: Path) -> None:
    for name, colours in {"cat": [10, 20], "dog": [30]}.items():
        (tmp_path / name).mkdir()
        for colour in colours:
            Image.new("RGB", (4, 2), (colour, 0, 255)).save(tmp_path / name / f"{colour}.png")
    dataset = pickle.loads(pickle.dumps(ImageFolder(tmp_path)))
    images, labels = dataset.batch(np.array([2, 0]))
    assert dataset.classes == ["cat", "dog"]
    assert images.shape == (2, 3, 2, 4)
    assert labels.tolist() == [1, 0]
    np.testing.assert_allclose(images[:, 0, 1, 3] * 255, [30.0, 10.0], rtol=1e-6)
    assert ImageFolder(tmp_path, size=(6, 5), mode="L")[0][0].shape == (1, 6, 5)
    assert ImageFolder(tmp_path, transform=lambda image: torch.tensor(image.size))[1][0].tolist() == [4, 2]
    Image.new("RGB", (5, 2)).save(tmp_path / "dog" / "31.png")
    with pytest.raises(DataError, match=r"31.png': is ragged: \(3, 2, 5\) where another is \(3, 2, 4\)"):
        ImageFolder(tmp_path).batch(np.array([0, 3]))
    (tmp_path / "dog" / "32.png").write_bytes((tmp_path / "dog" / "30.png").read_bytes()[:-25])
    with pytest.raises(DataError, match=r"32.png': is no picture, or a damaged one .* \(in samples 4\)"):
        list(Loader(ImageFolder(tmp_path, size=(2, 2)), batch_size=1, shuffle=False))
    (tmp_path / "fox").mkdir()
    with pytest.raises(DataError, match="fox': is empty: a class without pictures"):
        ImageFolder(tmp_path)
    with pytest.raises(DataError, match="has no folders in it"):
        ImageFolder(tmp_path / "dog")
    with pytest.raises(DataError, match=r"32.png': is a file\. give the folder"):
        ImageFolder(tmp_path / "dog" / "32.png")


@pytest.mark.parametrize(("kind", "order"), [("png", "<"), ("tif", "<"), ("tif", ">")])
def test_pictures_of_16_bits_keep_their_greys(tmp_path: Path, kind: str, order: str) -> None:
    (tmp_path / "cat").mkdir()
    greys = np.array([[0, 255, 256], [0x1234, 0x8000, 65535]], dtype=f"{order}u2")
    picture = Image.frombytes("I;16" if order == "<" else "I;16B", (3, 2), greys.tobytes())
    picture.save(tmp_path / "cat" / f"1.{kind}")
    expected = np.array([[0, 0, 1], [0x12, 0x80, 255]], dtype=np.float32) / 255
    np.testing.assert_allclose(ImageFolder(tmp_path, mode="L")[0][0], expected[None], rtol=1e-6)
    np.testing.assert_allclose(ImageFolder(tmp_path)[0][0], np.stack([expected] * 3), rtol=1e-6)
    as_bytes = ImageFolder(tmp_path, mode="L", transform=lambda image: torch.from_numpy(np.array(image)))[0][0]
    assert as_bytes.tolist() == [[0, 0, 1], [0x12, 0x80, 255]]


@pytest.mark.parametrize(("mode", "dtype"), [("I", np.int32), ("F", np.float32)])
def test_pictures_of_32_bits_need_a_transform(tmp_path: Path, mode: str, dtype: Any) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.array([[-1, 70000]], dtype=dtype)).save(tmp_path / "cat" / "1.tif")
    with pytest.raises(DataError, match=rf"1.tif': has 32 bits a pixel \(mode {mode}\).* give ImageFolder a transform"):
        ImageFolder(tmp_path).batch(np.array([0]))
    kept = ImageFolder(tmp_path, transform=lambda image: torch.from_numpy(np.array(image)))[0][0]
    assert kept.tolist() == [[-1, 70000]]


class Shard:
    """What Ray gives a rank: 10 rows of its own, on the GPU of the process where nobody says otherwise."""

    def iter_torch_batches(
        self, *, batch_size: int, drop_last: bool, device: str = "meta"
    ) -> Iterator[dict[str, torch.Tensor]]:
        rows = torch.arange(10, device=device)
        for at in range(0, 10, batch_size):
            if not drop_last or at + batch_size <= 10:
                yield {"x": rows[at : at + batch_size], "y": -rows[at : at + batch_size]}


class Whole(Shard):
    def streaming_split(self, count: int) -> None: ...


def test_ray_data() -> None:
    loader = Loader(RayData(Shard(), ["x"]), batch_size=8, share=(1, 2))
    first = next(iter(loader))
    assert list(first) == ["x"]
    assert (loader.num_samples, loader.num_global, loader.position) == (4, 8, 8)
    state = loader.state_dict()
    rest = [batch["x"].tolist() for batch in loader]
    assert rest == [[4, 5, 6, 7]]
    again = Loader(RayData(Shard(), ["x"]), batch_size=8, share=(1, 2))
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == rest
    with pytest.raises(DataError, match=r"each of 2 ranks needs a shard .*streaming_split\(2, equal=True\)\[rank\]"):
        next(iter(Loader(RayData(Whole()), batch_size=8, share=(0, 2))))
    assert len(list(Loader(RayData(Whole()), batch_size=4, drop_last=False))) == 3
    with pytest.raises(DataError, match=r"are not in the dataset. there are: x, y"):
        next(iter(Loader(RayData(Shard(), ["z"]), batch_size=8)))
    with pytest.raises(ConfigError, match=r"set loader.workers=0"):
        Loader(RayData(Shard()), batch_size=8, spec=LoaderSpec(workers=1))
    with pytest.raises(ConfigError, match="has no iter_torch_batches"):
        RayData([1, 2])


def test_a_fingerprint_follows_the_content_and_not_the_place(mnist: Path, tmp_path: Path) -> None:
    first = fingerprint(Idx.mnist(mnist, train=True))
    shutil.copytree(mnist, tmp_path / "elsewhere")
    assert fingerprint(Idx.mnist(tmp_path / "elsewhere", train=True)) == first
    changed = IMAGES.copy()
    changed[3, 2, 1] += 1
    (mnist / "train-images-idx3-ubyte").write_bytes(idx_bytes(changed))
    assert fingerprint(Idx.mnist(mnist, train=True)) != first
    tensors = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    same = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    other = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6).int())
    assert fingerprint(tensors) == fingerprint(same) != fingerprint(other)
    assert len({fingerprint(each) for each in (tensors, range(6), range(7), [{"a": 1}], [{"b": 1}])}) == 5


def test_a_fingerprint_follows_what_is_read_of_the_files(mnist: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["zeros"], file["also"] = X * 0, X * 0
    np.savez(tmp_path / "both.npz", inputs=Y, target=-Y)
    write_parquet(arrow.table({"y": Y, "z": Y}), tmp_path / "data.parquet")
    for folder, pictures in (("one", {"cat": [1, 2], "dog": [3]}), ("two", {"cat": [1], "dog": [2, 3]})):
        for name, greys in pictures.items():
            (tmp_path / folder / name).mkdir(parents=True)
            for grey in greys:
                Image.new("L", (2, 2), grey).save(tmp_path / folder / name / f"{grey}.png")
    images, both = mnist / "train-images-idx3-ubyte", tmp_path / "both.npz"
    for one, other in [
        (Hdf5(tmp_path / "data.h5", ["zeros"]), Hdf5(tmp_path / "data.h5", ["also"])),
        (NumpyFiles([f"{both}:inputs", f"{both}:target"]), NumpyFiles([f"{both}:target", f"{both}:inputs"])),
        (Parquet(tmp_path / "data.parquet", {"x": "y"}), Parquet(tmp_path / "data.parquet", {"x": "z"})),
        (Idx(images), Idx(images, scale=False)),
        (ImageFolder(tmp_path / "one"), ImageFolder(tmp_path / "two")),
        (ImageFolder(tmp_path / "one"), ImageFolder(tmp_path / "one", transform=lambda picture: torch.zeros(1))),
    ]:
        assert fingerprint(one) != fingerprint(other)
    shutil.copy(images, tmp_path / "renamed")
    assert fingerprint(Idx(images)) == fingerprint(Idx(tmp_path / "renamed"))


@dataclass
class Sample:
    words: object


def a_dataset(value: object) -> list[object]:
    return [np.array([value, "b"], dtype=object), Sample(value)]


def ragged(*rows: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (a_dataset("a"), a_dataset("c")),
        ([1 + 2j], [1 + 3j]),
        ([Image.new("L", (2, 2), 1)], [Image.new("L", (2, 2), 2)]),
        ([torch.eye(2).to_sparse()], [torch.ones(2, 2).to_sparse()]),
        ([torch.tensor([1j]).conj()], [torch.tensor([1j])]),
        ([ragged([1], [2, 3])], [ragged([1, 2], [3])]),
    ],
    ids=["objects", "complex", "pictures", "sparse", "conjugate", "ragged"],
)
def test_a_fingerprint_tells_samples_of_every_kind_apart(one: list[object], other: list[object]) -> None:
    assert fingerprint(one) == fingerprint(copy.deepcopy(one)) != fingerprint(other)


class Named(list[int]):
    """Its fingerprint is a word that somebody has noted, and no method."""

    fingerprint = "of last year"


def test_a_fingerprint_that_is_no_method_is_not_asked_for() -> None:
    assert fingerprint(Named([1])) != fingerprint(Named([2]))


def test_a_fingerprint_of_objects_is_the_same_in_every_process() -> None:
    script = "import test_dataset_files as t; print(t.fingerprint(t.a_dataset('a')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    assert run_python(script, env=environment).strip() == fingerprint(a_dataset("a"))
