"""Every store keeps the same promises: a folder, and a bucket of an S3 server that honours conditional writes."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bucket_server import BUCKET, Outage, bucket_environment, open_bucket, store
from shoal.errors import ConfigError, StoreError
from shoal.store import (
    BlobCache,
    KeyChanged,
    KeyTaken,
    Store,
    StoreAway,
    open_store,
    require_location,
    store_url,
    update,
)

__all__ = ["bucket_environment", "store"]

_numbers = itertools.count()


def test_what_is_written_is_read_listed_and_deleted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"from a file")
    store.write("a/b/one", b"1")
    store.write("a/two", tmp_path / "file")
    store.write("ab", b"333")
    store.write("ab", b"4444")
    assert [(entry.key, entry.size_bytes) for entry in store.list_entries()] == [
        ("a/b/one", 1),
        ("a/two", 11),
        ("ab", 4),
    ]
    assert [entry.key for entry in store.list_entries("a")] == ["a/b/one", "a/two"]
    assert store.list_entries("nothing") == []
    assert (store.list_folders(), store.list_folders("a"), store.list_folders("nothing")) == (["a"], ["b"], [])
    assert (store.read("ab"), store.read("a/two")) == (b"4444", b"from a file")
    assert store.download("a/two", tmp_path / "copy") == hashlib.sha256(b"from a file").hexdigest()
    assert (tmp_path / "copy").read_bytes() == b"from a file"
    store.write("empty", b"")
    assert store.download("empty", tmp_path / "none") == hashlib.sha256().hexdigest()
    store.delete(["empty"])
    assert store.open_folder("a").read("b/one") == b"1"
    store.delete(["a/b/one", "never there"])
    store.delete([])
    assert store.list_folders("a") == []
    for missing in ("a/b/one", "a/b"):
        with pytest.raises(FileNotFoundError):
            store.read(missing)
        with pytest.raises(FileNotFoundError):
            store.download(missing, tmp_path / "missing")


def test_the_times_of_objects_are_those_of_the_store(store: Store) -> None:
    store.write("one", b"")
    store.write("two", b"")
    one, two = store.list_entries()
    assert 1.6e9 < one.modified_s <= two.modified_s + 1.0


def test_a_large_object_is_written_and_read_in_parts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = os.urandom(1 << 20) * 16
    (tmp_path / "large").write_bytes(payload)
    store.write("from file", tmp_path / "large")
    store.write("from memory", payload)
    assert store.read("from file") == payload == store.read("from memory")
    monkeypatch.setattr("shoal.store.objects.RANGE_BYTES", 7_000_000)  # each one a request
    assert store.download("from file", tmp_path / "copy") == hashlib.sha256(payload).hexdigest()
    assert (tmp_path / "copy").read_bytes() == payload


def test_one_of_several_creates_an_object(store: Store) -> None:
    def create(number: int) -> bool:
        try:
            store.create("key", b"%d" % number)
        except KeyTaken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(16)))
    assert sum(won) == 1
    assert store.read("key") == b"%d" % won.index(True)


def test_an_object_is_replaced_only_by_who_has_read_it(store: Store) -> None:
    store.create("key", b"1")
    found = store.read_tagged("key")
    store.replace("key", b"2", found.tag)
    with pytest.raises(KeyChanged):
        store.replace("key", b"3", found.tag)
    assert store.read("key") == b"2"
    tag = store.read_tagged("key").tag
    store.delete(["key"])
    with pytest.raises(KeyChanged):
        store.replace("key", b"4", tag)
    with pytest.raises(FileNotFoundError):
        store.read("key")


def test_an_object_is_downloaded_as_the_one_that_was_found(store: Store, tmp_path: Path) -> None:
    store.write("a/key", b"one")
    found, tag = store.find("a/key"), store.read_tagged("a/key").tag
    assert (found.key, found.size_bytes) == ("a/key", 3)
    assert found == store.list_entries("a")[0]
    assert found.tag in ("", tag)
    store.download("a/key", tmp_path / "copy", tag)
    store.write("a/key", b"two")
    with pytest.raises(KeyChanged):
        store.download("a/key", tmp_path / "copy", tag)
    for missing in ("a", "a/other"):
        with pytest.raises(FileNotFoundError):
            store.find(missing)


def test_an_object_is_read_in_part_and_copied(store: Store) -> None:
    store.write("key", bytes(range(100)) * 100)
    store.copy("key", "a/copy")
    assert store.read("a/copy") == store.read("key")
    with store.open_reader("a/copy") as file:
        assert file.seek(-10, os.SEEK_END) == 9990
        assert file.read() == bytes(range(90, 100))
        assert file.seek(200) == 200
        assert file.read(3) == bytes(range(3))
    for call in (lambda: store.open_reader("none"), lambda: store.copy("none", "other")):
        with pytest.raises(FileNotFoundError):
            call()


def test_no_update_is_lost(store: Store) -> None:
    def increment(_: int) -> None:
        update(store, "count", lambda payload: b"%d" % (int(payload or b"0") + 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(increment, range(32)))
    assert store.read("count") == b"32"
    assert update(store, "count", lambda payload: None) == b"32"
    assert update(store, "nothing", lambda payload: None) is None


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
def test_a_write_whose_answer_was_lost_has_succeeded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends a request again when its connection breaks: the first may have been carried out."""
    import obstore

    real = obstore.put

    def put_twice(*arguments: Any, **options: Any) -> object:
        real(*arguments, **options)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", put_twice)
        store.create("key", b"mine")
        store.replace("key", b"next", store.read_tagged("key").tag)
    with pytest.raises(KeyTaken):  # the same payload of another writer
        store.create("key", b"next")
    assert store.read("key") == b"next"


