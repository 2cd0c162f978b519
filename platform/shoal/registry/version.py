"""One registered version: its manifest, and its payload as a file of this host or in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import WeightsError
from shoal.registry.manifest import Manifest
from shoal.registry.model_format import INDEX_FILE, get_payload_file
from shoal.store import BlobCache, Store
from shoal.weights import WeightFile, WeightPart, WeightSnapshot

FILES = "files"


@dataclass(frozen=True)
class ModelVersion:
    """One registered version. `aliases` are those that named it at the look-up.

    decision: of a version that was just added: which one is the champion now, and why
    problem:  and why an endpoint would refuse it, "" where it would not, or was not tried
    """

    name: str
    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    store: Store
    decision: str = ""
    problem: str = ""

    @property
    def ref(self) -> str:
        """The exact reference: name@version."""
        return f"{self.name}@{self.version}"

    @property
    def location(self) -> str:
        """The folder, or URL, of its objects."""
        return f"{self.store.url}/{self.name}/{self.version}"

    def weight_file(self) -> WeightFile:
        """The payload as files, unread and unchecked; those of a bucket are downloaded when they are needed."""
        manifest, key = self.manifest, f"{self.name}/{self.version}"
        folder = self.store.locate(key)
        origin, parent = ((self.store.url, key), Path()) if folder is None else (None, folder)
        parts = [WeightPart(parent / each.file, each.sha256) for each in manifest.parts]
        path = parent / self._file
        return WeightFile(self.version, path, manifest.sha256, manifest.created_at, parts=parts, origin=origin)

    def snapshot(self) -> WeightSnapshot:
        """The payload, as version `self.version`: the weights, or the model's file; in memory, unless it is large.

        Raises WeightsError when it is missing or damaged.
        """
        file = self.weight_file()
        if file.is_verified or file.has_index:
            file.verify()
            return file
        remedy = f"restore {self.location}/{self._file} from a copy, or register the model again"
        try:
            payload = file.path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{self._file} of {self.ref} cannot be read ({error}): {remedy}") from error
        snapshot = WeightSnapshot(self.version, payload, self.manifest.sha256, self.manifest.created_at)
        if not snapshot.is_intact:
            sizes = f"{len(payload)} bytes, {self.manifest.size_bytes} expected"
            problem = f"is damaged: the checksum does not match ({sizes})"
            raise WeightsError(f"{self._file} of {self.ref} {problem}: {remedy}")
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
        return INDEX_FILE if self.manifest.parts else get_payload_file(self.manifest.model.format)
