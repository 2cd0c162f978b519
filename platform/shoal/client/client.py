"""The two clients of an endpoint, blocking and asynchronous: the same calls, NumPy arrays in and out.

    with Client("http://127.0.0.1:8000", token=TOKEN) as client:
        answer = client.infer("fashion", images, deadline_s=0.1)
        answer["output"].argmax(1), answer.version

Used by programs, and by the command line. `payload` and `requests` build the requests, `retry` decides on retries. A
client fetches a model's signature once, to convert lists and arrays of float64 to the model's datatypes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

from numpy.typing import ArrayLike

from shoal.client import requests
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.client.payload import Answer, Inputs, decode_answer, encode_inputs
from shoal.client.requests import Episode
from shoal.client.retry import EndpointRequest, Reply, RetryPolicy, request_with_retries, timeout_error
from shoal.client.transport import AsyncTransport, Transport
from shoal.errors import ConfigError, InferenceError
from shoal.open_inference.messages import IndexedModel, ModelMetadata, Parameters, VersionStatistics

TIMEOUT_S = 75.0  # longer than the ingress waits for an answer: the client hears what became of its request
NUM_CONNECTIONS = 100
# A change returns once every replica has it, or with the endpoint's error when that takes longer than this.
CHANGE_TIMEOUT_S, LOAD_TIMEOUT_S = 120.0, 300.0
CHANGE_MARGIN_S = 30.0  # for that error to arrive
MAX_TIMEOUT_S = 1e9  # the largest timeout of a socket, thirty years


class _ClientBase:
    """The settings and the cached signatures of both clients."""

    def __init__(self, url: str, timeout_s: float, num_retries: int, retry_lost: bool, binary: bool) -> None:
        if type(num_retries) is not int or num_retries < 0:
            raise ConfigError("num_retries", num_retries, "is not a number of retries", "give 0 or more")
        self.url = url
        self._timeout_s, self._num_retries = _parse_timeout("timeout_s", timeout_s), num_retries
        self._retry_lost, self._binary = retry_lost, binary
        self._signatures: dict[str, ModelMetadata] = {}

    def _build_retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self._timeout_s, self._num_retries, self._retry_lost)

    def _build_change_policy(self, timeout_s: object = None) -> RetryPolicy:
        endpoint_s = CHANGE_TIMEOUT_S if timeout_s is None else _parse_timeout("timeout_s", timeout_s)
        return RetryPolicy(endpoint_s + CHANGE_MARGIN_S, self._num_retries, is_change=True)

    def _build_episode_policy(self) -> RetryPolicy:
        """A step that was sent may have been taken: it is not sent again."""
        return RetryPolicy(self._timeout_s, self._num_retries, is_change=True)

    def _build_infer_policy(self, deadline_s: float | None) -> RetryPolicy:
        """The policy of a call that begins now, including the request for a signature."""
        sends_deadline = deadline_s is not None
        timeout_s = _parse_timeout("deadline_s", deadline_s) if sends_deadline else self._timeout_s
        end_s = time.monotonic() + timeout_s
        return RetryPolicy(timeout_s, self._num_retries, self._retry_lost, sends_deadline=sends_deadline, end_s=end_s)

    def _store_signature(self, model: str, reply: Reply) -> ModelMetadata:
        signature = self._signatures[model] = requests.decode(reply, ModelMetadata)
        return signature

    def _forget_signature(self, model: str, error: InferenceError) -> None:
        """Drop a signature after an error about the model or a tensor: the name may belong to another model now."""
        if error.status in (404, 422):
            self._signatures.pop(model, None)

    def _build_infer_request(
        self, signature: ModelMetadata, model: str, inputs: Inputs, options: Mapping[str, Any], version: int | None
    ) -> EndpointRequest:
        told = options["outputs"], options["request_id"], options["parameters"]
        headers, body = encode_inputs(signature, inputs, *told, binary=self._binary)
        return requests.build_infer_request(
            model, version, headers, body, sticky=options["sticky"], track=options["track"]
        )


def _parse_timeout(field: str, value: Any) -> float:
    """Parse a timeout. Raises ConfigError for one that is not positive, finite or a number."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(field, value, "is not a timeout", "give seconds, above 0")
    return seconds