def test_drafts_of_killed_writers_are_never_seen_and_removed_when_old(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write("a/one", b"1")
    draft = tmp_path / "a/.one-0123456789abcdef"
    draft.write_bytes(b"half")
    assert [entry.key for entry in store.list_entries()] == ["a/one"]
    store.remove_drafts(3600.0)
    assert draft.exists()
    os.utime(draft, (0, 0))
    store.remove_drafts(3600.0)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["one"]


def test_files_of_a_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "source").write_bytes(b"x")
    (tmp_path / "source").chmod(0o644)
    for key, content in (("a/one", b"1"), ("a/two", tmp_path / "source")):
        store.write(key, content)
        assert ((tmp_path / "store" / key).stat().st_mode & 0o777) == 0o600
    assert ((tmp_path / "store/a").stat().st_mode & 0o777) == 0o700


# -- the copies on this host


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
def test_an_object_is_downloaded_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = os.urandom(1000)
    sha256 = hashlib.sha256(payload).hexdigest()
    store.write("weights", payload)
    cache = BlobCache(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: cache.fetch(store, "weights", sha256), range(8)))
    (path,) = paths
    assert path.read_bytes() == payload
    monkeypatch.setattr(store, "download", None)  # not called again
    assert BlobCache(tmp_path / "cache").fetch(store, "weights", sha256) == path
    assert [each.name for each in path.parent.iterdir()] == [sha256]
    monkeypatch.setattr("shoal.store.cache._get_verified_s", lambda: 7.0)  # after another start of the host
    assert cache.fetch(store, "weights", sha256) == path
    assert path.stat().st_mtime == 7.0
    path.write_bytes(payload[:500])  # what a power cut has left
    monkeypatch.undo()
    assert cache.fetch(store, "weights", sha256).read_bytes() == payload


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
@pytest.mark.parametrize("size_bytes", [4, 3])
def test_a_copy_that_was_changed_is_downloaded_again(store: Store, tmp_path: Path, size_bytes: int) -> None:
    store.write("weights", b"1234")
    cache, sha256 = BlobCache(tmp_path), hashlib.sha256(b"1234").hexdigest()
    path = cache.fetch(store, "weights", sha256)
    with path.open("rb") as opened:
        path.write_bytes(b"5678"[:size_bytes])
        changed = opened.read()
        assert cache.fetch(store, "weights", sha256) == path
        opened.seek(0)
        assert opened.read() == changed, "a file is replaced, not overwritten: a process may read it"
    assert path.read_bytes() == b"1234"


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
def test_an_object_with_another_hash_is_refused(store: Store, tmp_path: Path) -> None:
    store.write("weights", b"damaged")
    with pytest.raises(StoreError, match=r"weights in s3://.* is damaged: its hash is"):
        BlobCache(tmp_path).fetch(store, "weights", hashlib.sha256(b"whole").hexdigest())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != ".locks"]


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
def test_copies_used_longest_ago_leave_first(store: Store, tmp_path: Path) -> None:
    cache, paths = BlobCache(tmp_path, capacity_bytes=2500), []
    hashes = []
    for number in range(3):
        payload = bytes([number]) * 1000
        hashes.append(hashlib.sha256(payload).hexdigest())
        store.write(f"{number}", payload)
        paths.append(cache.fetch(store, f"{number}", hashes[-1]))
        os.utime(paths[-1], (number + 1, paths[-1].stat().st_mtime))
        if number == 1:
            cache.fetch(store, "0", hashes[0])  # used again
    assert [path.exists() for path in paths] == [True, False, True]


