"""A host of models without models: fulfils `ModelManagerProtocol`, remembers what it was asked, and fails on request.

    from serving.fake_host import FakeHost, FakeModel, tensors

    host = FakeHost(FakeModel("m", tensors(x=("FP32", [-1, 3]))))   # answers what it is given: output x = input x
    host.models_by_name["m"].error = InferenceError(429, "full", retry_after_s=2)

Like the real one it checks nothing that the protocol has checked, but it fails loudly when the protocol has not.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from registered import tensors
from shoal.errors import InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.open_inference.messages import BatchStatistics, Duration, InferenceStatistics, VersionStatistics
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.messages.infer_call import Arrays, InferCall
from shoal.serve.messages.inference import Prediction, RepositoryEntry
from shoal.serve.spec.model_options import ModelOptions

Compute = Callable[[Arrays], dict[str, np.ndarray]]


def _on_the_loop_s(deadline_s: float | None) -> float | None:
    """A time of `time.monotonic()` by the running loop's clock."""
    return None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s - time.monotonic()


class FakeModel:
    """Fulfils `ServedModelProtocol`. Gives its inputs back, or what `compute` makes of them.

    calls: every call that came, in order
    error: raised instead of an answer, when set
    hold:  answers wait until it is set (None: they do not wait); `waiting` counts those that do
    """

    def __init__(
        self,
        name: str = "m",
        inputs: list[TensorSignature] | None = None,
        outputs: list[TensorSignature] | None = None,
        compute: Compute = dict,
        *,
        versions: tuple[int, ...] = (7,),
        options: ModelOptions | None = None,
    ) -> None:
        self.name = name
        inputs = tensors(x=[-1, 3]) if inputs is None else inputs
        self.signature = Signature(inputs=inputs, outputs=inputs if outputs is None else outputs)
        self.options = ModelOptions() if options is None else options
        self.versions = sorted(versions)
        self.calls: list[InferCall] = []
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.waiting = 0
        self._compute = compute
        self._done: dict[int, VersionStatistics] = {}

    @property
    def version(self) -> int:
        return self.versions[-1] if self.versions else 0

    async def infer(self, call: InferCall) -> Prediction:
        self.calls.append(call)
        self._check(call.inputs, self.signature.inputs, call.num_rows)
        if self.error is not None:
            raise self.error
        if not self.versions:
            raise InferenceError(503, f"model {self.name!r} has no weights yet; try again later")
        version = self.version if call.version is None else call.version
        if version not in self.versions:
            raise InferenceError(404, f"model {self.name!r} has no version {version}; it serves {self.versions}")
        if self.hold is not None:
            self.waiting += 1
            try:
                async with asyncio.timeout_at(_on_the_loop_s(call.deadline_s)):
                    await self.hold.wait()
            except TimeoutError:
                raise InferenceError(504, "the deadline has passed") from None
            finally:
                self.waiting -= 1
        started_ns = time.perf_counter_ns()
        outputs = self._compute(call.inputs)
        if call.outputs is not None:
            outputs = {name: array for name, array in outputs.items() if name in call.outputs}
        self._count(version, call.num_rows, time.perf_counter_ns() - started_ns)
        return Prediction(outputs, version, batch_rows=call.num_rows)

    def statistics(self) -> list[VersionStatistics]:
        return [self._done.setdefault(version, self._nothing(version)) for version in self.versions]

    def _check(self, arrays: Arrays, specs: list[TensorSignature], num_rows: int) -> None:
        assert set(arrays) == {spec.name for spec in specs}
        for spec in specs:
            array = arrays[spec.name]
            assert array.dtype == NUMPY_DTYPES[spec.datatype], (spec, array.dtype)
            rows = len(array) if self.options.max_batch_size else 1
            assert rows == num_rows > 0, (spec, array.shape)
            assert array.ndim == len(spec.shape), (spec, array.shape)
            assert all(want in (-1, have) for have, want in zip(array.shape, spec.shape, strict=True)), array.shape
            if spec.datatype == "BYTES":
                assert all(type(element) is bytes for element in array.flat), array

    def _nothing(self, version: int) -> VersionStatistics:
        return VersionStatistics(self.name, str(version), 0, 0, 0, InferenceStatistics(), [])

    def _count(self, version: int, num_rows: int, ns: int) -> None:
        done = self._done.setdefault(version, self._nothing(version))
        done.last_inference = int(time.time() * 1000)
        done.inference_count += num_rows
        done.execution_count += 1
        stats = done.inference_stats
        stats.success = stats.compute_infer = Duration(stats.success.count + 1, stats.success.ns + ns)
        batch = next((each for each in done.batch_stats if each.batch_size == num_rows), None)
        if batch is None:
            batch = BatchStatistics(num_rows)
            done.batch_stats.append(batch)
        batch.compute_infer = Duration(batch.compute_infer.count + 1, batch.compute_infer.ns + ns)


class FakeHost:
    """Fulfils `ModelManagerProtocol`. `shelf`: models that could be loaded; `changes`: of `administer`, in order."""

    def __init__(self, *models: FakeModel, shelf: tuple[FakeModel, ...] = ()) -> None:
        models = models or (FakeModel(),)
        self.models_by_name = {model.name: model for model in models}
        self.known = {model.name: model for model in (*models, *shelf)}
        self.changes: list[dict[str, Any]] = []
        self.parameters: list[dict[str, Any]] = []  # of each load

    @property
    def controller(self) -> Self:
        return self

    @property
    def is_ready(self) -> bool:
        return all(model.versions for model in self.models_by_name.values())

    def list_models(self) -> list[FakeModel]:
        return list(self.models_by_name.values())

    def get_model(self, name: str) -> FakeModel:
        try:
            return self.models_by_name[name]
        except KeyError:
            there = ", ".join(map(repr, self.models_by_name)) or "none"
            raise InferenceError(404, f"there is no model {name[:200]!r}; this endpoint serves {there}") from None

    def list_repository(self) -> list[RepositoryEntry]:
        return [
            RepositoryEntry(name, str(version), "READY")
            if name in self.models_by_name
            else RepositoryEntry(name, str(version), "UNAVAILABLE", "unloaded")
            for name, model in sorted(self.known.items())
            for version in model.versions
        ]

    async def load(self, name: str, parameters: Mapping[str, Any], by: str = "") -> None:
        if name not in self.known:
            raise InferenceError(404, f"there is no model {name[:200]!r} in the registry")
        self.parameters.append(dict(parameters))
        self.models_by_name[name] = self.known[name]

    async def unload(self, name: str, by: str = "") -> None:
        self.get_model(name)
        del self.models_by_name[name]

    async def administer(self, change: Mapping[str, Any], by: str = "") -> dict[str, Any]:
        if change.get("action") not in ("canary", "promote", "rollback", "shadow", "deploy", "set", "delete", "metric"):
            raise InferenceError(400, f"action = {str(change.get('action'))[:40]!r}: expected canary, promote, ...")
        model = self.get_model(str(change.get("model", "")))
        self.changes.append(dict(change))
        return {"model": model.name, "stable": model.version, "candidate": change.get("version")}

    async def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer:
        model = self.get_model(request.model)
        if request.observation is None and not request.episode:
            raise InferenceError(422, "episode: an episode begins with an observation")
        return EpisodeAnswer(request.episode or "1-0-ff", 0, model.version)

    async def status(self) -> dict[str, Any]:
        return {"models": {model.name: {"version": model.version} for model in self.list_models()}}