class Client(_ClientBase):
    """A client of the endpoint at `url`, for any number of threads. Close it, or use it as a context manager.

    token:       the access token or an API key; "" for none
    timeout_s:   for each call with its retries, when the call has no deadline
    num_retries: the most retries of a call: without a connection, and when the endpoint allows it. A change of the
                 endpoint is sent once
    retry_lost:  retry also when the connection broke after the request was sent; inference changes nothing, so this is
                 safe, but may compute twice
    binary:      send tensors as bytes after a small header, several times as fast as JSON for large ones; off: plain
                 JSON
    ca:          of https: a file of the authorities to trust; "": $SHOAL_CA, or the system's
    certificate: of https: a file with this client's own certificate and its key; "": $SHOAL_CLIENT_CERTIFICATE, or none

    Every call raises InferenceError with the endpoint's status and message, or ConnectionLost; ConfigError for an
    invalid argument.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = TIMEOUT_S,
        num_retries: int = 3,
        retry_lost: bool = False,
        binary: bool = True,
        num_connections: int = NUM_CONNECTIONS,
        ca: str = "",
        certificate: str = "",
    ) -> None:
        super().__init__(url, timeout_s, num_retries, retry_lost, binary)
        self._transport = Transport(url, token, num_connections, ca, certificate)

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int | None = None,
        outputs: Collection[str] | None = None,
        deadline_s: float | None = None,
        sticky: str = "",
        track: str = "",
        request_id: str = "",
        parameters: Parameters | None = None,
    ) -> Answer:
        """Compute the model's outputs for `inputs`: arrays by name, or one array for a model with one input; [rows,
        ...] each.

        version:    of the model, instead of the serving one
        outputs:    names of the requested outputs; None for all
        deadline_s: seconds from now after which the request expires. The endpoint refuses at once (504) a request that
                    it cannot answer in time
        sticky:     calls with the same text get the same side of a canary
        track:      "stable" or "candidate": this side of a canary
        parameters: of the protocol, as {"action": "sampled", "seed": 7} for a policy that samples

        Raises ConfigError for inputs that cannot fit the model, InferenceError, ConnectionLost.
        """
        asked = {"outputs": outputs, "request_id": request_id, "parameters": parameters}
        options = {**asked, "sticky": sticky, "track": track}
        patience = self._build_infer_policy(deadline_s)
        known = self._signatures.get(model)
        try:
            try:
                request = self._build_infer_request(
                    known or self._metadata(model, patience), model, inputs, options, version
                )
            except ConfigError:
                if known is None:
                    raise
                # The cached signature may be of another model, which had the name before.
                request = self._build_infer_request(self._metadata(model, patience), model, inputs, options, version)
            return decode_answer(self._send(request, patience))
        except InferenceError as error:
            self._forget_signature(model, error)
            raise

    def metadata(self, model: str) -> ModelMetadata:
        """Fetch the model's inputs, outputs and versions, without the cache."""
        return self._metadata(model, self._build_retry_policy())

    def models(self) -> list[IndexedModel]:
        """List every version of every model of the endpoint, with its state."""
        return requests.decode(self._send(requests.INDEX), list[IndexedModel])

    def live(self) -> bool:
        """Whether the endpoint answers."""
        return self._probe(requests.LIVE)

    def ready(self, model: str | None = None) -> bool:
        """Whether the endpoint, or one of its models, is ready for requests."""
        return self._probe(requests.build_ready_request(model))

    def statistics(self, model: str) -> list[VersionStatistics]:
        """The protocol's statistics of each version, from the replica that answers."""
        return requests.decode_statistics(self._send(requests.build_statistics_request(model)))

    def load(self, model: str, **parameters: bool | int | float | str) -> None:
        """Load a registered model on every replica; returns once all have it."""
        self._send(requests.build_load_request(model, parameters), self._build_change_policy(LOAD_TIMEOUT_S))

    def unload(self, model: str) -> None:
        """Unload a model on every replica, once its waiting requests are answered."""
        self._send(requests.build_unload_request(model), self._build_change_policy())

    def status(self) -> EndpointStatus:
        """The status of the full endpoint, from its controller."""
        return requests.decode(self._send(requests.STATUS), EndpointStatus)

    def rollout(self, action: str, model: str, **details: requests.Value) -> ModelStatus:
        """Change the rollout of a model (administrators only); returns the model's new status.

        action: canary, promote, rollback, shadow, deploy, set, delete, metric
        details: the change's fields; `from_version` is the version that a rollback should leave, so that it cannot go
                 back twice, and `timeout_s` limits the wait
        """
        request = requests.build_rollout_request({"action": action, "model": model, **details})
        patience = self._build_change_policy(details.get("timeout_s"))
        return requests.decode(self._send(request, patience), ModelStatus)

    def act(self, model: str, observation: ArrayLike, episode: Episode | None = None) -> tuple[Any, Episode]:
        """Ask a live policy for an action that will be rewarded, of a run with `learn_from_endpoint=true`.

            action, episode = client.act("cartpole", observation)
            client.reward(episode, 1.0)
            action, episode = client.act("cartpole", observation, episode)
            client.end_episode(episode, reward=1.0)

        observation: one, without a row axis
        episode:     the one that goes on; None begins one

        An episode that is not continued for `gateway.episode_timeout_s` of the run expires; without a reward for its
        last action it teaches nothing. Raises InferenceError: 404 for a model that does not learn, 410 for an episode
        that has ended or expired.
        """
        request = requests.build_episode_request(model, episode, observation)
        return requests.decode_action(model, self._send(request, self._build_episode_policy()))

    def reward(self, episode: Episode, value: float) -> None:
        """Add to the reward of the episode's last action. Raises as `act`."""
        self._send(requests.build_episode_request(episode.model, episode, None, value), self._build_episode_policy())

    def end_episode(
        self,
        episode: Episode,
        observation: ArrayLike | None = None,
        *,
        reward: float | None = None,
        truncated: bool = False,
    ) -> None:
        """End an episode: in a terminal state or, `truncated`, by a limit.

        observation: the one after the last action; matters where the episode was truncated
        reward:      added to that of the last action

        Raises as `act`.
        """
        request = requests.build_episode_request(
            episode.model, episode, observation, reward, ended=True, truncated=truncated
        )
        self._send(request, self._build_episode_policy())

    def close(self) -> None:
        """Close every connection. Idempotent; later calls raise Closed."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _metadata(self, model: str, patience: RetryPolicy) -> ModelMetadata:
        return self._store_signature(model, self._send(requests.build_metadata_request(model), patience))

    def _send(self, request: EndpointRequest, patience: RetryPolicy | None = None) -> Reply:
        return self._transport.run(request_with_retries(request, patience or self._build_retry_policy()))

    def _probe(self, request: EndpointRequest) -> bool:
        try:
            self._transport.run(request_with_retries(request, RetryPolicy(self._timeout_s, num_retries=0)))
        except requests.PROBE_ERRORS:
            return False
        return True


class AsyncClient(_ClientBase):
    """`Client` for one event loop: the same methods, with `await`. A cancelled call leaves the endpoint's queue.

    Any number of calls at once: each waits for one of `num_connections`, and its `timeout_s` begins when it has one.
    The `deadline_s` of a call begins at once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = TIMEOUT_S,
        num_retries: int = 3,
        retry_lost: bool = False,
        binary: bool = True,
        num_connections: int = NUM_CONNECTIONS,
        ca: str = "",
        certificate: str = "",
    ) -> None:
        super().__init__(url, timeout_s, num_retries, retry_lost, binary)
        self._transport = AsyncTransport(url, token, num_connections, ca, certificate)
        self._pending_signatures: dict[str, asyncio.Task[ModelMetadata]] = {}  # signatures being fetched

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int | None = None,
        outputs: Collection[str] | None = None,
        deadline_s: float | None = None,
        sticky: str = "",
        track: str = "",
        request_id: str = "",
        parameters: Parameters | None = None,
    ) -> Answer:
        """See `Client.infer`."""
        asked = {"outputs": outputs, "request_id": request_id, "parameters": parameters}
        options = {**asked, "sticky": sticky, "track": track}
        patience = self._build_retry_policy() if deadline_s is None else self._build_infer_policy(deadline_s)
        known = self._signatures.get(model)
        try:
            try:
                signature = known or await self._signature(model, patience)
                request = self._build_infer_request(signature, model, inputs, options, version)
            except ConfigError:
                if known is None:
                    raise
                request = self._build_infer_request(
                    await self._signature(model, patience), model, inputs, options, version
                )
            return decode_answer(await self._send(request, patience))
        except InferenceError as error:
            self._forget_signature(model, error)
            raise

    async def metadata(self, model: str) -> ModelMetadata:
        """See `Client.metadata`."""
        return self._store_signature(model, await self._send(requests.build_metadata_request(model)))

    async def models(self) -> list[IndexedModel]:
        """See `Client.models`."""
        return requests.decode(await self._send(requests.INDEX), list[IndexedModel])

    async def live(self) -> bool:
        """See `Client.live`."""
        return await self._probe(requests.LIVE)

    async def ready(self, model: str | None = None) -> bool:
        """See `Client.ready`."""
        return await self._probe(requests.build_ready_request(model))

    async def statistics(self, model: str) -> list[VersionStatistics]:
        """See `Client.statistics`."""
        return requests.decode_statistics(await self._send(requests.build_statistics_request(model)))

    async def load(self, model: str, **parameters: bool | int | float | str) -> None:
        """See `Client.load`."""
        await self._send(requests.build_load_request(model, parameters), self._build_change_policy(LOAD_TIMEOUT_S))

    async def unload(self, model: str) -> None:
        """See `Client.unload`."""
        await self._send(requests.build_unload_request(model), self._build_change_policy())

    async def status(self) -> EndpointStatus:
        """See `Client.status`."""
        return requests.decode(await self._send(requests.STATUS), EndpointStatus)

    async def rollout(self, action: str, model: str, **details: requests.Value) -> ModelStatus:
        """See `Client.rollout`."""
        request = requests.build_rollout_request({"action": action, "model": model, **details})
        patience = self._build_change_policy(details.get("timeout_s"))
        return requests.decode(await self._send(request, patience), ModelStatus)

    async def act(self, model: str, observation: ArrayLike, episode: Episode | None = None) -> tuple[Any, Episode]:
        """See `Client.act`."""
        request = requests.build_episode_request(model, episode, observation)
        return requests.decode_action(model, await self._send(request, self._build_episode_policy()))

    async def reward(self, episode: Episode, value: float) -> None:
        """See `Client.reward`."""
        request = requests.build_episode_request(episode.model, episode, None, value)
        await self._send(request, self._build_episode_policy())

    async def end_episode(
        self,
        episode: Episode,
        observation: ArrayLike | None = None,
        *,
        reward: float | None = None,
        truncated: bool = False,
    ) -> None:
        """See `Client.end_episode`."""
        request = requests.build_episode_request(
            episode.model, episode, observation, reward, ended=True, truncated=truncated
        )
        await self._send(request, self._build_episode_policy())

    async def close(self) -> None:
        """See `Client.close`."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _signature(self, model: str, patience: RetryPolicy) -> ModelMetadata:
        """Fetch a signature once for all waiting callers; a caller that is cancelled or times out does not affect the
        others."""
        asked = self._pending_signatures.get(model)
        if asked is None:
            asked = self._pending_signatures[model] = asyncio.create_task(self.metadata(model))
            asked.add_done_callback(lambda done: self._on_signature_done(model, done))
        try:
            async with asyncio.timeout(patience.get_remaining_s()):
                return await asyncio.shield(asked)
        except TimeoutError:
            raise timeout_error(patience) from None

    def _on_signature_done(self, model: str, done: asyncio.Task[ModelMetadata]) -> None:
        del self._pending_signatures[model]
        if not done.cancelled():
            done.exception()  # no caller may have awaited it

    async def _send(self, request: EndpointRequest, patience: RetryPolicy | None = None) -> Reply:
        patience = patience or self._build_retry_policy()
        try:
            return await self._transport.run(request_with_retries(request, patience), patience.get_remaining_s())
        except TimeoutError:
            raise timeout_error(patience) from None

    async def _probe(self, request: EndpointRequest) -> bool:
        try:
            await self._transport.run(request_with_retries(request, RetryPolicy(self._timeout_s, num_retries=0)))
        except requests.PROBE_ERRORS:
            return False
        return True