def test_the_capacity_for_copies_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE_GIB", "0.5")
    assert BlobCache(tmp_path)._capacity_bytes == 2**29
    monkeypatch.setenv("SHOAL_CACHE_GIB", "much")
    with pytest.raises(ConfigError, match="SHOAL_CACHE_GIB = 'much': is no number"):
        BlobCache(tmp_path)


def test_a_folder_needs_no_copies(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.write("weights", b"x")
    assert BlobCache(tmp_path / "cache").fetch(store, "weights", "") == tmp_path / "store/weights"
    assert not (tmp_path / "cache").exists()


# -- where


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("/somewhere/", "/somewhere"),
        ("file:///somewhere", "/somewhere"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/pre/fix/", "gs://bucket/pre/fix"),
        ("az://container/x", "az://container/x"),
    ],
)
def test_a_location_is_a_folder_or_a_bucket(url: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert require_location("store", url) == found
    monkeypatch.setenv("SHOAL_STORE", f" {url}\n")
    assert store_url() == found


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://host/x", "none of the kinds file, s3, gs, az"),
        ("s3:bucket", "names no bucket"),
        ("s3://", "names no bucket"),
        ("s3://bucket/a//b", "names no bucket"),
        ("s3://bucket/.hidden", "with a dot"),
        ("s3://bucket/a?b=c", "more than a place"),
        ("s3://key:secret@bucket/a", "more than a place"),
        ("file://host/x", "not a folder of this host"),
        ("file:x", "not a folder of this host"),
    ],
)
def test_any_other_location_is_an_error(url: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", url)
    with pytest.raises(ConfigError, match=f"SHOAL_STORE.*{problem}"):
        store_url()
    with pytest.raises(ConfigError, match=f"store.*{problem}"):
        open_store(url)


def test_without_a_location_files_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    assert open_store().url == str(tmp_path)


def test_a_store_that_never_answers_is_an_error_in_less_time_than_a_file_may_take(
    bucket_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in (bucket_environment | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("shoal.store.objects.REQUEST_TIMEOUT", "1s")
        monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
        store = open_store(f"s3://{BUCKET}/{next(_numbers)}")
        with pytest.raises(StoreError, match="cannot be used"):
            store.read("x")


class Clock:
    """As the module `time`, of a store: `on_pause` is called in each pause, which takes no time."""

    def __init__(self, on_pause: Callable[[], object] = lambda: None) -> None:
        self._on_pause, self._now_s = on_pause, 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
        self.pauses.append(seconds)
        self._on_pause()


CALLS: dict[str, Callable[[Store, Path], object]] = {
    "read": lambda store, path: store.read("x"),
    "download": lambda store, path: store.download("x", path),
    "read in part": lambda store, path: store.open_reader("x").read(),
    "write": lambda store, path: store.write("y", b"2"),
    "copy": lambda store, path: store.copy("x", "y"),
    "create": lambda store, path: store.create("new", b"3"),
    "replace": lambda store, path: store.replace("x", b"3", hashlib.md5(b"1").hexdigest()),
    "find": lambda store, path: store.find("x"),
    "list": lambda store, path: store.list_entries(),
    "list folders": lambda store, path: store.list_folders(),
    "delete": lambda store, path: store.delete(each for each in ["x"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_waits_for_a_store_that_is_away(
    bucket_environment: dict[str, str],
    call: Callable[[Store, Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    store = open_bucket(bucket_environment | {"SHOAL_STORE_TIMEOUT_S": "30"}, monkeypatch)
    store.write("x", b"1")
    outage = Outage(bucket_environment)
    clock = Clock(outage.end)
    monkeypatch.setattr("shoal.store.objects.time", clock)
    try:
        call(store, tmp_path / "copy")
    finally:
        outage.end()
    assert len(clock.pauses) == 1
    assert ("x" in {entry.key for entry in store.list_entries()}) == (call is not CALLS["delete"])


def test_a_reader_goes_on_where_it_was_when_the_store_is_back(
    bucket_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    store = open_bucket(bucket_environment | {"SHOAL_STORE_TIMEOUT_S": "30"}, monkeypatch)
    payload = os.urandom(3 << 20)
    store.write("x", payload)
    with store.open_reader("x") as file:
        begin = file.read(1 << 20)
        outage = Outage(bucket_environment)
        monkeypatch.setattr("shoal.store.objects.time", clock := Clock(outage.end))
        try:
            assert begin + file.read() == payload
        finally:
            outage.end()
    assert len(clock.pauses) == 1


def test_a_store_that_stays_away_is_an_error_after_the_deadline(
    bucket_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.store.objects.RETRIES", {"max_retries": 0})
    monkeypatch.setattr("shoal.store.objects.time", clock := Clock())
    away = bucket_environment | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "SHOAL_STORE_TIMEOUT_S": ""}
    store = open_bucket(away, monkeypatch).open_folder("a")
    with pytest.raises(StoreAway, match="cannot be used"):
        store.without_waiting().read("x")
    assert clock.pauses == []
    with pytest.raises(StoreAway, match="cannot be used"):
        store.read("x")
    assert clock.monotonic() == pytest.approx(60.0)
    assert max(clock.pauses) <= 5.0
    assert len({round(pause_s, 6) for pause_s in clock.pauses}) == len(clock.pauses), "pauses have jitter"


def test_what_a_store_refuses_is_an_error_at_once(
    bucket_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.store.objects.time", clock := Clock())
    for name, value in (bucket_environment | {"SHOAL_STORE_TIMEOUT_S": "30"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="does not exist: create the bucket"):
        open_store(f"s3://no-such-bucket/{next(_numbers)}").list_entries()
    assert clock.pauses == []


def test_the_deadline_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE_TIMEOUT_S", "long")
    with pytest.raises(ConfigError, match="SHOAL_STORE_TIMEOUT_S = 'long': is no number"):
        open_store(f"s3://{BUCKET}/{next(_numbers)}")


def _read_in_child(store: Store, answers: multiprocessing.Queue[str]) -> None:
    try:
        store.read("x")
    except StoreError as error:
        answers.put(str(error))


@pytest.mark.parametrize("store", ["bucket"], indirect=True)
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_gets_an_error_instead_of_waiting_for_ever(store: Store) -> None:
    store.write("x", b"1")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, answers))
    child.start()
    assert "forked from one that has used a store" in answers.get(timeout=60)
    child.join(60)
