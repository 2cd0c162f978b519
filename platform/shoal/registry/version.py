"""One registered version: its manifest, and its payload as a file of this host or in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import WeightsError
from shoal.registry.manifest import Manifest
from shoal.registry.model_format import get_payload_file
from shoal.store import BlobCache, Store
from shoal.weights import WeightFile, WeightSnapshot

FILES = "files"


@dataclass(frozen=True)
class ModelVersion:
    """One registered version. `aliases` are those that named it at the look-up."""

    name: str
    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    store: Store

    @property
    def ref(self) -> str:
        """The exact reference: name@version."""
        return f"{self.name}@{self.version}"

    @property
    def location(self) -> str:
        """The folder, or URL, of its objects."""
        return f"{self.store.url}/{self.name}/{self.version}"

    def weight_file(self) -> WeightFile:
        """The payload as a file of this host: unread and unchecked, or from a bucket, downloaded and verified once.

        Raises WeightsError when it is missing, or cannot be fetched whole.
        """
        manifest, path = self.manifest, self._fetch()
        origin = None if self.store.locate(self._key) else (self.store.url, self.ref)
        is_copy = origin is not None
        return WeightFile(self.version, path, manifest.sha256, manifest.created_at, is_verified=is_copy, origin=origin)

    def snapshot(self) -> WeightSnapshot:
        """The payload, as version `self.version`: the weights, or the model's file.

        Raises WeightsError when it is missing or damaged.
        """
        file = self.weight_file()
        if file.is_verified:
            return file
        snapshot = self._read(file.path)
        if not snapshot.is_intact:
            expected = self.manifest.size_bytes
            raise WeightsError(
                f"{self._file} of {self.ref} is damaged: the checksum does not match"
                f" ({len(snapshot.payload)} bytes, {expected} expected): {self._remedy}"
            )
        return snapshot

    def fetch_file(self, name: str) -> Path:
        """One of the `files` of the manifest, on this host. Raises WeightsError when it is missing or damaged."""
        key = f"{self.name}/{self.version}/{FILES}/{name}"
        digest = self.manifest.files[name]
        try:
            path = BlobCache().fetch(self.store, key, digest)
            is_intact = hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except OSError as error:
            raise WeightsError(f"{name} of {self.ref} cannot be read ({error}): restore it from a copy") from error
        if not is_intact:
            raise WeightsError(f"{name} of {self.ref} is damaged: the checksum does not match: restore it from a copy")
        return path

    @property
    def _file(self) -> str:
        return get_payload_file(self.manifest.model.format)

    @property
    def _key(self) -> str:
        return f"{self.name}/{self.version}/{self._file}"

    @property
    def _remedy(self) -> str:
        return f"restore {self.location}/{self._file} from a copy, or register the model again"

    def _fetch(self) -> Path:
        try:
            return BlobCache().fetch(self.store, self._key, self.manifest.sha256)
        except OSError as error:
            raise WeightsError(f"{self._file} of {self.ref} cannot be read ({error}): {self._remedy}") from error

    def _read(self, path: Path) -> WeightSnapshot:
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{self._file} of {self.ref} cannot be read ({error}): {self._remedy}") from error
        return WeightSnapshot(self.version, payload, self.manifest.sha256, self.manifest.created_at)
