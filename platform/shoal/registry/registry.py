"""Models by name and version, immutable once registered, and aliases for versions.

    NAME/VERSION/manifest.json, weights.safetensors      NAME/aliases.json      (in $SHOAL_HOME/registry)

A model that is a single file (torch.export, TorchScript, ONNX) has model.pt2, model.pt or model.onnx in their place.

Called by jobs that register trained models, by endpoints, and by the CLI. Any number of processes may read and write at
once: a version appears complete or not at all, and never changes. Never runs or builds a model.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from shoal.atomic_file import (
    describe_newer_format,
    is_newer_format,
    log_unknown_fields,
    make_folder,
    replace_synced,
    sync_folder,
    write_synced,
)
from shoal.errors import ConfigError, RegistryError, WeightsError
from shoal.home import file_lock, home
from shoal.registry.aliases import FORMAT as ALIASES_FORMAT
from shoal.registry.aliases import Aliases, AliasMove
from shoal.registry.manifest import FORMAT as MANIFEST_FORMAT
from shoal.registry.manifest import Manifest, ModelFactory, Signature
from shoal.registry.model_format import find_format, get_payload_file
from shoal.weights import WeightFile, WeightSnapshot

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_INCOMING, _REMOVED = ".incoming", ".removed"
_REGISTERING = ".registering"  # locked while a version is written; aliases can move meanwhile
_CREATING = ".creating"  # of all models, locked while one gets its folder


@dataclass(frozen=True)
class ModelVersion:
    """One registered version. `aliases` are those that named it at the look-up."""

    name: str
    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    folder: Path

    @property
    def ref(self) -> str:
        """The exact reference: name@version."""
        return f"{self.name}@{self.version}"

    def weight_file(self) -> WeightFile:
        """The payload, unread and unchecked."""
        path, manifest = self.folder / get_payload_file(self.manifest.model.format), self.manifest
        return WeightFile(self.version, path, manifest.sha256, manifest.created_at)

    def snapshot(self) -> WeightSnapshot:
        """The payload, as version `self.version`: the weights, or the model's file.

        Raises WeightsError when it is missing or damaged.
        """
        path = self.folder / get_payload_file(self.manifest.model.format)
        remedy = f"restore {path} from a copy, or register the model again"
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{path.name} of {self.ref} cannot be read ({error}): {remedy}") from error
        snapshot = WeightSnapshot(self.version, payload, self.manifest.sha256, self.manifest.created_at)
        if not snapshot.is_intact:
            expected = self.manifest.size_bytes
            raise WeightsError(
                f"{path.name} of {self.ref} is damaged: the checksum does not match"
                f" ({len(payload)} bytes, {expected} expected): {remedy}"
            )
        return snapshot


@contextmanager
def _convert_os_errors() -> Iterator[None]:
    """Raise RegistryError for an error of the disk (full, not permitted or read-only)."""
    try:
        yield
    except OSError as error:
        remedy = "give this user the right to it, or free disk space"
        raise RegistryError(f"the registry cannot be read or written ({error}): {remedy}") from error


class Registry:
    """The models under `root` (`$SHOAL_HOME/registry` when None).

    A reference is `name@3`, `name@champion`, or `name` for the newest version. All methods raise RegistryError for an
    error of the disk.
    """

    @_convert_os_errors()
    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else home() / "registry"
        make_folder(self.root)

    def register(
        self,
        name: str,
        snapshot: WeightSnapshot,
        *,
        model: ModelFactory,
        signature: Signature,
        run_id: str | None = None,
        metrics: Mapping[str, float] | None = None,
        data: Mapping[str, str] | None = None,
        lineage: Mapping[str, object] | None = None,
        aliases: Sequence[str] = ("champion",),
    ) -> ModelVersion:
        """Add the next version of `name`, and point `aliases` at it. The snapshot's payload is of the model's format.

        The number of a removed version is not used again, so that the two cannot be confused. Raises ConfigError for an
        invalid name, alias or format and for a name that differs from another's in capitals alone, WeightsError for a
        damaged snapshot, RegistryError when it cannot be written. An interrupted call leaves no version.
        """
        require_name("name", name)
        _require_aliases(tuple(aliases))
        find_format(model.format)
        check = snapshot.check if model.format == "module" else snapshot.verify
        check()  # rejects damage now instead of when the model is served
        folder = self.root / name
        try:
            with lock_folder(self.root, _CREATING):
                self.require_distinct_name("name", name)
                make_folder(folder)
            with lock_folder(folder, _REGISTERING):
                manifest = Manifest(
                    name=name,
                    version=max([_read_aliases(folder).find_highest_version(), *_versions_in(folder)]) + 1,
                    created_at=time.time(),
                    run_id=run_id,
                    weights_version=snapshot.version,
                    sha256=snapshot.sha256,
                    size_bytes=len(snapshot.payload),
                    model=model,
                    signature=signature,
                    metrics=dict(metrics or {}),
                    data=dict(data or {}),
                    lineage=dict(lineage or {}),
                )
                try:
                    incoming = _write_version(folder, manifest, snapshot.payload)
                    with lock_folder(folder):
                        _publish_version(folder, incoming, manifest.version, aliases)
                finally:  # an incomplete version takes disk space, which may be short
                    shutil.rmtree(folder / _INCOMING, ignore_errors=True)
        except OSError as error:
            raise RegistryError(f"{name!r} cannot be registered in {self.root}: {error}") from error
        return self.get(f"{name}@{manifest.version}")

    @_convert_os_errors()
    def get(self, ref: str) -> ModelVersion:
        """Find the version of `ref`. Raises RegistryError, with a list of the present ones, when there is none."""
        name, word = split_ref(ref)
        folder = self._find_folder(name)
        aliases = _read_aliases(folder)  # before the versions: an alias only moves to a present one
        versions = _versions_in(folder)
        version = _resolve_version(word, versions, aliases)
        if version is None:
            known = ", ".join([f"versions {versions[0]} to {versions[-1]}", *sorted(aliases.moves)])
            if (gone := aliases.target(word)) is not None:
                remedy = f"`shoal models promote {name}@N --alias {word}` points it at another; it has {known}"
                raise RegistryError(f"{name}@{word} means version {gone}, which was removed: {remedy}")
            raise RegistryError(f"{name!r} has no {word!r}: it has {known}")
        return _load_version(folder, version, aliases)

    @_convert_os_errors()
    def has(self, ref: str) -> bool:
        """Whether `ref` has a version now."""
        name, word = split_ref(ref)
        aliases = _read_aliases(self.root / name)
        return _resolve_version(word, _versions_in(self.root / name), aliases) is not None

    @_convert_os_errors()
    def list(self, name: str | None = None) -> tuple[ModelVersion, ...]:
        """Every version of `name`, or of every model, oldest first. Raises RegistryError when `name` is unknown."""
        found: Sequence[ModelVersion] = ()
        for folder in [self.root / each for each in self._names()] if name is None else [self._find_folder(name)]:
            aliases = _read_aliases(folder)
            found = [*found, *(_load_version(folder, version, aliases) for version in _versions_in(folder))]
        return tuple(found)

    @_convert_os_errors()
    def promote(self, ref: str, alias: str = "champion") -> ModelVersion:
        """Point `alias` at the version of `ref`; no move when it is there already. Raises RegistryError."""
        require_alias(alias)
        found = self.get(ref)
        with lock_folder(found.folder.parent):
            before = _read_aliases(found.folder.parent)
            moved = before.with_promotion(found.version, [alias], time.time())
            if moved is not before:
                _write_aliases(found.folder.parent, moved)
        return self.get(found.ref)

    @_convert_os_errors()
    def rollback(self, name: str, alias: str = "champion") -> ModelVersion:
        """Point `alias` at its version before the last promotion. Raises RegistryError when there is none."""
        folder = self._find_folder(name)
        with lock_folder(folder):
            aliases = _read_aliases(folder)
            stack = aliases.list_promoted(alias)
            if len(stack) < 2:
                now = f"is {name}@{stack[0]}, with no version to go back to" if stack else "was never promoted"
                remedy = f"choose a version with `shoal models promote {name}@N --alias {alias}`"
                raise RegistryError(f"{name}@{alias} {now}: {remedy}")
            if stack[-2] not in _versions_in(folder):
                remedy = f"`shoal models promote {name}@N --alias {alias}` points it at another"
                raise RegistryError(f"{name}@{alias} meant version {stack[-2]} before, which was removed: {remedy}")
            _write_aliases(
                folder, aliases.with_move(alias, AliasMove(version=stack[-2], time=time.time(), kind="rollback"))
            )
        return self.get(f"{name}@{alias}")

    @_convert_os_errors()
    def remove(self, ref: str) -> None:
        """Remove one version, or of a `ref` without a version the whole model; their numbers are not used again.

        Raises RegistryError for a version that an alias names.
        """
        name, _ = split_ref(ref)
        folder, is_one = self._find_folder(name), "@" in ref  # also for `name@latest`, which has no word
        with lock_folder(folder):
            found = [self.get(ref).version] if is_one else _versions_in(folder)
            aliases = _read_aliases(folder)
            if is_one and (names := aliases.list_names(found[0])):
                remedy = (
                    f"`shoal models promote {name}@N --alias {names[0]}` moves it, `shoal models rm {name}` removes all"
                )
                raise RegistryError(f"{name}@{found[0]} is {' and '.join(names)}: {remedy}")
            moves = aliases.moves if is_one else {}
            newest = max([aliases.find_highest_version(), *found])
            _write_aliases(folder, aliases.model_copy(update={"moves": moves, "newest": newest}))
            for version in found:  # in one step, whatever readers see meanwhile
                shutil.rmtree(folder / _REMOVED, ignore_errors=True)
                (folder / str(version)).rename(folder / _REMOVED)
            shutil.rmtree(folder / _REMOVED, ignore_errors=True)

    @_convert_os_errors()
    def remove_leftovers(self) -> None:
        """Remove what interrupted registrations and removals left."""
        for folder in filter(Path.is_dir, self.root.iterdir()):
            with lock_folder(folder, _REGISTERING), lock_folder(folder):
                for draft in (_INCOMING, _REMOVED):
                    shutil.rmtree(folder / draft, ignore_errors=True)

    @_convert_os_errors()
    def aliases(self, name: str) -> Aliases:
        """Every alias of `name` with its history. Raises RegistryError when the model is unknown."""
        return _read_aliases(self._find_folder(name))

    @_convert_os_errors()
    def require_distinct_name(self, field: str, name: str) -> None:
        """Check that no other model's name differs in capitals alone: a file system without them, on which the registry
        may be, would mix up the two. Raises ConfigError for such a name, or an invalid one."""
        require_name(field, name)
        if twin := [path.name for path in self.root.iterdir() if path.name != name and _is_twin(path.name, name)]:
            remedy = f"add a version to {twin[0]!r}, or choose another name"
            raise ConfigError(field, name, f"differs from the model {twin[0]!r} in capitals alone", remedy)

    def _names(self) -> Sequence[str]:
        return sorted(path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name) and _versions_in(path))

    def _find_folder(self, name: str) -> Path:
        require_name("name", name)
        if _versions_in(self.root / name):
            return self.root / name
        names = self._names()
        near = [each for each in names if _is_twin(each, name)] or difflib.get_close_matches(name, names, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "`shoal models list` shows what there is"
        raise RegistryError(f"there is no model {name!r}: {remedy}")


def split_ref(ref: str) -> tuple[str, str]:
    """Split `name@3` or `name@champion` into name and version or alias; the second is empty for `name` and
    `name@latest`.

    Raises ConfigError for an invalid reference.
    """
    name, separator, word = ref.partition("@")
    require_name("model", name)
    if separator and not _ALIAS.fullmatch(word):
        raise ConfigError("model", ref, "is not a model reference", "write name@3, name@champion, or name")
    return name, "" if word == "latest" else word


def _resolve_version(selector: str, versions: Sequence[int], aliases: Aliases) -> int | None:
    """Resolve the text after the @ to a version; None when there is none."""
    if not selector:
        return versions[-1] if versions else None
    version = int(selector) if selector.isdigit() else aliases.target(selector)
    return version if version in versions else None


def require_name(field: str, name: str) -> None:
    """Check a model's name early. Raises ConfigError for an invalid one."""
    if not _NAME.fullmatch(name):
        remedy = "use A-Z, a-z, 0-9, '.', '_' and '-', 128 at most, and begin with a letter or a digit"
        raise ConfigError(field, name, "is not a name", remedy)


