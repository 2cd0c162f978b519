"""A connection to a policy behind an endpoint, as a client with only its URL.

Speaks the Open Inference Protocol over HTTP or https; uses no Ray and holds no weights.

Called by `policy_evaluation`, benchmarks and tests.
"""

from __future__ import annotations

import http.client
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.client.payload import decode_answer, encode_inputs
from shoal.client.retry import Reply, decode_error
from shoal.client.tls import create_tls_context
from shoal.errors import ConnectionLost, InferenceError
from shoal.open_inference.messages import ModelMetadata, Parameters, TensorMetadata
from shoal.weights import WeightSnapshot
from shoal.wire.action_masks import INFO_KEY

if TYPE_CHECKING:
    from shoal.flows.loop_policy import LoopPolicy

NUM_CONNECTIONS = 2  # the endpoint computes for one while this process steps the environments of the other
PATIENCE_S = 60.0  # with an unavailable endpoint: a dead replica restarts within it
_DATATYPES = {"observation": "FP32", "state": "FP32", INFO_KEY: "BOOL"}
_INPUTS = [TensorMetadata(name, datatype, [-1]) for name, datatype in _DATATYPES.items()]
_SIGNATURE = ModelMetadata("a policy", [], "", _INPUTS, [])


class ActionAnswer(NamedTuple):
    """One inference: the output tensors by name, and the version of the weights that computed them."""

    outputs: dict[str, np.ndarray]
    version: int


class PolicyConnection(ABC):
    """A connection for playing episodes.

    cancelled: set by any thread: then `insist` raises ConnectionLost
    """

    cancelled = threading.Event()  # of connections that no thread cancels

    @abstractmethod
    def infer(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> ActionAnswer:
        """The answer to `observations` [B, *obs]; of a recurrent policy to their `states` [B, S], too: None, at the
        beginning of the episodes, is zero. It then has the `next_state`s. Of a policy with action masks to `masks` bool
        [B, K], too. Raises InferenceError with the endpoint's message, or ConnectionLost.

        Retrying is safe: a request changes nothing. See `insist`.
        """

    def insist(
        self,
        observations: np.ndarray,
        patience_s: float = PATIENCE_S,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> ActionAnswer:
        """`infer`, retried while the endpoint is unavailable or answers 503: a replica may be restarting."""
        deadline = time.monotonic() + patience_s
        while not self.cancelled.is_set():
            try:
                return self.infer(observations, states, masks)
            except (InferenceError, ConnectionLost) as error:
                if time.monotonic() > deadline or (isinstance(error, InferenceError) and error.status != 503):
                    raise
            self.cancelled.wait(0.05)
        raise ConnectionLost("the connection was cancelled")

    @abstractmethod
    def close(self) -> None:
        """Release it."""


class PolicyAddress(NamedTuple):
    """One model of an endpoint, and how it acts.

    state_size: numbers in the state of a recurrent policy; 0 of others
    action:     best or sampled; None: as the endpoint acts by default
    """

    url: str
    model: str
    token: str
    state_size: int = 0
    action: str | None = None


class InferenceConnection(PolicyConnection):
    """A kept-alive connection. Not for use by several threads."""

    def __init__(self, address: PolicyAddress, timeout_s: float = 10.0) -> None:
        self._address = address
        parts = urlsplit(address.url)
        host = parts.hostname or ""
        self._connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=create_tls_context(host))
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        )
        self._path = f"{parts.path}/v2/models/{address.model}/infer"
        self._parameters: Parameters = {} if address.action is None else {"action": address.action}

    def infer(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> ActionAnswer:
        inputs = {"observation": observations}
        if self._address.state_size:
            inputs["state"] = np.zeros((len(observations), self._address.state_size)) if states is None else states
        if masks is not None:
            inputs[INFO_KEY] = masks
        outputs = ["action", "next_state"] if self._address.state_size else ["action"]
        # As bytes, which take the endpoint and this client half the time of JSON.
        headers, payload = encode_inputs(_SIGNATURE, inputs, outputs, "", self._parameters, binary=True)
        headers["authorization"] = f"Bearer {self._address.token}"
        try:
            self._connection.request("POST", self._path, payload, headers)
            response = self._connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            reply = Reply(response.status, found, response.read())
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionLost(f"the endpoint did not answer: {error}") from error
        if reply.status != 200:
            raise decode_error(reply)
        answer = decode_answer(reply)
        return ActionAnswer(answer.outputs, answer.version)

    def close(self) -> None:
        self._connection.close()


class RelayedConnection(PolicyConnection):
    """A PolicyConnection whose requests begin in other processes, on the head say, where an endpoint on loopback is.

    call:    `call(function, *arguments)` returns or raises there what the function does
    address: of each process's InferenceConnection
    """

    def __init__(self, call: Callable[..., Any], address: PolicyAddress) -> None:
        self._call, self._address = call, address

    def infer(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> ActionAnswer:
        answer: ActionAnswer = self._call(_infer, self._address, observations, states, masks)
        return answer

    def close(self) -> None:
        """The connections end with their processes."""


def _infer(address: PolicyAddress, *inputs: Any) -> ActionAnswer:
    return _connect_once(address).infer(*inputs)


@cache
def _connect_once(address: PolicyAddress) -> InferenceConnection:
    return InferenceConnection(address)


def connect_policy(address: PolicyAddress, call: Callable[..., Any] | None = None) -> PolicyConnection:
    """A connection from this process, or, given `call`, from where that calls."""
    return InferenceConnection(address) if call is None else RelayedConnection(call, address)


@contextmanager
def connect_policies(
    policies: Sequence[LoopPolicy],
    url: str,
    token: str,
    action: str,
    candidates: Sequence[WeightSnapshot] = (),
    cancelled: threading.Event = PolicyConnection.cancelled,
) -> Iterator[Sequence[Mapping[str, PolicyConnection]]]:
    """Connections to all policies at the endpoint, for such actions, when it serves the candidates; until `cancelled`
    is set, which ends the waiting for that, too."""
    from shoal.serve.on_ray.ingress_front import call_on_head, is_on_head  # loads Serve, as `deploy` has

    with ExitStack() as opened:

        def connect(policy: LoopPolicy) -> PolicyConnection:
            address = PolicyAddress(url, policy.spec.model_name, token, policy.spec.state_size, action)
            connection = connect_policy(address, None if is_on_head() else call_on_head)
            connection.cancelled = cancelled
            opened.callback(connection.close)
            return connection

        result = [{each.name: connect(each) for each in policies} for _ in range(NUM_CONNECTIONS)]
        for each, snapshot in zip(policies, candidates, strict=False):
            observation, mask = each.first_inputs
            wait_for_version(result[0][each.name], observation, snapshot.version, mask=mask)
        yield result


def wait_for_version(
    connection: PolicyConnection,
    observation: np.ndarray,
    version: int,
    timeout_s: float = PATIENCE_S,
    mask: np.ndarray | None = None,
) -> None:
    """Return when `version` or a newer one answers to an observation, and to its action mask, if the policy has masks.
    Raises ConnectionLost after `timeout_s`."""
    masks = {} if mask is None else {"masks": mask[None]}
    deadline = time.monotonic() + timeout_s
    seen = 0
    while time.monotonic() < deadline:
        seen = connection.insist(np.asarray(observation, np.float32)[None], timeout_s, **masks).version
        if seen >= version:
            return
        time.sleep(0.02)
    raise ConnectionLost(f"the endpoint still answers with version {seen}, not {version}, after {timeout_s} s")
