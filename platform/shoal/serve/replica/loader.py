"""Loading versions beside those that serve: in a thread of its own, one after the other.

Owned by the host. What it loads is the host's to use or to forget; what cannot be loaded is a reason, never a crash:
a version is built by code and weights of its user's, and the replica has others to serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import WeightsError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.messages.replica_report import truncate_reason
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StagingError(Exception):
    """A version cannot be served; the message says why."""


@dataclass(frozen=True)
class BuiltModel:
    """What a version's successors may be loaded with; it holds no weights."""

    predictor: Predictor
    factory: ModelFactory


@dataclass(frozen=True)
class StagedVersion:
    """A version, warm."""

    built: BuiltModel
    loaded: LoadedModel


class VersionLoader:
    """Loads versions of registered models."""

    def __init__(self, torch_threads: int) -> None:
        self._torch_threads = torch_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-stage")
        self._since_s: float | None = None  # when it began what it does now

    async def load_version(
        self,
        source: RegisteredModel,
        version: int,
        options: ModelOptions,
        signature: Signature | None,
        last: BuiltModel | None,
    ) -> StagedVersion:
        """Load one version. Raises StagingFailed.

        signature: that of the model as it is served; another one is refused
        last:      what the version before was loaded with; its predictor serves again when the model is built in the
                   same way, and its answer to an example is what this version is measured by
        """

        def load() -> StagedVersion:
            package = source.load_package(version)
            if signature is not None and package.signature != signature:
                raise WeightsError("it takes or gives other tensors than what is served: deploy it by another name")
            return self._load(package, options, last)

        return await self._run(f"version {version} of {source.name!r}", load)

    async def build_predictor(self, factory: ModelFactory, signature: Signature, options: ModelOptions) -> Predictor:
        """A predictor without a version. Raises StagingFailed."""
        return await self._run(factory.factory, lambda: Predictor(factory, signature, options, self._torch_threads))

    @property
    def busy_s(self) -> float:
        """How long it has been at one version."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Start nothing more; what is being loaded is not waited for. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        def timed() -> T:
            self._since_s = time.monotonic()
            try:
                return work()
            finally:
                self._since_s = None

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        except (Exception, SystemExit) as error:  # also what a model's module does where it is imported
            logger.exception("%s cannot be staged", what)
            raise StagingError(truncate_reason(f"{type(error).__name__}: {error}")) from error

    def _load(self, package: ModelPackage, options: ModelOptions, last: BuiltModel | None) -> StagedVersion:
        assert package.snapshot is not None
        if last is not None and last.factory == package.factory:
            predictor = last.predictor
        else:
            before = None if last is None else last.predictor
            predictor = Predictor(package.factory, package.signature, options, self._torch_threads, before)
        predictor.set_torch_threads()
        return StagedVersion(BuiltModel(predictor, package.factory), predictor.load(package.snapshot))
