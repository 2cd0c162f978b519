"""The candidate of a shadow also writes a share of the stable version's texts, and the tokens are compared.

As for tensors: the client has its answer before, the steps have the smallest weight, and what cannot be computed is
dropped. Sampled texts are drawn from the same uniform numbers, so that equal models write equal tokens.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from dataclasses import replace

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.extend.serve import SHADOW_WEIGHT, ServedModel
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.served.prepared import VersionPreparation
from shoal.libs.language.served.text_engine import TextEngine
from shoal.libs.language.served.text_statistics import TextStatistics


class Tokens:
    """Those of all answers of a request, and whether one version wrote them to their end."""

    def __init__(self, num_answers: int) -> None:
        self.by_answer: defaultdict[int, list[int]] = defaultdict(list)
        self._running, self._versions = num_answers, set[int | str]()

    def add(self, event: TokenEvent) -> None:
        if event.token is not None:
            self.by_answer[event.index].append(event.token)
            self._versions.add(event.version)
        self._running -= event.finish in ("stop", "length")

    @property
    def is_complete(self) -> bool:
        return not self._running and len(self._versions) == 1


class TextShadow:
    """The shadow of one model's texts. Lives on the event loop."""

    def __init__(self, served: ServedModel, preparation: VersionPreparation) -> None:
        self._served, self._preparation = served, preparation
        self._engine: TextEngine | None = None

    def draw(self, request: TextRequest) -> tuple[TextRequest, Tokens | None]:
        """By chance, the request as it can be computed twice, and what is to collect its tokens."""
        if not self._served.shadow.percent or not self._served.shadow.draw():
            return request, None
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        return request, Tokens(request.num_answers)

    def start(self, request: TextRequest, expected: Tokens) -> None:
        """Let the candidate write what the stable version has written."""
        if expected.is_complete:
            self._served.shadow.start(self._compare(request, expected))

    def follow(self) -> None:
        """Other versions answer from now on."""
        if self._engine is not None and not self._served.shadow.percent:
            self.close()

    def close(self) -> None:
        """Drop what is computed. Idempotent."""
        if self._engine is not None:
            self._engine.close("the shadow has ended")
            self._engine = None

    async def _compare(self, request: TextRequest, expected: Tokens) -> None:
        shadow = self._served.shadow
        candidate = shadow.candidate
        if candidate is None:
            return
        loaded = candidate.model
        if self._preparation.find(loaded) is None:
            return  # it writes no text
        if self._engine is None or self._engine.is_retired:
            statistics = TextStatistics(self._served.options.text.slots)  # its tokens are no load of callers
            self._engine = TextEngine(self._served, candidate, self._preparation, statistics, SHADOW_WEIGHT)
        written, engine = Tokens(request.num_answers), self._engine
        try:
            stream = await engine.submit(replace(request, begin_s=None, end_s=None), time.monotonic())
            try:
                while (event := await stream.read()) is not None:
                    written.add(event)
            finally:
                engine.release(stream)
        except Closed:
            return
        except ConfigError:  # the stable version took it
            shadow.count_failure(candidate, loaded, 400)
        except InferenceError as error:
            shadow.count_failure(candidate, loaded, error.status)
        else:
            if written.is_complete and stream.version == loaded.version:
                shadow.count(candidate, loaded, agrees=written.by_answer == expected.by_answer)
