"""The models of a replica that write text: `TextModels` on its model manager."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.extend.serve import (
    CLIENT_GONE,
    Caller,
    HttpRequest,
    LibraryMetric,
    ModelLoad,
    ModelManager,
    Send,
    ServedModel,
    Track,
)
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.engine.request import TokenIds
from shoal.libs.language.served.prepared import TextGenerator, VersionPreparation, embed
from shoal.libs.language.served.registered_adapters import AdapterFinder, RegisteredAdapter
from shoal.libs.language.served.text_engine import RequestStream, TextEngine, TextShadow
from shoal.libs.language.served.text_statistics import TextStatistics
from shoal.libs.language.text_model import TextCall, TextModel

_STATUSES = {"stop": 200, "length": 200, "swapped": 503, "deadline": 504, "cancelled": CLIENT_GONE, "error": 500}


class ServedTexts:
    """Implements `TextModels`."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._preparation = VersionPreparation()
        self.replica = manager.replica
        manager.prepare_with(self._preparation.prepare)

    def list(self, caller: Caller) -> list[TextModel]:
        """The models that write text, and that the caller's key is for."""
        models: list[TextModel] = []
        for served in self._manager.list_loaded():
            if (text := self._find(served)) is not None:
                adapters = self._open(served).adapters.list_names()
                texts = [text, *(replace(text, name=f"{text.name}:{each}", adapter=each) for each in adapters)]
                models += [each for each in texts if caller.can_see(each.name)]
        return models

    def get(self, name: str, caller: Caller) -> TextModel:
        """Raises InferenceError: 403, 404, and 503 for a model that is not loaded here."""
        if not caller.can_see(name):
            raise InferenceError(403, f"the key {caller.name!r} is not for the model {name[:200]!r}")
        name, _, adapter = name.partition(":")
        served = self._manager.get_model(name)
        if not isinstance(served, ServedModel):
            raise InferenceError(503, f"model {name!r} is loaded on demand, and not here now: ask it for a text", 1.0)
        if not served.version:
            raise InferenceError(503, f"model {name!r} has no weights yet; try again later", 1.0)
        if (text := self._find(served)) is None:
            raise InferenceError(404, f"model {name!r} writes no text: it is no language model with a tokenizer")
        if adapter:
            self._open(served).adapters.require_allowed(adapter)
            text = replace(text, name=f"{name}:{adapter}", adapter=adapter)
        return text

    def is_peer(self, token: bytes) -> bool:
        """See `TextModels`."""
        return self._manager.is_peer(token)

    async def load(self, name: str, request: HttpRequest, send: Send) -> None:
        """See `TextModels`."""
        await self._manager.reach_model(name.partition(":")[0], request, send)

    def open(self, name: str) -> ModelTexts:
        """The texts of a model as it is served now. Raises InferenceError: 503 where it just made way for another."""
        served = self._manager.get_model(name)
        if not isinstance(served, ServedModel):
            raise InferenceError(503, f"model {name!r} makes way for another; try again later", 1.0)
        return self._open(served)

    def _open(self, served: ServedModel) -> ModelTexts:
        if served.streams is None:
            served.streams = ModelTexts(served, self._preparation)
        assert isinstance(served.streams, ModelTexts)
        return served.streams

    def _find(self, served: ServedModel) -> ServedText | None:
        stable = served.router.stable
        prepared = None if stable is None else self._preparation.find(stable)
        if prepared is None:
            return None
        return ServedText(served.name, prepared.created_s, prepared.tokenizer, prepared.context, self)


@dataclass
class ServedText:
    """Implements `TextModel`."""

    name: str
    created_s: float
    tokenizer: Any
    context: int
    texts: ServedTexts
    adapter: str = ""

    def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        return self.texts.open(self.name.partition(":")[0]).generate(replace(request, adapter=self.adapter), call)

    async def embed(self, prompts: Sequence[TokenIds], call: TextCall) -> tuple[list[np.ndarray], int]:
        if self.adapter:
            raise InferenceError(400, "model: embeddings are those of the model without an adapter", field="model")
        return await self.texts.open(self.name).embed(prompts, call)


