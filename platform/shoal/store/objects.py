"""A store in S3, Google Cloud Storage or Azure, by `obstore`, which the extra `store` installs.

A process that was forked from one that had used such a store cannot use any: the client's threads are gone. It gets an
error in place of waiting for ever.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from shoal.errors import ConfigError, StoreError, needs_extra
from shoal.home import read_number_variable
from shoal.store.store import Entry, KeyChanged, KeyTaken, Store, StoreAway, Tagged

if TYPE_CHECKING:
    import obstore

PART_BYTES, MAX_PARTS = 16 << 20, 9_000  # S3 takes 10,000 parts of an object
MAX_PARALLEL_PARTS = 4
# Of a request of a download, which is repeated alone. A server may give each connection less than the network has.
RANGE_BYTES, MAX_PARALLEL_RANGES = 16 << 20, 8
_CHUNK_BYTES, _HASHED_BYTES = 256 << 10, 1 << 20
CONNECT_TIMEOUT, REQUEST_TIMEOUT = "5s", "30s"
BULK_TIMEOUT = "600s"  # of a request that carries a part of a file
# Of the client, whose calls no signal interrupts: within two seconds. Then `_retry` begins.
RETRIES: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
TIMEOUT_S = 60.0  # for a store that is away
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# In the client's errors; those of its readers are one line.
_AWAY = re.compile(r"after [1-9]\d* retries|kind: (Connect|Interrupted|Request|Timeout)|error sending request")

_log = logging.getLogger(__name__)
_first_pid = 0  # of the process in which the first store was opened


Method = TypeVar("Method", bound=Callable[..., Any])


def _retry(method: Method) -> Method:
    """Call a method of ObjectStore again, after pauses with jitter, until the store answers or its deadline is over."""

    @wraps(method)
    def call(self: ObjectStore, *args: Any, **options: Any) -> Any:
        deadline_s, pause_s = time.monotonic() + self.timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                return method(self, *args, **options)
            except StoreAway as error:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
                if pause_s == _FIRST_PAUSE_S:
                    _log.warning("trying again for %.0f s: %s", left_s, error)
                time.sleep(min(left_s, random.uniform(pause_s / 2, pause_s)))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    return cast(Method, call)


class ObjectStore(Store):
    """Objects below `url` (s3://BUCKET/PREFIX, gs://..., az://...).

    timeout_s: the deadline of each call while the store is away; None: `$SHOAL_STORE_TIMEOUT_S`, else 60

    The client takes credentials and the endpoint from the environment, as the provider's own tools do: AWS_*, GOOGLE_*,
    AZURE_*. Raises ConfigError for a URL that is none of a bucket.
    """

    def __init__(self, url: str, timeout_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        if timeout_s is None:
            remedy = "write the seconds for which calls wait for a store that is away"
            timeout_s = read_number_variable("SHOAL_STORE_TIMEOUT_S", TIMEOUT_S, remedy)
        self.timeout_s = timeout_s
        self._client, self._bulk = self._open_client(REQUEST_TIMEOUT), self._open_client(BULK_TIMEOUT)

    def _open_client(self, timeout: str) -> Any:
        global _first_pid
        with needs_extra("store"):
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        _first_pid = _first_pid or os.getpid()
        options: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT, "timeout": timeout}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = True
        try:
            open_url: Any = from_url  # its overloads name each provider's own options
            return open_url(self.url, client_options=options, retry_config=RETRIES)
        except (BaseError, ValueError) as error:
            raise ConfigError("store", self.url, f"cannot be opened ({_summarize(error)})", _REMEDY) from None

    @_retry
    def read_tagged(self, key: str) -> Tagged:
        with self._calls(key) as client:
            result = client.get(self._client, key)
            return Tagged(bytes(result.bytes()), result.meta["e_tag"] or "")

    @_retry
    def download(self, key: str, path: Path, tag: str = "") -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_HASHED_BYTES))
        with path.open("w+b") as file, self._calls(key) as client:
            whole = client.get(self._bulk, key)
            meta = whole.meta
            if tag and _to_entry(meta).tag != tag:
                raise KeyChanged(f"{key} in {self.url} was changed")

            def fetch(begin: int) -> int:
                end: int = min(begin + RANGE_BYTES, meta["size"])
                place = begin
                options: Any = {"range": (begin, end), "if_match": meta["e_tag"]}
                answer = client.get(self._bulk, key, options=options) if begin else whole
                for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                    place += os.pwrite(file.fileno(), memoryview(chunk)[: end - place], place)
                    if place == end:  # the answer without a range has all others, too
                        break
                if place < end:
                    raise StoreAway(f"{key} in {self.url} was cut off")
                return end

            place = 0
            with ThreadPoolExecutor(MAX_PARALLEL_RANGES, "shoal-download") as pool:
                for end in pool.map(fetch, range(0, meta["size"], RANGE_BYTES)):
                    while place < end:
                        count = os.preadv(file.fileno(), [buffer[: end - place]], place)
                        digest.update(buffer[:count])
                        place += count
        return digest.hexdigest()

    @_retry
    def open_reader(self, key: str) -> BinaryIO:
        with self._calls(key) as client:
            return io.BufferedReader(_Reader(self, key, client.open_reader(self._client, key)))

    @_retry
    def _read(self, file: _Reader, size_bytes: int) -> bytes:
        """The next bytes of a file. The client's reader is of no use after an error: another goes on where it was."""
        from obstore.exceptions import BaseError

        with self._calls(file.key) as client:
            if (reader := file.reader) is None:
                reader, file.reader_position = client.open_reader(self._client, file.key), 0
            file.reader = None
            try:
                if file.reader_position != file.position:  # it empties the client's buffer
                    reader.seek(file.position)
                result = bytes(reader.read(size_bytes))
            except OSError as error:  # in place of the client's own
                raise BaseError(str(error)) from None
            file.reader = reader
            file.position = file.reader_position = file.position + len(result)
            return result

    @_retry
    def write(self, key: str, content: bytes | Path) -> None:
        with self._calls(key) as client:
            size_bytes = content.stat().st_size if isinstance(content, Path) else len(content)
            part_bytes = max(PART_BYTES, size_bytes // MAX_PARTS + 1)
            client.put(self._bulk, key, content, chunk_size=part_bytes, max_concurrency=MAX_PARALLEL_PARTS)

    @_retry
    def copy(self, source: str, target: str) -> None:
        with self._calls(source) as client:
            client.copy(self._client, source, target)

    def create(self, key: str, payload: bytes) -> None:
        if not self._put_if(key, payload, "create", secrets.token_hex(8)):
            raise KeyTaken(f"{key} in {self.url} exists")

    def replace(self, key: str, payload: bytes, tag: str) -> None:
        if not self._put_if(key, payload, {"e_tag": tag}, secrets.token_hex(8)):
            raise KeyChanged(f"{key} in {self.url} was changed")

    @_retry
    def _put_if(self, key: str, payload: bytes, mode: Any, writer: str) -> bool:
        """Whether the condition held. A request whose answer was lost is sent again, and then fails by its own success:
        the object's writer tells."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._calls(key) as client:
            try:
                client.put(self._client, key, payload, mode=mode, attributes={"writer": writer})
            except (AlreadyExistsError, PreconditionError):
                try:
                    return bool(client.get(self._client, key).attributes.get("writer") == writer)
                except FileNotFoundError:
                    return False
        return True

    @_retry
    def find(self, key: str) -> Entry:
        with self._calls(key) as client:
            return _to_entry(client.head(self._client, key))

    @_retry
    def list_entries(self, folder: str = "") -> list[Entry]:
        with self._calls(folder) as client:
            result = [each for page in client.list(self._client, folder or None) for each in page]
        return sorted(map(_to_entry, result))

    @_retry
    def list_folders(self, folder: str = "") -> list[str]:
        with self._calls(folder) as client:
            result = client.list_with_delimiter(self._client, folder or None)
        return sorted(each.rpartition("/")[2] for each in result["common_prefixes"])

    def delete(self, keys: Iterable[str]) -> None:
        if listed := list(keys):
            self._delete(listed)

    @_retry
    def _delete(self, keys: list[str]) -> None:
        with self._calls(keys[0]) as client:
            client.delete(self._client, keys)

    def open_folder(self, folder: str) -> ObjectStore:
        return ObjectStore(f"{self.url}/{folder}", self.timeout_s)

    def without_waiting(self) -> ObjectStore:
        store = copy(self)  # with the same connections
        store.timeout_s = 0.0
        return store

    def _require_bucket(self, error: Exception) -> None:
        if any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound")):
            raise StoreError(f"{self.url} does not exist: create the bucket, or correct the URL") from None

    @contextmanager
    def _calls(self, key: str) -> Iterator[obstore]:  # type: ignore[valid-type]
        """Raises StoreError for the client's errors; one that it was forked away from is an error too."""
        import obstore
        from obstore.exceptions import BaseError

        if os.getpid() != _first_pid:
            problem = "cannot be used in a process forked from one that has used a store"
            raise StoreError(f"{self.url} {problem}: read it before, or start the process afresh")
        try:
            yield obstore
        except FileNotFoundError as error:
            self._require_bucket(error)
            raise FileNotFoundError(f"{self.url} has no {key}") from None
        except (BaseError, PermissionError) as error:
            self._require_bucket(error)
            kind = StoreAway if _AWAY.search(str(error)) else StoreError
            raise kind(f"{self.url} cannot be used ({_summarize(error)}): {_REMEDY}") from error


class _Reader(io.RawIOBase):
    """Of one object; the client's own reader is no file to other libraries."""

    def __init__(self, store: ObjectStore, key: str, reader: obstore.ReadableFile) -> None:
        self._store, self._size_bytes = store, reader.size
        self.key = key
        self.position = 0
        self.reader_position = 0
        self.reader: obstore.ReadableFile | None = reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self._size_bytes}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        result = self._store._read(self, len(buffer))
        buffer[: len(result)] = result
        return len(result)


_REMEDY = "check the URL, the credentials (AWS_*, GOOGLE_* or AZURE_* in the environment) and the network"


def _to_entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


def _summarize(error: BaseException) -> str:
    """The first line: the rest is the client's own source."""
    return str(error).partition("\n")[0].strip()[:300]
