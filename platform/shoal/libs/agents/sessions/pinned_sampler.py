"""Sampling with the run's newest weights, and beside it with those of the versions that evaluations are pinned to.

An engine gives every new answer its newest weights, so each pinned version has an engine of its own, from its first
answer on until no session needs it. Implements `Sampler`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from threading import Thread

from shoal.errors import InferenceError
from shoal.libs.agents.sessions.local_sampler import LocalSampler
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall
from shoal.weights import WeightSnapshot

GetWeights = Callable[[], WeightSnapshot | None]


class PinnedSampler:
    """Used on one event loop, but for `is_alive` and `stop`.

    make_sampler: of the weights that a function gives, None before the first
    get_weights:  the newest ones
    """

    def __init__(self, make_sampler: Callable[[GetWeights], LocalSampler], get_weights: GetWeights) -> None:
        self._make_sampler, self._get_weights = make_sampler, get_weights
        self._newest = make_sampler(get_weights)
        self.context = self._newest.context
        self._pinned: dict[int, WeightSnapshot] = {}
        self._samplers: dict[int, asyncio.Task[LocalSampler]] = {}  # of pinned versions that have been asked

    @property
    def is_alive(self) -> bool:
        return self._newest.is_alive

    def pin(self, version: int) -> None:
        """Keep the weights of a version: the newest, or one that is pinned. Raises InferenceError (404)."""
        if (newest := self._get_weights()) is not None:
            self._pinned.setdefault(newest.version, newest)
        if version not in self._pinned:
            there = ", ".join(map(str, sorted(self._pinned)))
            problem = f"the run has no weights of version {version}; it has {there}"
            raise InferenceError(404, problem, field="version", code="model_not_found")

    def retain(self, versions: Collection[int]) -> None:
        """Free all other pinned versions."""
        for version in self._pinned.keys() - versions:
            del self._pinned[version]
            if (task := self._samplers.pop(version, None)) is not None:
                task.add_done_callback(lambda task: Thread(target=_stop, args=(task,)).start())

    def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`."""
        if call.version is None:
            return self._newest.generate(request, call)
        return self._generate_pinned(request, call, call.version)

    async def _generate_pinned(self, request: TextRequest, call: TextCall, version: int) -> AsyncGenerator[TokenEvent]:
        self.pin(version)
        if (task := self._samplers.get(version)) is None:
            making = asyncio.to_thread(self._make_sampler, lambda weights=self._pinned[version]: weights)  # type: ignore[misc]
            task = self._samplers[version] = asyncio.ensure_future(making)
        sampler = await asyncio.shield(task)
        async with aclosing(sampler.generate(request, call)) as events:
            async for event in events:
                yield event

    def stop(self) -> None:
        """End what runs with 503. Idempotent."""
        self._newest.stop()
        for task in list(self._samplers.values()):
            _stop(task)

    async def close(self) -> None:
        """After `stop`."""
        await asyncio.gather(*self._samplers.values(), return_exceptions=True)
        self.stop()


def _stop(task: asyncio.Task[LocalSampler]) -> None:
    if task.done() and not (task.cancelled() or task.exception()):
        task.result().stop()
