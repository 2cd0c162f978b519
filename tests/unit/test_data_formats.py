"""Each format gives what was written into its file, and says what is wrong with a file."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import Loader
from shoal.data.formats import Idx
from shoal.errors import DataError

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
    torch.testing.assert_close(images[:, 0], torch.from_numpy(IMAGES[[4, 0]]) / 255)
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
