"""The latest weights, and nothing but the latest.

`WeightStore` holds one immutable `WeightSnapshot`. A producer replaces it and never waits; any number of consumers ask
for something newer than what they have and skip whatever they were too slow for. The payload is safetensors, so a
snapshot can be handed on, stored or served byte for byte. Called by the learner, the gateway, the endpoint and the
registry; knows no torch, no Ray and no transport.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors
import safetensors.numpy

from shoal.atomic_file import hash_file
from shoal.errors import Closed, WeightsError

# The datatypes of safetensors that NumPy has, in the order in which its library writes them.
DTYPES = {
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "F32": "<f4",
    "U32": "<u4",
    "I32": "<i4",
    "BF16": "V2",  # of which it knows the size alone
    "F16": "<f2",
    "U16": "<u2",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
# The unsigned integers of a float's bits, and its exponent in them, which is all ones for NaN and infinities.
_EXPONENTS = {"F64": ("<u8", 0x7FF0 << 48), "F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_PLACES = {np.dtype(dtype): rank for rank, dtype in enumerate(DTYPES.values())}
_NAMES = tuple(DTYPES)
CHUNK = 2**18  # values that are looked at together: they stay in a processor's cache
REMEDY = "restore the file from a copy, or register the model again"


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Serialise named arrays as safetensors: the bytes of its own library, with one copy of the data in place of three.

    The format: https://huggingface.co/docs/safetensors. A learner does this at each publication.
    """
    # Unlike `ascontiguousarray`, this leaves a single number one: batch normalisation counts its batches in one.
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    if any(each.dtype not in _PLACES for each in arrays.values()):
        return bytes(safetensors.numpy.save(arrays))  # as of complex numbers, or of the other byte order
    ordered = sorted(arrays.items(), key=lambda each: (_PLACES[each[1].dtype], each[0]))
    head = encode_header((name, _NAMES[_PLACES[each.dtype]], each.shape, each.nbytes) for name, each in ordered)
    return b"".join([head, *(each.reshape(-1).view(np.uint8).data for _, each in ordered)])


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The beginning of a file of safetensors with these tensors: name, datatype, shape and bytes of each, in order."""
    described = {}
    end = 0
    for name, dtype, shape, size_bytes in tensors:
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    head = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def decode_header(payload: Any) -> tuple[dict[str, Any], int]:
    """How safetensors describe each of their tensors, by name, and where the bytes of all begin.

    payload: bytes, also an array or a mapping of them. Raises ValueError or TypeError for anything else.
    """
    begin = 8 + int.from_bytes(payload[:8], "little")
    described = json.loads(bytes(payload[8:begin]))
    described.pop("__metadata__", None)
    return described, begin


def decode_tensors(payload: bytes) -> dict[str, np.ndarray]:
    """Named arrays from safetensors. Raises WeightsError when it is damaged, or NumPy has no such datatype (BF16)."""
    try:
        return dict(safetensors.numpy.load(payload))
    except KeyError as error:
        problem = f"the payload holds {error.args[0]}, which NumPy has not"
        raise WeightsError(f"{problem}: safetensors.torch.load(snapshot.payload) reads it") from None
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise WeightsError(f"the payload is not safetensors: {error}") from None


Skipped = tuple[tuple[int, int], ...]


def measure_lag(newest: int, versions: np.ndarray, skipped: Skipped) -> np.ndarray:
    """How many publications lie between versions and the `newest` one.

    A learner that restarts goes on from a checkpoint, and skips the numbers that may have been published after it. They
    count as none: what has one of them was made by weights at most as old as the checkpoint's successor.

    skipped: of each restart, the checkpoint's version and the last number that was skipped
    """
    lag = newest - versions
    for checkpoint, last in skipped:
        if newest > last:
            lag = lag - np.clip(last - versions, 0, last - checkpoint)
    return lag


@dataclass(frozen=True)
class WeightSnapshot:
    """One version of the weights, immutable.

    version:      increases with each publication of a run, from 1
    payload:      safetensors; of a registered model that is a file of its own (torch.export, ONNX), that file
    sha256:       hex digest of the payload
    published_at: seconds since the epoch at which the producer handed it over
    skipped:      numbers of the run's versions that count as none: see `measure_lag`
    """

    version: int
    payload: bytes = field(repr=False)
    sha256: str
    published_at: float
    skipped: Skipped = ()

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, np.ndarray], skipped: Skipped = ()) -> WeightSnapshot:
        """Serialise `tensors` as version `version`, published now."""
        return cls.from_payload(version, encode_tensors(tensors), skipped)

    @classmethod
    def from_payload(cls, version: int, payload: bytes, skipped: Skipped = ()) -> WeightSnapshot:
        """Wrap an already serialised payload, published now."""
        return cls(version, payload, hashlib.sha256(payload).hexdigest(), time.time(), skipped)

    def measure_lag(self, versions: np.ndarray | int) -> np.ndarray:
        """How many publications this one is ahead of versions."""
        return measure_lag(self.version, np.asarray(versions), self.skipped)

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays by name. Raises WeightsError when checksum or format do not fit."""
        self.verify()
        return decode_tensors(self.payload)

    def check(self) -> None:
        """Raises WeightsError when checksum or format do not fit. NumPy need not have the tensors' datatypes."""
        self.shapes()

    def shapes(self) -> dict[str, list[int]]:
        """The tensors' shapes by name. Raises WeightsError as `check`."""
        self.verify()
        try:
            described = safetensors.deserialize(self.payload)  # type: ignore[no-untyped-call]
            return {name: list(tensor["shape"]) for name, tensor in described}
        except safetensors.SafetensorError as error:
            raise WeightsError(f"the payload is not safetensors: {error}") from None

    def find_not_finite(self) -> str:
        """The name of a tensor with NaN or an infinity, "" for none; of a payload that is known to be safetensors."""
        for content in self._list_contents():
            described, begin = decode_header(content)
            for name, each in described.items():
                if each["dtype"] not in _EXPONENTS:
                    continue
                unsigned, ones = _EXPONENTS[each["dtype"]]
                first, last = each["data_offsets"]
                bits = content[begin + first : begin + last].view(unsigned)
                if any(((bits[at : at + CHUNK] & ones) == ones).any() for at in range(0, len(bits), CHUNK)):
                    return str(name)
        return ""

    def _list_contents(self) -> list[np.ndarray]:
        """The bytes of each file with tensors."""
        return [np.frombuffer(self.payload, np.uint8)]

    def verify(self) -> None:
        """Raises WeightsError when the checksum does not fit."""
        if not self.is_intact:
            raise self.damage

    @cached_property
    def is_intact(self) -> bool:
        """Whether the checksum fits; computed once in a process, as it takes half of a small model's load."""
        return hashlib.sha256(self.payload).hexdigest() == self.sha256

    @property
    def damage(self) -> WeightsError:
        """What is raised when the checksum does not fit."""
        return WeightsError(f"weights version {self.version}: the checksum does not match the payload")

    @property
    def size_bytes(self) -> int:
        """The size of the payload."""
        return len(self.payload)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "is_intact"}


