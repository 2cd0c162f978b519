"""The two clients of an endpoint, blocking and asynchronous: the same calls, NumPy arrays in and out.

    with Client("http://127.0.0.1:8000", token=TOKEN) as client:
        answer = client.infer("fashion", images, deadline_s=0.1)
        answer["output"].argmax(1), answer.version

Used by programs, and by the command line. `payload` and `requests` build the requests, `retry` decides on retries. A
client fetches a model's signature once, to convert lists and arrays of float64 to the model's datatypes.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from numpy.typing import ArrayLike

from shoal.client import requests
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.client.payload import Answer, Inputs, decode_answer, encode_inputs, encode_rows
from shoal.client.requests import Episode
from shoal.client.retry import EndpointRequest, Reply, RetryPolicy, request_with_retries, timeout_error
from shoal.client.streamed_text import PATHS, Messages, StreamedText, build_body
from shoal.client.transport import AsyncTransport, BlockingTransport
from shoal.errors import ConfigError, ConnectionLost, InferenceError
from shoal.frame import find_names
from shoal.open_inference.messages import IndexedModel, ModelMetadata, Parameters, Statistics, VersionStatistics

TIMEOUT_S = 75.0  # longer than the ingress waits for an answer: the client hears what became of its request
NUM_CONNECTIONS = 100
# A change returns once every replica has it, or with the endpoint's error when that takes longer than this.
CHANGE_TIMEOUT_S, LOAD_TIMEOUT_S = 120.0, 300.0
CHANGE_MARGIN_S = 30.0  # for that error to arrive
MAX_TIMEOUT_S = 1e9  # the largest timeout of a socket, thirty years
P = ParamSpec("P")
T = TypeVar("T")


class _Call(Generic[P, T]):
    """A method of both clients, written once as a coroutine function. `AsyncClient` has it as it is. `Client` runs it
    to its end, since what it awaits there blocks and never suspends."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        @functools.wraps(function)
        def run(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
            try:
                function(client, *args, **options).send(None)
            except StopIteration as ended:
                result: T = ended.value
                return result
            raise AssertionError("a call of the blocking client was suspended")

        self._awaited, self._run = function, run

    @overload
    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type[AsyncClient]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: _ClientBase | None, owner: type[_ClientBase]) -> Callable[..., Any]: ...
    def __get__(self, client: _ClientBase | None, owner: type[_ClientBase]) -> Callable[..., Any]:
        function = self._run if issubclass(owner, Client) else self._awaited
        return function if client is None else MethodType(function, client)


