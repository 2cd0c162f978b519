"""Loads versions alongside those that serve, in threads of its own: one after the other, or models in parallel.

Owned by the model manager, which uses or drops the loaded versions. A version that cannot be loaded yields a reason,
never a crash: its code and weights are the user's, and the replica has other models to serve.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from shoal.errors import WeightsError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.registry.model_code import require_installed
from shoal.serve.messages.model_errors import OTHER_TENSORS
from shoal.serve.messages.replica_report import truncate_reason
from shoal.serve.model.predictor import LoadedModel, OpenTemplate, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
from shoal.weights import WeightFile

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StagingError(Exception):
    """A version cannot be served; the message has the reason."""


@dataclass(frozen=True)
class StagedVersion:
    """A loaded and warm version, and how long that took."""

    predictor: Predictor
    loaded: LoadedModel
    load_s: float


class VersionLoader:
    """Loads versions of registered models: `num_threads` at a time, of one model one.

    share:     opens the templates of models that several workers share; None for those of this process
    code:      see `EndpointSpec`
    num_alike: so many predictors are kept for other models that are built alike, the last used ones: a load then costs
               little more than its weights
    """

    def __init__(
        self,
        torch_threads: int,
        share: OpenTemplate | None = None,
        code: Literal["stored", "installed"] = "stored",
        num_threads: int = 1,
        num_alike: int = 0,
    ) -> None:
        self._torch_threads = torch_threads
        self._share = share
        self._code = code
        self._threads = ThreadPoolExecutor(num_threads, "shoal-stage")
        self._alike: deque[Predictor] = deque(maxlen=num_alike)
        self._alike_lock = threading.Lock()  # threads search and change them
        self._since_s: dict[object, float] = {}  # when each current load began
        self._locks: dict[str, asyncio.Lock] = {}  # versions of a model share its template

    async def load_version(
        self, source: RegisteredModel, version: int, options: ModelOptions, last: Predictor | None
    ) -> StagedVersion:
        """Load one version. Raises StagingError.

        last: of the previous version: it is reused when the model is built in the same way, with the same options;
              another signature is refused, and this version must answer an example if that one did
        """

        def load() -> StagedVersion:
            since_s = time.monotonic()
            package = source.load_package(version)
            if self._code == "installed":
                require_installed(package.factory.model_dump())
            if last is not None and package.signature != last.signature:
                before, after = ([*each.inputs, *each.outputs] for each in (last.signature, package.signature))
                unlike = dict.fromkeys(each.name for each in before + after if each not in before or each not in after)
                raise WeightsError(f"{OTHER_TENSORS} (not alike: {', '.join(unlike) or 'their order'})")
            return StagedVersion(*self._load(package, options, last), time.monotonic() - since_s)

        async with self._locks.setdefault(source.name, asyncio.Lock()):
            return await self._run(f"version {version} of {source.name!r}", load)

    async def build_predictor(self, factory: ModelFactory, signature: Signature, options: ModelOptions) -> Predictor:
        """Build a predictor without a version. Raises StagingError."""
        return await self._run(factory.factory, lambda: Predictor(factory, signature, options, self._torch_threads))

    @property
    def longest_load_s(self) -> float:
        return max((time.monotonic() - since_s for since_s in self._since_s.copy().values()), default=0.0)

    @contextmanager
    def time_load(self) -> Iterator[None]:
        """Count what runs within as a load, also one of a run's version in another thread."""
        load = object()
        self._since_s[load] = time.monotonic()
        try:
            yield
        finally:
            del self._since_s[load]

    def close(self) -> None:
        """Start no more loads, without waiting for the current one. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        def timed() -> T:
            with self.time_load():
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, timed)
        except (Exception, SystemExit) as error:  # also for errors in the import of a model's module
            logger.exception("%s cannot be staged", what)
            raise StagingError(truncate_reason(f"{type(error).__name__}: {error}")) from error

    def _load(
        self, package: ModelPackage, options: ModelOptions, last: Predictor | None
    ) -> tuple[Predictor, LoadedModel]:
        if self._share is None and isinstance(package.snapshot, WeightFile):
            package.snapshot.download()  # here: models that are built alike load one after the other
        predictor = last
        if predictor is None or (predictor.factory, predictor.options) != (package.factory, options):
            predictor = self._find_alike(package, options) or Predictor(
                package.factory, package.signature, options, self._torch_threads, last, self._share
            )
        predictor.set_torch_threads()
        loaded = predictor.load(package.snapshot)
        with self._alike_lock:
            if predictor not in self._alike and predictor.can_be_shared and package.factory.format == "module":
                self._alike.append(predictor)
        return predictor, loaded

    def _find_alike(self, package: ModelPackage, options: ModelOptions) -> Predictor | None:
        """The predictor of a model that is built in the same way, with the same options."""
        wanted = package.factory, package.signature, options
        with self._alike_lock:
            for each in self._alike:
                if (each.factory, each.signature, each.options) == wanted:
                    self._alike.remove(each)
                    self._alike.append(each)
                    return each
        return None