class WeightPart(NamedTuple):
    """One of the files with a version's tensors."""

    path: Path
    sha256: str


class WeightFile(WeightSnapshot):
    """A version whose payload is in a file, or in several with an index, from which others read parts.

    path:        of the file, or of the index
    sha256:      hex digest of that
    parts:       the files with the tensors: one without an index
    is_verified: the files match their hashes: a load skips the check
    origin:      of a version in a bucket: the registry's URL, and the version's folder there, in which the paths are.
                 `find` downloads a file to this host when it is first needed, and verifies it then
    """

    def __init__(
        self,
        version: int,
        path: Path,
        sha256: str,
        published_at: float,
        *,
        parts: Sequence[WeightPart] = (),
        is_verified: bool = False,
        origin: tuple[str, str] | None = None,
    ) -> None:
        fields = {"version": version, "path": path, "sha256": sha256, "published_at": published_at}
        parts = tuple(parts) or (WeightPart(path, sha256),)
        self.__dict__.update(fields, parts=parts, is_verified=is_verified or origin is not None, origin=origin)

    path: Path
    parts: tuple[WeightPart, ...]
    is_verified: bool
    origin: tuple[str, str] | None

    @property
    def index(self) -> WeightPart:
        """The file at `path`."""
        return WeightPart(self.path, self.sha256)

    @property
    def has_index(self) -> bool:
        """Whether the tensors are in other files than `path`."""
        return self.parts[0].path != self.path

    @property
    def payload(self) -> bytes:
        """All of it, in memory. Raises WeightsError when it is in several files."""
        if self.has_index:
            remedy = "read its tensors one by one, by shoal.weights.tensor_files"
            problem = f"weights version {self.version} are {len(self.parts)} files, and this takes a model of one"
            raise WeightsError(f"{problem}: {remedy}")
        return self.find(self.index).read_bytes()

    @property
    def size_bytes(self) -> int:
        return sum(self.find(part).stat().st_size for part in self.parts)

    def find(self, part: WeightPart) -> Path:
        """Where one of the files is on this host. Raises WeightsError when it cannot be downloaded."""
        if self.origin is None:
            return part.path
        from shoal.store import BlobCache, open_store  # what reads live weights needs no store

        url, folder = self.origin
        key = f"{folder}/{part.path}"
        try:
            return BlobCache().fetch(open_store(url), key, part.sha256)
        except OSError as error:
            what = f"{part.path} of {folder.replace('/', '@')} cannot be read ({error})"
            raise WeightsError(f"{what}: restore {url}/{key} from a copy, or register the model again") from error

    def _list_contents(self) -> list[np.ndarray]:
        return [np.memmap(self.find(part), np.uint8, "r") for part in self.parts]

    def download(self) -> None:
        """Have all files on this host. Raises WeightsError."""
        for each in (self.index, *self.parts):
            self.find(each)

    @cached_property
    def is_intact(self) -> bool:
        return self._find_damaged() is None

    @property
    def damage(self) -> WeightsError:
        return self.describe_damage(self._find_damaged() or self.path)

    def describe_damage(self, path: Path) -> WeightsError:
        """What is raised when the checksum of one of the files does not fit."""
        return WeightsError(f"{path} is damaged: the checksum does not match: {REMEDY}")

    def shapes(self) -> dict[str, list[int]]:
        self.verify()
        result: dict[str, list[int]] = {}
        for part in self.parts:
            try:
                with safetensors.safe_open(self.find(part), "numpy") as opened:
                    result |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            except (OSError, safetensors.SafetensorError) as error:
                raise WeightsError(f"{part.path} cannot be read as safetensors ({error}): {REMEDY}") from error
        return result

    def verify_part(self, part: WeightPart) -> None:
        """Raises WeightsError when the checksum of one of the files does not fit, or it cannot be read."""
        if not self.is_verified and self._is_damaged(part):
            raise self.describe_damage(part.path)

    def _find_damaged(self) -> Path | None:
        """The first file without its hash. Raises WeightsError when one cannot be read."""
        if self.is_verified:
            self.download()
            return None
        files = dict.fromkeys([self.index, *self.parts])
        return next((each.path for each in files if self._is_damaged(each)), None)

    def _is_damaged(self, part: WeightPart) -> bool:
        try:
            return hash_file(part.path) != part.sha256
        except OSError as error:
            raise WeightsError(f"{part.path} cannot be read ({error}): {REMEDY}") from error


