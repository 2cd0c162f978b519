"""The sources of an endpoint's models: versions of the registry, or the published weights of a run.

`deploy` takes an `EndpointModel`. A live model's source is sent to the replicas; the controller's plan names the
versions of a registered one, which replicas load from the registry. With `Catalogue` the controller resolves and moves
an alias such as `champion`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.errors import RegistryError
from shoal.open_inference.episodes import EpisodeService
from shoal.registry import ModelFactory, Registry, Signature, split_ref
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot, WeightSource

LATEST = "latest"  # followed like an alias, which a promotion or rollback does not move
FOLLOW_S = 5.0  # between two looks at a bucket


@dataclass(frozen=True)
class ModelPackage:
    """A version: how to build the model, its signature, and its weights."""

    factory: ModelFactory
    signature: Signature
    snapshot: WeightSnapshot


@dataclass(frozen=True)
class RegisteredModel:
    """The versions of `name` in the registry at `registry`, a URL, or a folder that every replica can read."""

    name: str
    registry: str

    def load_package(self, version: int) -> ModelPackage:
        """Find a version: a program in memory, tensors as a file, which is verified when it is read.

        Raises RegistryError, WeightsError.
        """
        registered = Registry(self.registry).get(f"{self.name}@{version}")
        model = registered.manifest.model
        snapshot = registered.weight_file() if model.format == "module" else registered.snapshot()
        return ModelPackage(model, registered.manifest.signature, snapshot)


@dataclass(frozen=True)
class LiveModel:
    """A model whose weights follow `weights`, which must be picklable: each replica fetches the newest by itself.

    episodes: records what its users do, if it learns from them; picklable
    """

    factory: ModelFactory
    signature: Signature
    weights: WeightSource
    episodes: EpisodeService | None = None


@dataclass(frozen=True)
class EndpointModel:
    """One model of an endpoint.

    version: of a registered model: a number, an alias (which is followed), `latest` (the newest is followed), or "" for
             the newest now
    options: its options; None for those of the endpoint's spec
    """

    name: str
    source: RegisteredModel | LiveModel
    version: str = ""
    options: ModelOptions | None = field(default=None)


def model_from_ref(ref: str, options: ModelOptions | None = None) -> EndpointModel:
    """Parse `name@3`, `name@champion`, `name@latest` or `name` of the registry. Raises ConfigError for an invalid
    reference."""
    name, selector = split_ref(ref)
    selector = LATEST if ref == f"{name}@{LATEST}" else selector
    return EndpointModel(name, RegisteredModel(name, Registry().location), selector, options)


@dataclass
class _Followed:
    """What a reference in a bucket meant at `asked_s`, or why it could not be read then."""

    version: int
    asked_s: float
    error: RegistryError | None = None


class RegistryCatalogue:
    """The controller's view of the registry at a URL or folder. All methods raise RegistryError."""

    def __init__(self, location: str) -> None:
        self._registry = Registry(location)
        self._registry.store = self._registry.store.without_waiting()  # the endpoint serves on, and says why
        self._is_remote = self._registry.store.locate("") is None
        self._followed: dict[tuple[str, str], _Followed] = {}

    def resolve(self, name: str, selector: str) -> int:
        """The version to which `name@selector` resolves now."""
        return self._registry.get(f"{name}@{selector}" if selector else name).version

    def follow(self, name: str, selector: str) -> int:
        """The same for a caller that asks again and again: it never waits for a bucket, and hears of a move within
        seconds."""
        if not self._is_remote:
            return self.resolve(name, selector)
        key = name, selector
        if key not in self._followed:
            self._followed[key] = _Followed(self.resolve(*key), time.monotonic())
        followed = self._followed[key]
        if time.monotonic() - followed.asked_s > FOLLOW_S:
            followed.asked_s = math.inf  # until it is answered
            threading.Thread(target=self._ask, args=(key, followed), daemon=True).start()
        if followed.error is not None:
            raise followed.error
        return followed.version

    def _ask(self, key: tuple[str, str], followed: _Followed) -> None:
        try:
            followed.version, followed.error = self.resolve(*key), None
        except RegistryError as error:
            followed.error = error
        followed.asked_s = time.monotonic()

    def describe(self, name: str, version: int) -> tuple[Signature, int]:
        """A version's signature, and the bytes of its payload."""
        manifest = self._registry.get(f"{name}@{version}").manifest
        return manifest.signature, manifest.size_bytes

    def promote(self, name: str, version: int, alias: str) -> None:
        self._registry.promote(f"{name}@{version}", alias)

    def find_previous(self, name: str, alias: str, without: Collection[int]) -> int:
        """The version of the alias before its last promotion, none of these."""
        *before, now = self._registry.aliases(name).list_promoted(alias)
        if not (admitted := [version for version in before if version not in (now, *without)]):
            remedy = f"choose a version with `shoal models promote {name}@N --alias {alias}`"
            raise RegistryError(f"{name}@{alias} has no version to go back to: {remedy}")
        return admitted[-1]

    def rollback(self, name: str, alias: str, without: Collection[int]) -> None:
        """Point the alias at that version."""
        self._registry.rollback(name, alias, without=without)
