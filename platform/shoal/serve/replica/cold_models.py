"""Requests for models that this replica has not loaded: they go to a replica that has it, or wait for its load.

Made by the model manager, on its event loop. A loaded model's requests never come here. Decides nothing about loads:
it asks the controller for one, and follows the plan. A request goes to one other replica at most, which answers it or
refuses it.

| capacity                | what blocks                     | who unblocks              | close()                      |
|-------------------------|---------------------------------|---------------------------|------------------------------|
| `max_queue_size` rows,  | a request, up to its deadline   | the load, a plan, a       | none: the requests end with  |
| `max_queue_bytes` of    | and `LOAD_WAIT_S`; then 504     | failure (`notify`)        | their server                 |
| each model; beyond, 503 | or 503                          |                           |                              |
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shoal.batching.batcher import Prediction
from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.open_inference.messages import VersionStatistics
from shoal.registry.manifest import Signature
from shoal.serve.messages.counts import merge
from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.messages.inference import Relayed, size_bytes
from shoal.serve.messages.model_errors import undescribed_model, unknown_model
from shoal.serve.messages.replica_report import ModelReport, PeerReport, Residency
from shoal.serve.protocol.pipeline import (
    GENERATION_HEADER,
    LARGE_BYTES,
    PEER_HEADER,
    has_large_arrays,
    run_in_thread,
)
from shoal.serve.protocol.request_lifecycle import Send
from shoal.serve.replica.model_memory import ModelMemory
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.peers import HttpRequest, PeerTransport, decode_answer, encode_call
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.model_options import ModelOptions

LOAD_WAIT_S = 30.0
ASK_S = 2.0  # of one call of the controller, which is repeated
MAX_FORWARDS = 3
MAX_LOST = 2  # replicas with one request, which may be why
LOST_S = 5.0  # a replica that cannot be reached is not called again for so long
T = TypeVar("T")


@dataclass
class ModelUse:
    """The use of one model on this replica, while it has the model and while it has not."""

    counts: ModelStatistics
    residency: Residency = field(default_factory=Residency)
    since_s: float = field(default_factory=time.time)
    waiting_rows: int = 0
    waiting_bytes: int = 0

    @property
    def idle_s(self) -> float:
        """The time since the last request."""
        used_s = max(self.since_s, self.counts.last_inference_ms / 1e3)
        return 0.0 if self.residency.waiting else max(0.0, time.time() - used_s)


class ColdModel:
    """A model of the endpoint as a replica without it knows it: implements `ServedModelProtocol`.

    generation: of the plan by which another replica sent a request here; None: clients' requests
    """

    def __init__(self, plan: ModelPlan, requests: OnDemandRequests, generation: int | None = None) -> None:
        assert plan.signature is not None
        self.name = plan.name
        self.plan = plan
        self._requests = requests
        self.generation = generation
        self.signature, self.options = Signature.parse(plan.signature), ModelOptions.parse(plan.options)
        self.datatypes = {tensor.name: tensor.datatype for tensor in self.signature.inputs}

    @property
    def version(self) -> int:
        return self.plan.stable

    @property
    def versions(self) -> list[int]:
        return sorted(self.plan.staged)

    def statistics(self) -> list[VersionStatistics]:
        return self._requests.get_use(self.name).counts.list_statistics(self.versions)

    async def infer(self, call: InferCall) -> Prediction[Outputs]:
        return await self._requests.answer(self, call)

    async def reach(self, request: HttpRequest, send: Send) -> None:
        """For a request that is no call of tensors: returns once the model is loaded here. Raises Relayed once another
        replica, which has it, has answered by `send`, and as `infer` where that takes too long."""
        await self._requests.reach(self, request, send)

    def await_load(self, generation: int) -> ColdModel:
        """The model for a request that another replica sends, which is answered here or not at all."""
        return ColdModel(self.plan, self._requests, generation)


class OnDemandRequests:
    """find_served: the model, if it is loaded and answers; find_error: why it could not be loaded; "" otherwise.

    answer_s: how long another replica may take for an answer without a deadline
    """

    def __init__(
        self,
        replica: str,
        controller: ControllerClient,
        transport: PeerTransport,
        find_served: Callable[[str], ServedModel | None],
        find_error: Callable[[str], str],
        answer_s: float,
    ) -> None:
        self._replica = replica
        self._controller = controller
        self._transport = transport
        self._find_served = find_served
        self._find_error = find_error
        self._answer_s = answer_s
        self.models: dict[str, ColdModel] = {}
        self.list_peers: Callable[[], Sequence[PeerReport]] = list
        self._plan = EndpointPlan()
        self._uses: dict[str, ModelUse] = {}
        self._lost_until_s: dict[str, float] = {}
        self._asked: dict[tuple[str, frozenset[str]], asyncio.Task[int | None]] = {}
        self._changed = asyncio.Event()

    def apply(self, plan: EndpointPlan) -> None:
        """Follow a plan: its models, and who has them."""
        self._plan, before = plan, self.models
        self.models = {}
        for each in plan.models:
            known = before.get(each.name)
            if known is not None and each.signature is None:  # the registry cannot be read
                each = replace(each, signature=known.plan.signature)
            if each.replicas is None or each.signature is None:
                continue
            if known is None or (known.plan.signature, known.plan.options) != (each.signature, each.options):
                known = ColdModel(each, self)
            known.plan = each
            self.models[each.name] = known
        self._uses = {name: use for name, use in self._uses.items() if name in self.models}
        self._transport.retain(plan.addresses.values())
        self._lost_until_s = {each: s for each, s in self._lost_until_s.items() if each in plan.addresses}
        self.notify()

    def describe_unknown(self, name: str, loaded: Iterable[str]) -> InferenceError:
        """The error of a request for a model that is neither loaded nor known here."""
        if any(plan.name == name and plan.replicas is not None for plan in self._plan.models):
            return undescribed_model(name)
        return unknown_model(name, {**dict.fromkeys(loaded), **self.models})

    def get_use(self, name: str) -> ModelUse:
        """The use of a model, from its first request on."""
        if name not in self._uses:
            self._uses[name] = ModelUse(ModelStatistics(name))
        return self._uses[name]

    @property
    def num_waiting(self) -> int:
        return sum(use.residency.waiting for use in self._uses.values())

    def add_residency(
        self, reports: Mapping[str, ModelReport], memory: ModelMemory, served: Mapping[str, ServedModel]
    ) -> dict[str, ModelReport]:
        """The reports with the residency of each used model, also of those that are not loaded."""
        added = dict(reports)
        for name, use in self._uses.items():
            report = added.get(name) or ModelReport(counts=use.counts.snapshot())
            residency = replace(
                merge([use.residency, memory.loads[name]]),
                resident_bytes=memory.resident_bytes.get(served.get(name), 0),
                idle_s=self._measure_idle(name, use),
                requests=use.counts.num_requests,
            )
            added[name] = replace(report, residency=residency)
        return added

    def _measure_idle(self, name: str, use: ModelUse) -> float:
        served = self._find_served(name)  # an answer that streams is counted at its end
        return use.idle_s if served is None or served.is_idle else 0.0

    def notify(self) -> None:
        """Let waiting requests see what has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Close connections. Idempotent."""
        for task in self._asked.values():
            task.cancel()
        self._transport.close()

    # -- a request --------------------------------------------------------------------------------------------------

    async def answer(self, model: ColdModel, call: InferCall) -> Prediction[Outputs]:
        """Answer a call wherever the model is; with the generation of another replica's plan, here alone.

        Raises InferenceError, also 503 and 504 for a load that takes too long.
        """
        return await self._answer(
            model, call, lambda served: served.infer(call), lambda holder: self._forward(holder, model, call)
        )

    async def reach(self, model: ColdModel, request: HttpRequest, send: Send) -> None:
        """See `ColdModel.reach`."""

        async def find(served: ServedModel) -> None:
            return

        async def forward(holder: str) -> None:
            headers = request.list_headers() | {PEER_HEADER.decode(): self._plan.peer_token}
            headers[GENERATION_HEADER.decode()] = str(self._plan.generation)
            address = self._plan.addresses[holder]
            await self._transport.relay(address, request.path, headers, request.body, send)
            self.get_use(model.name).residency.forwarded += 1
            raise Relayed

        await self._answer(model, InferCall({}, 1, deadline_s=request.deadline_s), find, forward)

    async def _answer(
        self,
        model: ColdModel,
        call: InferCall,
        answer: Callable[[ServedModel], Awaitable[T]],
        forward: Callable[[str], Awaitable[T]],
    ) -> T:
        name = model.name
        num_forwards = 0
        num_lost = 0
        ends_s = time.monotonic() + LOAD_WAIT_S
        if call.deadline_s is not None:
            ends_s = min(ends_s, call.deadline_s)
        if model.generation is not None:
            if (served := await self._await_here(model, call, model.generation, ends_s)) is None:
                raise InferenceError(503, f"model {name!r} is being moved; try again later", retry_after_s=1.0)
            return await answer(served)
        while True:
            lost = {each for each, until_s in self._lost_until_s.items() if time.monotonic() < until_s}
            if (served := self._find_served(name)) is not None:
                return await answer(served)
            if (planned := self.models.get(name)) is None:
                raise unknown_model(name, self.models)
            holder = self._choose_holder(planned.plan, lost)
            if holder == self._replica:
                await self._await_here(model, call, self._plan.generation, ends_s)
            elif holder:
                try:
                    return await forward(holder)
                except ConnectionLost as error:
                    num_lost += isinstance(error, RequestLost)
                    if num_lost == MAX_LOST:
                        problem = f"{num_lost} replicas were lost with this request for model {name!r}"
                        raise InferenceError(503, problem) from None
                    self._lost_until_s[holder] = time.monotonic() + LOST_S
                except InferenceError as error:
                    num_forwards += 1
                    if error.status != 503 or num_forwards == MAX_FORWARDS or time.monotonic() > ends_s:
                        raise
                    await self._request_load(model, call, lost, ends_s)
            else:
                await self._request_load(model, call, lost, ends_s)

    def _choose_holder(self, plan: ModelPlan, lost: set[str]) -> str:
        """The replica for a request: one that has loaded the model, else one that is to; "" for none."""
        holders = [each for each in plan.replicas or () if each not in lost]
        others = [each for each in holders if each in self._plan.addresses and each != self._replica]
        loaded = [
            report.replica for report in self.list_peers() if report.replica in others and plan.name in report.loaded
        ]
        if loaded:
            return random.choice(loaded)
        if self._replica in holders:
            return self._replica
        return random.choice(others) if others else ""

    async def _forward(self, holder: str, model: ColdModel, call: InferCall) -> Prediction[Outputs]:
        if call.trace is not None:
            call.trace.submitted_ns = time.time_ns()
        arguments = model.name, call, model.datatypes, self._plan.peer_token, self._plan.generation
        is_large = has_large_arrays(call.inputs, raw=True)
        path, headers, body = await run_in_thread(encode_call, *arguments) if is_large else encode_call(*arguments)
        ends_s = time.monotonic() + self._answer_s if call.deadline_s is None else call.deadline_s
        answer = await _wait_until(
            ends_s, call, self._transport.post(self._plan.addresses[holder], path, headers, body)
        )
        has_text = any(tensor.datatype == "BYTES" for tensor in model.signature.outputs)
        is_large = has_text and len(answer[2]) > LARGE_BYTES
        prediction = await run_in_thread(decode_answer, *answer) if is_large else decode_answer(*answer)
        self.get_use(model.name).residency.forwarded += 1
        return prediction

    async def _await_here(
        self, model: ColdModel, call: InferCall, generation: int, ends_s: float
    ) -> ServedModel | None:
        """Wait until this replica has loaded the model; None where the plan of this generation, or a later one, has it
        elsewhere. Raises InferenceError."""
        name = model.name

        async def wait() -> ServedModel | None:
            while (served := self._find_served(name)) is None:
                if error := self._find_error(name):
                    raise InferenceError(503, f"model {name!r} cannot be loaded: {error}", retry_after_s=1.0)
                planned = self.models.get(name)
                if self._plan.generation >= generation and not (planned and planned.plan.is_for(self._replica)):
                    return None
                await self._changed.wait()
            return served

        self.get_use(name).residency.waited += 1
        with self._count_waiting(model, call):
            return await _wait_until(ends_s, call, wait())

    async def _request_load(self, model: ColdModel, call: InferCall, lost: set[str], ends_s: float) -> None:
        """Have the controller assign the model to a replica, and wait for that plan. Raises InferenceError."""
        key = model.name, frozenset(lost)

        async def request() -> None:
            generation = None
            while generation is None:
                if key not in self._asked:
                    self._asked[key] = asyncio.create_task(self._ask_controller(*key))
                generation = await asyncio.shield(self._asked[key])
            while self._plan.generation < generation:
                await self._changed.wait()

        with self._count_waiting(model, call):
            try:
                await _wait_until(ends_s, call, request())
            except ConnectionLost as error:
                problem = f"model {model.name!r} is not loaded, and the controller that has it loaded is away: {error}"
                raise InferenceError(503, problem, retry_after_s=1.0) from None

    async def _ask_controller(self, name: str, lost: frozenset[str]) -> int | None:
        idle_s = {
            each: self._measure_idle(each, use)
            for each, use in self._uses.items()
            if self._find_served(each) is not None
        }
        try:
            return await self._controller.request_load(name, self._replica, idle_s, sorted(lost), ASK_S)
        finally:
            del self._asked[name, lost]

    @contextmanager
    def _count_waiting(self, model: ColdModel, call: InferCall) -> Iterator[None]:
        """Count a request that waits for a load, and its failure. Raises InferenceError (503) when too many wait."""
        use = self.get_use(model.name)
        options = model.options
        since_s = time.monotonic()
        num_bytes = size_bytes(call.inputs)
        has_too_many_bytes = use.residency.waiting and use.waiting_bytes + num_bytes > options.max_queue_bytes
        if use.waiting_rows + call.num_rows > options.max_queue_size or has_too_many_bytes:
            use.counts.count_request(0, 503, 0.0)
            limits = f"the limits are {options.max_queue_size} and {options.max_queue_bytes}"
            there = f"{use.waiting_rows} rows and {use.waiting_bytes} bytes wait"
            problem = f"{there} for model {model.name!r} to be loaded, {limits}"
            raise InferenceError(503, problem, retry_after_s=1.0)
        use.residency.waiting += 1
        use.waiting_rows += call.num_rows
        use.waiting_bytes += num_bytes
        try:
            yield
        except InferenceError as error:
            use.counts.count_request(0, error.status, time.monotonic() - since_s)
            raise
        finally:
            use.residency.waiting -= 1
            use.waiting_rows -= call.num_rows
            use.waiting_bytes -= num_bytes


async def _wait_until(ends_s: float, call: InferCall, work: Awaitable[T]) -> T:
    """Await within a time of `time.monotonic()`. Raises InferenceError: 504 after the call's deadline, else 503."""
    try:
        async with asyncio.timeout(max(0.0, ends_s - time.monotonic())):
            return await work
    except TimeoutError:
        if call.deadline_s is not None and ends_s >= call.deadline_s:
            raise InferenceError(504, "the deadline passed before the model was loaded or answered") from None
        raise InferenceError(503, "the model was not loaded in time; try again later", retry_after_s=5.0) from None