class PublishedVersion(NamedTuple):
    """One published version: for the run record."""

    version: int
    step: int
    sha256: str
    published_at: float


class WeightSource(Protocol):
    """Where a consumer gets weights from. Fulfilled by WeightStore, by the registry and by Ray's remote store.

    is_reachable: whether the last call reached it; if not, a None says nothing about what was published
    """

    @property
    def is_reachable(self) -> bool: ...

    def latest(self) -> WeightSnapshot | None:
        """The newest snapshot, or None when nothing has been published yet. Never waits for a publication."""
        ...

    def wait_newer(self, than: int, timeout_s: float) -> WeightSnapshot | None:
        """The newest snapshot with a version above `than`, waiting up to `timeout_s` for one; None when none came."""
        ...


class WeightStore:
    """A latest-only cell of weights, safe to use from any thread.

    | capacity | what blocks                   | who unblocks            | close()                               |
    |----------|-------------------------------|-------------------------|---------------------------------------|
    | 1        | `wait_newer`, up to timeout_s | `publish`, or `close()` | wakes waiters with None; publish raises |
    """

    is_reachable = True

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._latest: WeightSnapshot | None = None
        self._retained: WeightSnapshot | None = None
        self._closed = False

    @property
    def version(self) -> int:
        """The newest version, 0 before the first publication."""
        latest = self._latest
        return latest.version if latest else 0

    def publish(self, snapshot: WeightSnapshot) -> bool:
        """Replace the latest snapshot; never waits for a consumer.

        Returns False, and changes nothing, when the store already holds this version or a newer one, so that a late
        or repeated publication is harmless. Raises Closed after close().
        """
        with self._changed:
            if self._closed:
                raise Closed("the weight store is closed")
            if self._latest is not None and snapshot.version <= self._latest.version:
                return False
            self._latest = snapshot
            self._changed.notify_all()
            return True

    def hold(self, snapshot: WeightSnapshot | None) -> None:
        """Let readers that follow holds read this one until another is held, or with None the newest again."""
        with self._changed:
            self._retained = snapshot
            self._changed.notify_all()

    def latest(self, follows_hold: bool = False) -> WeightSnapshot | None:
        return (follows_hold and self._retained) or self._latest

    def wait_newer(self, than: int, timeout_s: float, follows_hold: bool = False) -> WeightSnapshot | None:
        def find() -> WeightSnapshot | None:
            snapshot = self.latest(follows_hold)
            return snapshot if snapshot is not None and snapshot.version > than else None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or find(), timeout_s)
            return find()

    def close(self) -> None:
        """Wake every waiter; the last snapshot stays readable. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