class _ClientBase:
    """The calls of both clients, their settings and the cached signatures."""

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
        if type(num_retries) is not int or num_retries < 0:
            raise ConfigError("num_retries", num_retries, "is not a number of retries", "give 0 or more")
        self.url = url
        self._timeout_s, self._num_retries = _parse_timeout("timeout_s", timeout_s), num_retries
        self._retry_lost, self._binary = retry_lost, binary
        self._signatures: dict[str, ModelMetadata] = {}
        self._connect(url, token, num_connections, ca, certificate)

    @_Call
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

        def build(signature: ModelMetadata) -> EndpointRequest:
            headers, body = encode_inputs(signature, inputs, outputs, request_id, parameters, binary=self._binary)
            return requests.build_infer_request(model, version, headers, body, sticky=sticky, track=track)

        policy = self._build_infer_policy(deadline_s)
        known = self._signatures.get(model)
        try:
            try:
                request = build(known or await self._fetch_signature(model, policy))
            except ConfigError:
                if known is None:
                    raise
                # The cached signature may be of another model, which had the name before.
                request = build(await self._fetch_signature(model, policy))
            return decode_answer(await self._send(request, policy))
        except InferenceError as error:
            if error.status in (404, 422):  # of the model or a tensor: the name may belong to another model now
                self._signatures.pop(model, None)
            raise

    @_Call
    async def predict(
        self,
        model: str,
        rows: Any,
        *,
        version: int | None = None,
        deadline_s: float | None = None,
        sticky: str = "",
        track: str = "",
        rows_per_request: int = 64,
    ) -> Any:
        """Compute the model's outputs for rows as they are: {"age": 72, "plan": "basic", "since": "2025-05-31"}.

        rows: one dict, which gets one dict of outputs; a list of dicts, a DataFrame or an Arrow table, which get a
              list. None, NaN, NaT are gaps; further columns of a frame are left out. Values may be of NumPy and pandas

        The other arguments are those of `infer`. Raises InferenceError, with the column at fault as `field`;
        ConfigError for values of other types; ConnectionLost.
        """
        policy, found = self._build_infer_policy(deadline_s), list[Any]()
        inputs = [] if find_names(rows) is None else (await self._fetch_signature(model, policy)).inputs
        for body in encode_rows(rows, rows_per_request, inputs):
            headers = {"content-type": "application/json"}
            request = requests.build_infer_request(
                model, version, headers, body, sticky=sticky, track=track, action="rows"
            )
            found.append(requests.decode(await self._send(request, policy), Any))
        return found[0] if isinstance(rows, Mapping) else [row for part in found for row in part]

    @_Call
    async def has_chat(self, model: str) -> bool:
        """Whether a language model has a chat template, without which it continues texts alone. Raises InferenceError:
        404 for a model that writes no text."""
        known = requests.decode(await self._send(requests.ask_model(model, below="/v1/models/")), dict[str, Any])
        return bool(known.get("has_chat_template"))

    @_Call
    async def metadata(self, model: str) -> ModelMetadata:
        """Fetch the model's inputs, outputs and versions, without the cache."""
        return await self._fetch_metadata(model, self._build_retry_policy())

    @_Call
    async def models(self) -> list[IndexedModel]:
        """List every version of every model of the endpoint, with its state."""
        return requests.decode(await self._send(requests.INDEX), list[IndexedModel])

    @_Call
    async def live(self) -> bool:
        """Whether the endpoint answers."""
        return await self._probe(requests.LIVE)

    @_Call
    async def ready(self, model: str | None = None) -> bool:
        """Whether the endpoint, or one of its models, is ready for requests."""
        return await self._probe(requests.READY if model is None else requests.ask_model(model, "/ready"))

    @_Call
    async def statistics(self, model: str) -> list[VersionStatistics]:
        """The protocol's statistics of each version, from the replica that answers."""
        return requests.decode(await self._send(requests.ask_model(model, "/stats")), Statistics).model_stats

    @_Call
    async def load(self, /, model: str, **parameters: bool | int | float | str) -> None:
        """Load a registered model on every replica; returns once all have it."""
        request = requests.build_repository_request("load", model, parameters)
        await self._send(request, self._build_change_policy(LOAD_TIMEOUT_S))

    @_Call
    async def unload(self, model: str) -> None:
        """Unload a model on every replica, once its waiting requests are answered."""
        await self._send(requests.build_repository_request("unload", model, {}), self._build_change_policy())

    @_Call
    async def status(self) -> EndpointStatus:
        """The status of the full endpoint, from its controller."""
        return requests.decode(await self._send(requests.STATUS), EndpointStatus)

    @_Call
    async def rollout(self, /, action: str, model: str, **details: requests.Value) -> ModelStatus:
        """Change the rollout of a model (administrators only); returns the model's new status.

        action: canary, promote, rollback, shadow, deploy, set, delete, metric
        details: the change's fields; `from_version` is the version that a rollback should leave, so that it cannot go
                 back twice, `timeout_s` limits the wait, and
                 `program` is the word by which the audit log names the program that asks
        """
        request = requests.build_rollout_request({"action": action, "model": model, **details})
        policy = self._build_change_policy(details.get("timeout_s"))
        return requests.decode(await self._send(request, policy), ModelStatus)

    @_Call
    async def act(self, model: str, observation: ArrayLike, episode: Episode | None = None) -> tuple[Any, Episode]:
        """Ask a live policy for an action that will be rewarded, of a run with `learn_from_endpoint=true`.

            action, episode = client.act("cartpole", observation)
            client.reward(episode, 1.0)
            action, episode = client.act("cartpole", observation, episode)
            client.end_episode(episode, reward=1.0)

        observation: one, without a row axis
        episode:     the one to continue; None begins one

        An episode that is not continued for `gateway.episode_timeout_s` of the run expires; without a reward for its
        last action it teaches nothing. Raises InferenceError: 404 for a model that does not learn, 410 for an episode
        that has ended or expired.
        """
        request = requests.build_episode_request(model, episode, observation)
        return requests.decode_action(model, await self._send(request, self._build_episode_policy()))

    @_Call
    async def reward(self, episode: Episode, value: float) -> None:
        """Add to the reward of the episode's last action. Raises as `act`."""
        request = requests.build_episode_request(episode.model, episode, None, value)
        await self._send(request, self._build_episode_policy())

    @_Call
    async def end_episode(
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
        await self._send(request, self._build_episode_policy())

    # What each client does in its own way.

    def _connect(self, url: str, token: str, num_connections: int, ca: str, certificate: str) -> None:
        raise NotImplementedError

    async def _exchange(self, request: EndpointRequest, policy: RetryPolicy) -> Reply:
        raise NotImplementedError

    async def _fetch_signature(self, model: str, policy: RetryPolicy) -> ModelMetadata:
        return await self._fetch_metadata(model, policy)

    # What they share.

    async def _fetch_metadata(self, model: str, policy: RetryPolicy) -> ModelMetadata:
        reply = await self._send(requests.ask_model(model), policy)
        signature = self._signatures[model] = requests.decode(reply, ModelMetadata)
        return signature

    async def _send(self, request: EndpointRequest, policy: RetryPolicy | None = None) -> Reply:
        return await self._exchange(request, policy or self._build_retry_policy())

    async def _probe(self, request: EndpointRequest) -> bool:
        try:
            await self._send(request, RetryPolicy(self._timeout_s, num_retries=0))
        except (InferenceError, ConnectionLost):
            return False
        return True

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

    def _connect(self, url: str, token: str, num_connections: int, ca: str, certificate: str) -> None:
        self._transport = BlockingTransport(url, token, num_connections, ca, certificate)

    async def _exchange(self, request: EndpointRequest, policy: RetryPolicy) -> Reply:
        return await request_with_retries(request, policy, self._transport)

    def chat(self, model: str, messages: Messages, *, sticky: str = "", track: str = "", **fields: Any) -> StreamedText:
        """The next message of a conversation, by a language model. Its first token has come.

            for part in client.chat("smollm", "What is a shoal?", max_tokens=60):
                print(part, end="", flush=True)

        model:    NAME, NAME@VERSION or NAME:ADAPTER
        messages: [{"role": "user", "content": "..."}, ...]; a text is one of the user's
        fields:   of the HTTP API: max_tokens, temperature (1 unless given), seed, stop, deadline_s, swap, ...

        Raises InferenceError, with the field at fault; ConnectionLost, ConfigError.
        """
        return self._write(model, "messages", messages, sticky, track, **fields)

    def generate(self, model: str, prompt: str, *, sticky: str = "", track: str = "", **fields: Any) -> StreamedText:
        """A text continued by a language model, by 16 tokens unless `max_tokens` is given. Otherwise as `chat`."""
        return self._write(model, "prompt", prompt, sticky, track, **fields)

    @_Call
    async def _write(self, /, model: str, given: str, value: Any, *side: str, **fields: Any) -> StreamedText:
        request = requests.build_text_request(PATHS[given], build_body(model, given, value, fields), *side)
        chunks = (await self._send(request)).chunks
        assert chunks is not None
        return StreamedText(chunks)

    def close(self) -> None:
        """Close every connection. Idempotent; later calls raise Closed."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(_ClientBase):
    """`Client` for one event loop: the same methods, with `await`. A cancelled call leaves the endpoint's queue.

    Any number of calls at once: each waits for one of `num_connections`, and its `timeout_s` begins when it has one.
    The `deadline_s` of a call begins at once.
    """

    def _connect(self, url: str, token: str, num_connections: int, ca: str, certificate: str) -> None:
        self._transport = AsyncTransport(url, token, num_connections, ca, certificate)
        self._pending_signatures: dict[str, asyncio.Task[ModelMetadata]] = {}  # signatures being fetched

    async def _exchange(self, request: EndpointRequest, policy: RetryPolicy) -> Reply:
        try:
            async with self._transport.reserve(policy.get_remaining_s()):
                return await request_with_retries(request, policy, self._transport)
        except TimeoutError:
            raise timeout_error(policy) from None

    def _build_infer_policy(self, deadline_s: float | None) -> RetryPolicy:
        return self._build_retry_policy() if deadline_s is None else super()._build_infer_policy(deadline_s)

    async def _fetch_signature(self, model: str, policy: RetryPolicy) -> ModelMetadata:
        """Fetch a signature once for all waiting callers; a caller that is cancelled or times out does not affect the
        others."""

        def forget(task: asyncio.Task[ModelMetadata]) -> None:
            del self._pending_signatures[model]
            if not task.cancelled():
                task.exception()  # no caller may have awaited it

        task = self._pending_signatures.get(model)
        if task is None:
            task = self._pending_signatures[model] = asyncio.create_task(self.metadata(model))
            task.add_done_callback(forget)
        try:
            async with asyncio.timeout(policy.get_remaining_s()):
                return await asyncio.shield(task)
        except TimeoutError:
            raise timeout_error(policy) from None

    async def close(self) -> None:
        """See `Client.close`."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
