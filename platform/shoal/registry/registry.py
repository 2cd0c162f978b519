"""Models by name and version, immutable once registered, and aliases for versions.

    NAME/VERSION/claim.json       the first object of a version: the process that creates it has the number
    NAME/VERSION/weights.safetensors
    NAME/VERSION/files/           further files, such as those of a tokenizer
    NAME/VERSION/manifest.json    the last one: with it the version is there
    NAME/aliases.json             changed by conditional writes

A model that is a single file (torch.export, TorchScript, ONNX) has model.pt2, model.pt or model.onnx in place of the
weights. Weights of several files have Hugging Face's names: model-00001-of-00003.safetensors and so on, with
model.safetensors.index.json. The objects lie in `registry` of `$SHOAL_STORE`, else of `$SHOAL_HOME`. No rename and no
lock is relied on.

Called by jobs that register trained models, by endpoints, and by the CLI. Any number of processes may read and write at
once: a version appears complete or not at all, and never changes. Never runs or builds a model.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from shoal.atomic_file import log_unknown_fields, require_known_format
from shoal.errors import ConfigError, RegistryError, StoreError, suggest
from shoal.registry.aliases import FORMAT as ALIASES_FORMAT
from shoal.registry.aliases import (
    NAME,
    Aliases,
    AliasMove,
    is_twin,
    require_alias,
    require_aliases,
    require_name,
    split_ref,
)
from shoal.registry.champion import CHAMPION, Criterion, judge_champion
from shoal.registry.manifest import FORMAT as MANIFEST_FORMAT
from shoal.registry.manifest import Manifest, ManifestPart, ModelFactory, Signature
from shoal.registry.model_format import INDEX_FILE, find_format, get_payload_file
from shoal.registry.verification import find_load_error
from shoal.registry.version import FILES, ModelVersion
from shoal.store import Entry, KeyTaken, open_store, store_url, update
from shoal.weights import WeightFile, WeightSnapshot

_CLAIM = "claim.json"
_MANIFEST = "manifest.json"
_ALIASES = "aliases.json"
LEFTOVER_S = 24 * 3600.0  # an incomplete version that old, by the store's clock, has no writer


@contextmanager
def _convert_os_errors() -> Iterator[None]:
    """Raise RegistryError for an error of the disk (full, not permitted or read-only) or of the store."""
    try:
        yield
    except StoreError as error:
        raise RegistryError(f"the registry cannot be read or written: {error}") from error
    except OSError as error:
        remedy = "give this user the right to it, or free disk space"
        raise RegistryError(f"the registry cannot be read or written ({error}): {remedy}") from error


class Registry:
    """The models below `location`, a folder or a URL (`registry` of `$SHOAL_STORE` or `$SHOAL_HOME` when None).

    A reference is `name@3`, `name@champion`, or `name` for the newest version. All methods raise RegistryError for an
    error of the disk or of the store.
    """

    @_convert_os_errors()
    def __init__(self, location: str | Path | None = None) -> None:
        self.store = open_store(f"{store_url()}/registry" if location is None else location)
        self._manifests: dict[tuple[str, int], Manifest] = {}  # read before: they never change

    @property
    def location(self) -> str:
        """The folder or URL, which another process may open."""
        return self.store.url

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
        files: Mapping[str, bytes] = MappingProxyType({}),
        example: Mapping[str, object] = MappingProxyType({}),
        aliases: Sequence[str] | None = None,
        criterion: Criterion | None = None,
        scores: Mapping[int, float] = MappingProxyType({}),
        problem: str = "",
    ) -> ModelVersion:
        """Add the next version of `name`, and point `aliases` at it. The snapshot's payload is of the model's format.
        Of a WeightFile no file is read whole.

        files:     further ones of the version, by name, without folders
        example:   a row of a request, for those who try it
        aliases:   those that name it from now on; (): none does; None: `champion`, if there is none, or it is better by
                   `criterion` and `scores` (see `judge_champion`). The version's `decision` says which it is
        problem:   why an endpoint would refuse it, where that is known. Else another process builds a version with code
                   of the user's, or with weights that are not finite, and lets it answer an example. A version with a
                   `problem` is not the `champion`

        The number of a removed version, or of a killed registration, is not used again. Raises ConfigError for an
        invalid name, alias or format and for a name that differs from another's in capitals alone, WeightsError for a
        damaged snapshot, RegistryError when it cannot be written. An interrupted call leaves no version.
        """
        require_name("name", name)
        require_aliases(tuple(aliases or ()))
        find_format(model.format)
        snapshot.check() if model.format == "module" else snapshot.verify()  # rejects damage now
        try:
            self.require_distinct_name("name", name)
            version = self._claim_number(name)
            parts, contents = _list_contents(snapshot, get_payload_file(model.format))
            manifest = Manifest(
                format=MANIFEST_FORMAT if parts else 1,
                name=name, version=version, created_at=time.time(),
                run_id=run_id, weights_version=snapshot.version,
                sha256=snapshot.sha256,
                size_bytes=snapshot.size_bytes,
                parts=parts,
                model=model.with_code(),
                signature=signature,
                metrics=dict(metrics or {}), data=dict(data or {}), lineage=dict(lineage or {}), example=dict(example),
                files={each: hashlib.sha256(content).hexdigest() for each, content in files.items()},
            )  # fmt: skip
            contents |= {f"{FILES}/{each}": content for each, content in files.items()}
            with self._undo_on_failure(name, version, contents):
                for file, content in contents.items():
                    self.store.write(f"{name}/{version}/{file}", content)
                described = manifest.model_dump_json(indent=2, exclude=None if parts else {"parts"})
                self.store.create(f"{name}/{version}/{_MANIFEST}", described.encode())  # the last one
                problem = problem or self._verify(manifest, snapshot)
                decision = self._promote_new(manifest, aliases, problem, criterion, scores)
        except OSError as error:
            raise RegistryError(f"{name!r} cannot be registered in {self.location}: {error}") from error
        return replace(self.get(f"{name}@{version}"), decision=decision, problem=problem)

    def _verify(self, new: Manifest, snapshot: WeightSnapshot) -> str:
        """Why an endpoint would refuse a new version; "" where it would not, or was not tried."""
        suspect = snapshot.find_not_finite() if new.model.format == "module" else ""
        version = ModelVersion(new.name, new.version, new, (), self.store)
        return find_load_error(version, suspect, with_code=True)

    def _promote_new(
        self,
        new: Manifest,
        aliases: Sequence[str] | None,
        problem: str,
        criterion: Criterion | None,
        scores: Mapping[int, float],
    ) -> str:
        """Move the aliases of a new version; returns what became of the champion, "" where that was not asked."""
        decision = ""

        def promote(now: Aliases) -> Aliases:
            nonlocal decision
            moved: Sequence[str] = aliases if aliases is not None else ()
            if problem:
                champion, moved = now.target(CHAMPION), [each for each in moved if each != CHAMPION]
                head = f"champion stays {champion}" if champion else "there is no champion"
                decision = f"{head}: an endpoint would refuse {new.version}: {problem}"
            elif aliases is None:
                becomes, decision = judge_champion(new, self._find_champion(new.name, now), criterion, scores)
                moved = (CHAMPION,) if becomes else ()
            return now.with_version(new.version).with_promotion(new.version, moved, time.time())

        self._update_aliases(new.name, promote)
        return decision

    def _find_champion(self, name: str, now: Aliases) -> Manifest | None:
        """None without any, or where it cannot be read."""
        version = now.target(CHAMPION)
        if version is None or version in now.removed:
            return None
        with suppress(RegistryError):
            return self._load_version(name, version, now).manifest
        return None

    @_convert_os_errors()
    def get(self, ref: str) -> ModelVersion:
        """Find the version of `ref`. Raises RegistryError, with a list of the present ones, when there is none."""
        name, word = split_ref(ref)
        aliases, versions = self._find_versions(name)
        version = _resolve_version(word, versions, aliases)
        if version is None:
            known = ", ".join([f"versions {versions[0]} to {versions[-1]}", *sorted(aliases.moves)])
            if (gone := aliases.target(word)) is not None:
                remedy = f"`shoal models promote {name}@N --alias {word}` points it at another; it has {known}"
                raise RegistryError(f"{name}@{word} means version {gone}, which was removed: {remedy}")
            near = suggest(word, aliases.moves)
            raise RegistryError(f"{name!r} has no {word!r}: it has {known}{near and f'; {near}'}")
        return self._load_version(name, version, aliases)

    @_convert_os_errors()
    def has(self, ref: str) -> bool:
        """Whether `ref` has a version now."""
        name, word = split_ref(ref)
        aliases = self._read_aliases(name)
        return _resolve_version(word, self._list_versions(name, aliases), aliases) is not None

    @_convert_os_errors()
    def list(self, name: str | None = None) -> tuple[ModelVersion, ...]:
        """Every version of `name`, or of every model, oldest first. Raises RegistryError when `name` is unknown."""
        result: Sequence[ModelVersion] = ()
        for each in self._list_names() if name is None else [name]:
            aliases, versions = self._find_versions(each)
            result = [*result, *(self._load_version(each, version, aliases) for version in versions)]
        return tuple(result)

    @_convert_os_errors()
    def promote(self, ref: str, alias: str = "champion") -> ModelVersion:
        """Point `alias` at the version of `ref`; no move when it is there already. Raises RegistryError."""
        require_alias(alias)
        result = self.get(ref)

        def promote(now: Aliases) -> Aliases:
            if result.version in now.removed:
                raise RegistryError(f"{result.ref} was removed: `shoal models list` shows what there is")
            return now.with_promotion(result.version, [alias], time.time())

        self._update_aliases(result.name, promote)
        return self.get(result.ref)

    @_convert_os_errors()
    def rollback(self, name: str, alias: str = "champion", *, without: Collection[int] = ()) -> ModelVersion:
        """Point `alias` at its version before the last promotion that is not withdrawn. Raises RegistryError when there
        is none.

        without: further versions that are passed over
        """
        self._find_versions(name)

        def roll_back(now: Aliases) -> Aliases:
            stack = now.list_promoted(alias)
            before = [version for version in stack[:-1] if version not in (stack[-1], *without)]
            if not before:
                state = f"is {name}@{stack[-1]}, with no version to go back to" if stack else "was never promoted"
                remedy = f"choose a version with `shoal models promote {name}@N --alias {alias}`"
                raise RegistryError(f"{name}@{alias} {state}: {remedy}")
            if before[-1] not in self._list_versions(name, now):
                remedy = f"`shoal models promote {name}@N --alias {alias}` points it at another"
                raise RegistryError(f"{name}@{alias} meant version {before[-1]} before, which was removed: {remedy}")
            return now.with_move(alias, AliasMove(version=before[-1], time=time.time(), kind="rollback"))

        self._update_aliases(name, roll_back)
        return self.get(f"{name}@{alias}")

    @_convert_os_errors()
    def remove(self, ref: str) -> None:
        """Remove one version, or of a `ref` without a version the whole model; their numbers are not used again.

        Raises RegistryError for a version that an alias names, and for the base of others that stay.
        """
        name, _ = split_ref(ref)
        is_one = "@" in ref  # also for `name@latest`, which has no word
        versions = [self.get(ref).version] if is_one else self._find_versions(name)[1]
        self.require_no_dependents([f"{name}@{version}" for version in versions])

        def mark_removed(now: Aliases) -> Aliases:
            """From then on no version can be promoted, and none is seen."""
            if is_one and (names := now.list_names(versions[0])):
                remedy = f"`shoal models promote {name}@N --alias {names[0]}` moves it"
                whole = f"`shoal models rm {name}` removes all"
                raise RegistryError(f"{name}@{versions[0]} is {' and '.join(names)}: {remedy}, {whole}")
            return now.with_removal(versions, keep_moves=is_one)

        self._update_aliases(name, mark_removed)
        self._delete_versions(name, versions)

    @_convert_os_errors()
    def find_dependents(self) -> Mapping[str, Sequence[str]]:
        """By the reference of a base, the versions whose lineage names it: without it they cannot be loaded."""
        result: dict[str, list[str]] = defaultdict(list)
        for entry in self.store.list_entries():
            place = _split_key(entry.key)
            if place is None or entry.key != f"{place[0]}/{place[1]}/{_MANIFEST}":
                continue
            with suppress(RegistryError):  # one that is damaged cannot be loaded at all
                made = self._load_version(*place, Aliases())
                base = made.manifest.lineage.get("base")
                if isinstance(base, str) and made.version not in self._read_aliases(made.name).removed:
                    result[base].append(made.ref)
        return result

    def require_no_dependents(self, refs: Sequence[str]) -> None:
        """Check that only versions among `refs` have one of them as their base. Raises RegistryError."""
        dependents = self.find_dependents()
        for ref in refs:
            if needing := [each for each in dependents.get(ref, ()) if each not in refs]:
                problem = f"{ref} is the base of {' and '.join(needing)}, which cannot be loaded without it"
                raise RegistryError(f"{problem}: first remove them, by `shoal models rm {' '.join(needing)}`")

    @_convert_os_errors()
    def remove_leftovers(self) -> None:
        """Remove what interrupted registrations and removals left a day ago.

        A bucket may also have parts of interrupted uploads, which no listing shows: a rule of its provider removes them
        (docs/store.md).
        """
        entries = self.store.list_entries()
        newest_s = max((entry.modified_s for entry in entries), default=0.0)
        found: dict[tuple[str, int], list[Entry]] = defaultdict(list)
        for entry in entries:
            if (place := _split_key(entry.key)) is not None:
                found[place].append(entry)
        for (name, version), parts in found.items():
            is_complete = any(part.key.endswith(f"/{_MANIFEST}") for part in parts)
            is_old = max(part.modified_s for part in parts) < newest_s - LEFTOVER_S
            is_removed = is_complete and version in self._read_aliases(name).removed
            if is_removed or (not is_complete and is_old):
                self._delete_versions(name, [version])
        self.store.remove_drafts(LEFTOVER_S)

    @_convert_os_errors()
    def aliases(self, name: str) -> Aliases:
        """Every alias of `name` with its history. Raises RegistryError when the model is unknown."""
        return self._find_versions(name)[0]

    @_convert_os_errors()
    def require_distinct_name(self, field: str, name: str) -> None:
        """Check that no other model's name differs in capitals alone: a file system without them, on which the registry
        may be, would mix up the two. Raises ConfigError for such a name, or an invalid one."""
        require_name(field, name)
        if twin := [other for other in self.store.list_folders() if other != name and is_twin(other, name)]:
            remedy = f"add a version to {twin[0]!r}, or choose another name"
            raise ConfigError(field, name, f"differs from the model {twin[0]!r} in capitals alone", remedy)

    def _find_versions(self, name: str) -> tuple[Aliases, Sequence[int]]:
        """The aliases of a model, and then its versions: an alias only moves to a present one."""
        require_name("name", name)
        aliases = self._read_aliases(name)
        if versions := self._list_versions(name, aliases):
            return aliases, versions
        names = self._list_names()
        remedy = suggest(name, names, "`shoal models list` shows what there is", most=3)
        raise RegistryError(f"there is no model {name!r}: {remedy}")

    def _list_names(self) -> Sequence[str]:
        return [
            name
            for name in self.store.list_folders()
            if NAME.fullmatch(name) and self._list_versions(name, self._read_aliases(name))
        ]

    def _list_versions(self, name: str, aliases: Aliases) -> Sequence[int]:
        """The complete versions that were not removed, in order."""
        ends_complete = re.compile(rf"{re.escape(name)}/(\d+)/{re.escape(_MANIFEST)}")
        keys = (ends_complete.fullmatch(entry.key) for entry in self.store.list_entries(name))
        return sorted({int(match[1]) for match in keys if match} - set(aliases.removed))

    def _load_version(self, name: str, version: int, aliases: Aliases) -> ModelVersion:
        manifest = self._manifests.get((name, version))
        if manifest is None:
            manifest = self._manifests[name, version] = self._read_manifest(name, version)
        return ModelVersion(name, version, manifest, aliases.list_names(version), self.store)

    def _read_manifest(self, name: str, version: int) -> Manifest:
        path = f"{self.location}/{name}/{version}/{_MANIFEST}"
        try:
            values = json.loads(self.store.read(f"{name}/{version}/{_MANIFEST}"))
            require_known_format(path, values, MANIFEST_FORMAT, RegistryError)
            return Manifest.parse_known(values, path)
        except (OSError, ValueError) as error:
            remedy = "restore it from a copy, or remove its folder"
            raise RegistryError(f"{path} cannot be read ({error}): {remedy}") from error

    def _read_aliases(self, name: str) -> Aliases:
        try:
            return self._parse_aliases(name, self.store.read(f"{name}/{_ALIASES}"))
        except (FileNotFoundError, NotADirectoryError):
            return Aliases()

    def _parse_aliases(self, name: str, payload: bytes | None) -> Aliases:
        if payload is None:
            return Aliases()
        path = f"{self.location}/{name}/{_ALIASES}"
        try:
            values = json.loads(payload)
            require_known_format(path, values, ALIASES_FORMAT, RegistryError)
            result = Aliases.parse(values)
        except ValueError as error:
            remedy = "restore it from a copy, or remove it and promote"
            raise RegistryError(f"{path} cannot be read ({error}): {remedy}") from error
        log_unknown_fields(path, result.model_extra or ())
        return result

    def _update_aliases(self, name: str, change: Callable[[Aliases], Aliases]) -> None:
        def change_payload(payload: bytes | None) -> bytes | None:
            now = self._parse_aliases(name, payload)
            changed = change(now)
            return None if changed == now else changed.model_dump_json(indent=2).encode()

        update(self.store, f"{name}/{_ALIASES}", change_payload)

    def _claim_number(self, name: str) -> int:
        """The number of a new version, which no other process gets."""
        folders = [int(folder) for folder in self.store.list_folders(name) if folder.isdigit()]
        version = max([self._read_aliases(name).newest, *folders])
        claim = json.dumps({"token": secrets.token_hex(8), "time": time.time()}).encode()
        while True:
            version += 1
            with suppress(KeyTaken):
                self.store.create(f"{name}/{version}/{_CLAIM}", claim)
                return version

    @contextmanager
    def _undo_on_failure(self, name: str, version: int, files: Iterable[str]) -> Iterator[None]:
        """Remove a version that is not registered in the end: it takes space, which may be short."""
        try:
            yield
        except BaseException:
            with suppress(OSError, RegistryError):
                if not self._read_aliases(name).has_named(version):
                    self.store.delete([f"{name}/{version}/{each}" for each in (_MANIFEST, *files)])
            raise

    def _delete_versions(self, name: str, versions: Sequence[int]) -> None:
        """The manifest first: without it there is no version. The claim stays, and with it the number is taken."""
        for version in versions:
            self.store.delete([f"{name}/{version}/{_MANIFEST}"])
            parts = [entry.key for entry in self.store.list_entries(f"{name}/{version}")]
            self.store.delete([key for key in parts if not key.endswith(f"/{_CLAIM}")])
            self._manifests.pop((name, version), None)


def _list_contents(snapshot: WeightSnapshot, file: str) -> tuple[list[ManifestPart], dict[str, bytes | Path]]:
    """The parts of weights that are several files, and what is to be written by its name: the index last."""
    if not isinstance(snapshot, WeightFile):
        return [], {file: snapshot.payload}
    if not snapshot.has_index:
        return [], {file: snapshot.find(snapshot.index)}
    result = [
        ManifestPart(file=part.path.name, sha256=part.sha256, size_bytes=snapshot.find(part).stat().st_size)
        for part in snapshot.parts
    ]
    contents: dict[str, bytes | Path] = {part.path.name: snapshot.find(part) for part in snapshot.parts}
    return result, {**contents, INDEX_FILE: snapshot.find(snapshot.index)}


def _resolve_version(selector: str, versions: Sequence[int], aliases: Aliases) -> int | None:
    """Resolve the text after the @ to a version; None when there is none."""
    if not selector:
        return versions[-1] if versions else None
    version = int(selector) if selector.isdigit() else aliases.target(selector)
    return version if version in versions else None


def _split_key(key: str) -> tuple[str, int] | None:
    """The name and version of an object of a version."""
    name, _, rest = key.partition("/")
    folder, separator, _ = rest.partition("/")
    return (name, int(folder)) if separator and folder.isdigit() else None
