"""Files that are read by path or URL. Objects of a bucket are downloaded to this host when they are first read.

Called by the formats of `shoal.data` and by batch prediction. Never writes to a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import BinaryIO, Self

from shoal.errors import DataError, StoreError
from shoal.home import home
from shoal.store.cache import BlobCache, is_present
from shoal.store.location import open_store, require_location
from shoal.store.store import Entry, KeyChanged

MAX_PARALLEL_DOWNLOADS = 16
_URL = re.compile(r"\w+://|(?:file|s3|gs|az):/")
_COLLAPSED = re.compile(r"(file|s3|gs|az):/(?!/)")  # `Path` makes one slash of two


class BucketPath(PosixPath):
    """A file or folder of a bucket, as its path in this host's cache: a path of its own for each content of a file.

    A file is there after `fetch`. A folder is what was listed of it.
    """

    bucket_url: str
    key: str
    entries: Sequence[Entry]  # a file's own, or all below a folder
    _is_folder: bool

    @classmethod
    def of(cls, bucket_url: str, key: str, entries: Sequence[Entry], is_folder: bool) -> Self:
        cache = _open_cache(home())
        result = cls(cache.get_folder(bucket_url) / key if is_folder else cache.get_path(bucket_url, entries[0]))
        result.bucket_url = bucket_url
        result.key = key
        result.entries = entries
        result._is_folder = is_folder
        return result

    def __reduce__(self) -> tuple[object, ...]:  # another host has its cache elsewhere
        return (type(self).of, (self.bucket_url, self.key, self.entries, self._is_folder))

    @property
    def url(self) -> str:
        return f"{self.bucket_url}/{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def is_dir(self) -> bool:
        return self._is_folder

    def is_file(self) -> bool:
        return not self._is_folder

    def iterdir(self) -> Iterator[BucketPath]:  # type: ignore[override]
        prefix = f"{self.key}/" if self.key else ""
        below: dict[str, list[Entry]] = {}
        for entry in self.entries:
            below.setdefault(entry.key.removeprefix(prefix).partition("/")[0], []).append(entry)
        for name, entries in sorted(below.items()):
            key = prefix + name
            if inner := [entry for entry in entries if entry.key != key]:
                yield self.of(self.bucket_url, key, inner, True)
            yield from (self.of(self.bucket_url, key, [entry], False) for entry in entries if entry.key == key)

    def download(self) -> None:
        """Raises DataError."""
        try:
            _open_cache(home()).fetch_entry(open_store(self.bucket_url), self.entries[0])
        except FileNotFoundError:
            raise DataError("path", self.url, "does not exist any more", "restore it, and start again") from None
        except KeyChanged:
            remedy = "start again, and write new data under new names"
            raise DataError("path", self.url, "was changed after it had been listed", remedy) from None
        except StoreError as error:
            raise DataError("path", self.url, f"cannot be downloaded: {error}") from error
        except OSError as error:
            problem = f"cannot be copied to {self.parent} ({error.strerror or error})"
            raise DataError("path", self.url, problem, "free space there, or set SHOAL_HOME") from error


def is_url(path: str) -> bool:
    """Whether it is a URL and not a path of this host."""
    return _URL.match(path) is not None


def locate(path: str | Path, field: str = "path") -> Path:
    """The absolute path of a file or folder, a BucketPath where it is in a bucket. Raises ConfigError, DataError.

    Downloads nothing. Whether there is anything at a path of this host, the caller finds out.
    """
    text = str(path)
    if not is_url(text):
        return Path(path).expanduser().absolute()
    if match := _COLLAPSED.match(text):
        text = f"{match[1]}://{'/' if match[1] == 'file' else ''}{text[match.end() :]}"
    url = require_location(field, text)
    if "://" not in url:
        return Path(url)
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    bucket_url = f"{scheme}://{bucket}"
    try:
        store = open_store(bucket_url)
        if key and not text.endswith("/"):
            with suppress(FileNotFoundError):  # first, since some may read objects and not list them
                return BucketPath.of(bucket_url, key, [store.find(key)], False)
        if entries := store.list_entries(key):
            return BucketPath.of(bucket_url, key, entries, True)
    except StoreError as error:
        raise DataError(field, text, f"cannot be read: {error}") from error
    problem = "does not exist: there is no such object, and none below it"
    raise DataError(field, text, problem, "check bucket and prefix: they are case-sensitive")


def fetch(paths: Iterable[Path]) -> None:
    """Download the files that are in a bucket, and not on this host, several at a time. Raises DataError."""
    files = [path for path in dict.fromkeys(paths) if isinstance(path, BucketPath)]
    if missing := [path for path in files if not is_present(path, path.size_bytes)]:
        with ThreadPoolExecutor(min(len(missing), MAX_PARALLEL_DOWNLOADS)) as pool:
            list(pool.map(BucketPath.download, missing))


def open_source(path: Path) -> BinaryIO:
    """Open a file for reading; of one that is in a bucket and not on this host, only what is read is transferred."""
    if isinstance(path, BucketPath) and not is_present(path, path.size_bytes):
        return open_store(path.bucket_url).open_reader(path.key)
    return path.open("rb")


def get_size_bytes(path: Path) -> int:
    """Of a file, without downloading it."""
    return path.size_bytes if isinstance(path, BucketPath) else path.stat().st_size


@lru_cache(maxsize=4)
def _open_cache(folder: Path) -> BlobCache:
    """One for all callers, which counts what they download."""
    return BlobCache(folder / "cache")
