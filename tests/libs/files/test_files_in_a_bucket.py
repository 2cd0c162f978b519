"""The formats read a bucket as they read a folder: the same batches, and the same fingerprint."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as arrow
import pytest
import torch
from PIL import Image
from pyarrow import feather, parquet

from bucket_server import BUCKET, bucket_environment, open_bucket  # noqa: F401 - a fixture
from libs.files.test_dataset_files import IMAGES, LABELS, idx_bytes
from shoal.data import Loader, fingerprint
from shoal.data.formats import Arrow, Hdf5, Idx, ImageFolder, NumpyFiles, Parquet
from shoal.errors import ConfigError, DataError, MissingExtra
from shoal.store import BucketPath, Store, location

INDICES = np.array([4, 0, 4, 1])


@pytest.fixture
def bucket(bucket_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:  # noqa: F811
    return open_bucket(bucket_environment, monkeypatch)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is downloaded from now on."""
    found: list[str] = []
    download = BucketPath.download

    def count(path: BucketPath) -> None:
        found.append(path.name)
        download(path)

    monkeypatch.setattr(BucketPath, "download", count)
    return found


def upload(folder: Path, store: Store) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path)


def write_all(folder: Path) -> None:
    """A file of each format, or a folder of several; 6 samples."""
    np.save(folder / "x.npy", IMAGES)
    np.savez(folder / "both.npz", x=IMAGES, y=LABELS)
    with h5py.File(folder / "both.h5", "w") as file:
        file["x"], file["y"] = IMAGES, LABELS
    (folder / "train-images-idx3-ubyte").write_bytes(idx_bytes(IMAGES))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS))
    for kind in ("parquet", "arrow", "pictures/cat", "pictures/a dog"):
        (folder / kind).mkdir(parents=True)
    for part in range(2):
        table = arrow.table({"x": np.arange(3) + 3 * part, "y": LABELS[3 * part : 3 * part + 3]})
        parquet.write_table(table, folder / f"parquet/{part}.parquet")
        feather.write_feather(table, folder / f"arrow/{part}.arrow", compression="uncompressed")
    for number, picture in enumerate(IMAGES):
        Image.fromarray(picture).save(folder / f"pictures/{'cat' if number < 2 else 'a dog'}/{number % 4}.png")


OPEN: dict[str, Callable[[str], Any]] = {
    "npy": lambda place: NumpyFiles({"x": f"{place}/x.npy", "y": f"{place}/both.npz:y"}),
    "npz": lambda place: NumpyFiles(f"{place}/both.npz"),
    "hdf5": lambda place: Hdf5(f"{place}/both.h5", ["x", "y"]),
    "idx": lambda place: Idx(Path(place) / "train-images-idx3-ubyte", Path(place) / "train-labels-idx1-ubyte"),
    "mnist": lambda place: Idx.mnist(place, train=True),
    "parquet": lambda place: Parquet(f"{place}/parquet/", ["x", "y"]),
    "parquet file": lambda place: Parquet(f"{place}/parquet/1.parquet", ["x"]),
    "arrow": lambda place: Arrow(f"{place}/arrow", {"x": "x"}),
    "pictures": lambda place: ImageFolder(f"{place}/pictures"),
}


def flatten(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def test_every_format_reads_a_bucket_as_it_reads_a_folder(bucket: Store, tmp_path: Path) -> None:
    write_all(tmp_path)
    upload(tmp_path, bucket)
    for name, open_at in OPEN.items():
        ours, theirs = open_at(str(tmp_path)), pickle.loads(pickle.dumps(open_at(bucket.url)))
        indices = INDICES % len(ours)
        for one, other in zip(flatten(ours.batch(indices)), flatten(theirs.batch(indices)), strict=True):
            assert torch.equal(one, other), name
        assert fingerprint(ours) == fingerprint(theirs), name
        assert fingerprint(open_at(f"file://{tmp_path}")) == fingerprint(ours), name
    assert ImageFolder(f"{bucket.url}/pictures").classes == ["a dog", "cat"]


def test_files_are_downloaded_once_and_pictures_when_they_are_read(
    bucket: Store, tmp_path: Path, downloads: list[str]
) -> None:
    write_all(tmp_path)
    upload(tmp_path, bucket)
    for _ in range(2):
        pictures = ImageFolder(f"{bucket.url}/pictures")
        pictures.batch(np.array([0, 2, 0]))
        Parquet(f"{bucket.url}/parquet", ["x"]).batch(np.array([0]))
        assert sorted(downloads) == ["0.parquet", "0.png", "1.parquet", "2.png"]


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_a_file_that_changes_between_listing_and_reading_is_an_error(
    change: str, bucket: Store, tmp_path: Path
) -> None:
    write_all(tmp_path)
    upload(tmp_path, bucket)
    dataset = ImageFolder(f"{bucket.url}/pictures")
    if change == "changed":
        bucket.write("pictures/cat/0.png", b"other")
    else:
        bucket.delete(["pictures/cat/0.png"])
    said = "was changed after it had been listed" if change == "changed" else "does not exist any more"
    with pytest.raises(DataError, match=rf"path = 's3://.*/a b/pictures/cat/0\.png': {said}") as raised:
        next(iter(Loader(dataset, batch_size=6, shuffle=False)))
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("url", "change", "said"),
    [
        (f"s3://{BUCKET}/nothing/here", {}, "does not exist: there is no such object"),
        ("s3://no-such-bucket/x", {}, "cannot be read: s3://no-such-bucket does not exist: create the bucket"),
        (f"s3://{BUCKET}/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, r"cannot be read: .*check the URL, the cred"),
        ("http://host/x.npy", {}, "is of none of the kinds file, s3, gs, az"),
        ("s3://", {}, "names no bucket"),
        ("file:///no/such/file.npy", {}, "does not exist"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(
    url: str, change: dict[str, str], said: str, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    location._open_bucket.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf"path = '{url}': {said}"):
            NumpyFiles([url])
    finally:
        location._open_bucket.cache_clear()


def test_without_the_extra_a_bucket_is_an_error_that_names_it(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    location._open_bucket.cache_clear()
    with pytest.raises(MissingExtra, match=r"obstore.* is not installed: pip install .*\[store\]"):
        Parquet(f"s3://{BUCKET}/other-client", ["x"])