class ModelTexts:
    """The texts of one served model: an engine for each track. Implements `StreamedAnswers`."""

    def __init__(self, served: ServedModel, preparation: VersionPreparation) -> None:
        self._served, self._preparation = served, preparation
        self._statistics = TextStatistics(served.options.text.slots)
        self._engines: dict[Track, TextEngine] = {}
        self._ending: list[TextEngine] = []  # retired, with answers in progress
        self._problem = ""
        self._shadow = TextShadow(served, preparation)
        stable = served.router.stable
        source = None if stable is None or (prepared := preparation.find(stable)) is None else prepared.source
        self.adapters = AdapterFinder(
            served.name, "" if source is None else source.store.url, served.options.text.adapters
        )

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`."""
        arrived_s = time.monotonic()
        try:
            adapter = await self.adapters.find(request.adapter, call.version) if request.adapter else None
            if adapter is None:
                engine = self._choose(call)
            else:
                request, engine = replace(request, adapter=adapter.key), self._choose_base(call, adapter)
            request, tokens = self._complete(request, call), None
            if adapter is None and self._served.router.is_stable(engine.track):
                request, tokens = self._shadow.draw(request)
            stream = await engine.submit(request, arrived_s, adapter)
        except ConfigError as error:
            self._count(None, 400, arrived_s)
            raise InferenceError(400, str(error), field=error.field) from None
        except Closed:
            self._count(None, 503, arrived_s)
            raise self._make_closed() from None
        except InferenceError as error:
            self._count(None, error.status, arrived_s)
            raise
        self._statistics.count_prompt(len(request.prompt), engine.engine)
        status = CLIENT_GONE
        try:
            while (event := await stream.read()) is not None:
                if event.finish is not None:
                    status = _STATUSES[event.finish]
                if tokens is not None:
                    tokens.add(event)
                yield event
            if tokens is not None:
                self._shadow.start(request, tokens)
        except InferenceError as error:
            status = error.status
            raise
        finally:
            engine.release(stream)
            self._count(stream, status if stream.error or not stream.running else CLIENT_GONE, arrived_s)

    async def embed(self, prompts: Sequence[TokenIds], call: TextCall) -> tuple[list[np.ndarray], int]:
        """See `TextModel`."""
        arrived_s, engine = time.monotonic(), self._choose(call)
        loaded = engine.track.model
        prepared = self._preparation.find(loaded)
        assert prepared is not None
        for prompt in prompts:
            if not 1 <= len(prompt) <= prepared.context:
                problem = f"prompt has {len(prompt)} tokens, expected 1 to {prepared.context}"
                raise InferenceError(400, problem, field="prompt")
        try:
            vectors = [await engine.run(lambda each=prompt: embed(prepared.module, each)) for prompt in prompts]  # type: ignore[misc]
        except Closed:
            raise self._make_closed() from None
        except Exception as error:  # noqa: BLE001 - any error of the model's: its caller receives a reference
            self._served.counts.count_request(loaded.version, 500, time.monotonic() - arrived_s)
            raise self._served.describe_failure(error, loaded.version) from None
        self._served.counts.count_request(loaded.version, 200, time.monotonic() - arrived_s, rows=len(prompts))
        return [each.numpy() for each in vectors], loaded.version

    # -- StreamedAnswers ------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return all(each.is_idle for each in (*self._engines.values(), *self._ending))

    def follow(self) -> None:
        router = self._served.router
        self._shadow.follow()
        for track, engine in list(self._engines.items()):
            if router.has_track(track):
                engine.wake()
            else:
                self._retire(track)

    def close(self, problem: str) -> None:
        self._problem = problem
        self._shadow.close()
        for engine in (*self._engines.values(), *self._ending):
            engine.close(problem)

    def measure_load(self) -> ModelLoad:
        return self._statistics.measure_load(self._list_open())

    def list_metrics(self) -> Mapping[str, LibraryMetric]:
        return self._statistics.list_metrics([each.observe() for each in self._list_open()])

    # -- inside ---------------------------------------------------------------------------------------------------

    def _choose_base(self, call: TextCall, adapter: RegisteredAdapter) -> TextEngine:
        """The engine of the version that the adapter belongs to: that of the rollout, if it does, else another."""
        router = self._served.router
        chosen = router.choose_track(None, call.track, call.sticky).model
        for loaded in dict.fromkeys((chosen, router.stable, *router.loaded.values())):
            prepared = None if loaded is None else self._preparation.find(loaded)
            if loaded is not None and prepared is not None and adapter.fits(prepared.source):
                is_stable = loaded is router.stable
                version, track = (None, "stable") if is_stable else (loaded.version, "")
                return self._choose(replace(call, version=version, track=track))
        shown = ", ".join(f"{self._served.name}@{each}" for each in router.versions)
        of = ", ".join(sorted(each for each in adapter.bases if "@" in each))
        raise InferenceError(409, f"adapter {adapter.key!r} is of {of}, and here answers {shown}", field="model")

    def _choose(self, call: TextCall) -> TextEngine:
        if self._problem:
            raise self._make_closed()
        track = self._choose_track(call)
        if self._preparation.find(track.model) is None:
            raise InferenceError(404, f"version {track.model.version} of {self._served.name!r} writes no text")
        if track in self._engines and self._engines[track].is_retired:
            self._retire(track)
        if track not in self._engines:
            self._engines[track] = TextEngine(self._served, track, self._preparation, self._statistics)
        return self._engines[track]

    def _choose_track(self, call: TextCall) -> Track:
        """That of the version which began the answer, if the call asks for none; or as the rollout says."""
        router, last_version = self._served.router, call.last_version
        chosen = router.choose_track(call.version, call.track, call.sticky)
        if last_version is None or call.version is not None or call.track:
            return chosen
        tracks = [router.choose_track(None, name, "") for name in ("stable", "candidate")]
        if last_version in router.versions:
            tracks.append(router.choose_track(last_version, "", ""))
        return next((each for each in tracks if each.model.version == last_version), chosen)

    def _retire(self, track: Track) -> None:
        """Let an engine end with its last answer."""
        engine = self._engines.pop(track)
        engine.is_retired = True
        self._ending = [each for each in self._ending if not each.is_idle]
        if engine.is_idle:
            engine.close(self._problem)
        else:
            self._ending.append(engine)

    def _complete(self, request: TextRequest, call: TextCall) -> TextRequest:
        options = self._served.options
        if request.swap is None:
            request = replace(request, swap=options.text.swap)
        if request.end_s is None and options.deadline_s is not None:
            request = replace(request, end_s=options.deadline_s)
        if call.resume and request.sampling.seed is None:  # another replica continues with the same tokens
            seed = int.from_bytes(hashlib.blake2b(call.resume.encode(), digest_size=7).digest())
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        return request

    def _make_closed(self) -> InferenceError:
        problem = self._problem or f"model {self._served.name!r} is closing; try again later"
        return InferenceError(503, problem, retry_after_s=1.0)

    def _list_open(self) -> list[TextGenerator]:
        return [each.engine for each in (*self._engines.values(), *self._ending) if each.engine is not None]

    def _count(self, stream: RequestStream | None, status: int, arrived_s: float) -> None:
        """As tensors are counted: an answer and a failure of the model's count for its version."""
        version = stream.base_version or stream.version if stream is not None and status in (200, 500) else 0
        self._served.counts.count_request(version, status, time.monotonic() - arrived_s, rows=1)