def _is_twin(name: str, other: str) -> bool:
    return name.lower() == other.lower()


def require_alias(alias: str, field: str = "alias") -> None:
    """Check an alias early. Raises ConfigError for an invalid one."""
    if not _ALIAS.fullmatch(alias):
        remedy = "use a-z, 0-9, '.', '_' and '-', 128 at most, and begin with a-z or 0-9"
        raise ConfigError(field, alias, "is not a name", remedy)
    if alias.isdigit() or alias == "latest":
        raise ConfigError(
            field, alias, "is already a reference to a version", "choose a name, such as champion or candidate"
        )


def _require_aliases(aliases: tuple[str, ...]) -> tuple[str, ...]:
    for alias in aliases:
        require_alias(alias)
    return aliases


# A field of a spec: an invalid alias is rejected when the spec is read, not after the training.
AliasNames = Annotated[tuple[str, ...], AfterValidator(_require_aliases)]


def _versions_in(folder: Path) -> list[int]:
    """The versions in a model's folder, in order; none without the folder."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def _load_version(folder: Path, version: int, aliases: Aliases) -> ModelVersion:
    place = folder / str(version)
    return ModelVersion(folder.name, version, _read_manifest(place), aliases.list_names(version), place)


def _write_version(folder: Path, manifest: Manifest, payload: bytes) -> Path:
    """Write a version to a temporary folder, which the caller renames. The caller holds the registration lock, so an
    incomplete folder found here has no writer."""
    incoming = folder / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    make_folder(incoming)
    write_synced(incoming / get_payload_file(manifest.model.format), payload)
    write_synced(incoming / "manifest.json", manifest.model_dump_json(indent=2).encode())
    sync_folder(incoming)
    return incoming


def _publish_version(folder: Path, incoming: Path, version: int, aliases: Sequence[str]) -> None:
    """Publish a version and then its aliases, each in one step; when the second fails, the first is undone.

    Raises OSError, and RegistryError for aliases that cannot be read.
    """
    moves = _read_aliases(folder).with_version(version).with_promotion(version, aliases, time.time())
    place = folder / str(version)
    incoming.rename(place)
    try:
        sync_folder(folder)
        _write_aliases(folder, moves)
    except BaseException:  # also on an interrupt, which may come after the second step
        if _read_aliases(folder) != moves:
            place.rename(incoming)
        raise


def _read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    try:
        values = json.loads(path.read_text())
        _require_known_format(path, values, MANIFEST_FORMAT)
        return Manifest.parse_known(values, path)
    except (OSError, ValueError) as error:
        raise RegistryError(f"{path} cannot be read ({error}): restore it from a copy, or remove its folder") from error


def _read_aliases(folder: Path) -> Aliases:
    path = folder / "aliases.json"
    try:
        values = json.loads(path.read_text())
        _require_known_format(path, values, ALIASES_FORMAT)
        found = Aliases.parse(values)
        log_unknown_fields(path, found.model_extra or ())
        return found
    except FileNotFoundError:
        return Aliases()
    except (OSError, ValueError) as error:
        raise RegistryError(
            f"{path} cannot be read ({error}): restore it from a copy, or remove it and promote"
        ) from error


def _require_known_format(path: Path, values: object, known: int) -> None:
    if isinstance(values, dict) and is_newer_format(found := values.get("format"), known):
        raise RegistryError(describe_newer_format(path, found, known))


def _write_aliases(folder: Path, aliases: Aliases) -> None:
    replace_synced(folder / "aliases.json", aliases.model_dump_json(indent=2).encode())


LOCK_TIMEOUT_S = 60.0


def lock_folder(folder: Path, name: str = ".lock") -> AbstractContextManager[None]:
    """Keep every other holder of this lock, in this process or another, out; a killed holder lets go by dying.

    Raises RegistryError when it stays locked for LOCK_TIMEOUT_S.
    """
    busy = RegistryError(f"{folder} is being written by another process; try again")
    return file_lock(folder / name, LOCK_TIMEOUT_S, busy)
