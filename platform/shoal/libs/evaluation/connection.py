"""A connection to a policy behind an endpoint, as a client with only its URL has.

Uses no Ray and holds no weights. Called by `episodes` and `episode_player`.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.client import Answer
from shoal.errors import ConnectionLost, InferenceError
from shoal.extend.serve import Reply, create_tls_context, decode_answer, decode_error
from shoal.wire.action_masks import INFO_KEY

PATIENCE_S = 60.0  # with an unavailable endpoint: a dead replica restarts within it
TIMEOUT_S = 10.0  # of one request
HEADER_LENGTH = "Inference-Header-Content-Length"


class PolicyAddress(NamedTuple):
    """Where a policy answers, and how it acts.

    state_size: numbers in the state of a recurrent policy; 0 of others
    action:     best or sampled; None: as the endpoint acts by default
    """

    url: str
    model: str
    token: str
    state_size: int = 0
    action: str | None = None


class InferenceConnection:
    """One kept-alive connection to one policy of an endpoint, which takes two fifths of the processor time of
    `shoal.Client`. Not for use by several threads."""

    def __init__(self, address: PolicyAddress) -> None:
        self._address, parts = address, urlsplit(address.url)
        host = parts.hostname or ""
        self._connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=create_tls_context(host))
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
        )
        self._path = f"{parts.path}/v2/models/{address.model}/infer"

    def infer(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> Answer:
        """The answer to `observations` [B, *obs]; of a recurrent policy to their `states` [B, S], too: None, at the
        beginning of the episodes, is zero. It then has the `next_state`s. Of a policy with action masks to `masks` bool
        [B, K], too. Raises InferenceError with the endpoint's message, or ConnectionLost.
        """
        # As bytes, which take the endpoint and this client half the time of JSON.
        address = self._address
        parameters = {} if address.action is None else {"parameters": {"action": address.action}}
        inputs = {"observation": np.ascontiguousarray(observations, "<f4")}
        if address.state_size:
            zeros = np.zeros((len(observations), address.state_size))
            inputs["state"] = np.ascontiguousarray(zeros if states is None else states, "<f4")
        if masks is not None:
            inputs[INFO_KEY] = np.ascontiguousarray(masks, np.bool_)
        described = [
            {
                "name": name,
                "datatype": "BOOL" if name == INFO_KEY else "FP32",
                "shape": rows.shape,
                "parameters": {"binary_data_size": rows.nbytes},
            }
            for name, rows in inputs.items()
        ]
        names = ["action", "next_state"] if address.state_size else ["action"]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        head = json.dumps({"inputs": described, "outputs": outputs, **parameters}).encode()
        payload = head + b"".join(rows.tobytes() for rows in inputs.values())
        headers = {
            "Authorization": f"Bearer {address.token}",
            "Content-Type": "application/octet-stream",
            HEADER_LENGTH: str(len(head)),
        }
        try:
            self._connection.request("POST", self._path, payload, headers)
            response = self._connection.getresponse()
            content = {name.lower(): value for name, value in response.getheaders()}
            reply = Reply(response.status, content, response.read())
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionLost(f"the endpoint did not answer: {error}") from error
        if reply.status != 200:
            raise decode_error(reply)
        return decode_answer(reply)

    def close(self) -> None:
        self._connection.close()


_connect_once = cache(InferenceConnection)  # a process that is called keeps its connection


def ask_policy(address: PolicyAddress, *inputs: Any) -> Answer:
    """What `InferenceConnection.infer` gives, in the process that is called."""
    return _connect_once(address).infer(*inputs)


class PolicyConnection:
    """Asks one policy, also while its endpoint is unavailable.

    ask:       of an InferenceConnection: `infer`
    cancelled: set by any thread: then `insist` raises ConnectionLost
    """

    def __init__(self, ask: Callable[..., Answer], cancelled: threading.Event) -> None:
        self._ask, self._cancelled = ask, cancelled

    def insist(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> Answer:
        """Ask until the endpoint answers: it is unavailable, or says 503, while a replica restarts. Raises after
        PATIENCE_S, as `infer` does. Retrying is safe: a request changes nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._cancelled.is_set():
            try:
                return self._ask(observations, states, masks)
            except (InferenceError, ConnectionLost) as error:
                if time.monotonic() > deadline or (isinstance(error, InferenceError) and error.status != 503):
                    raise
            self._cancelled.wait(0.05)
        raise ConnectionLost("the connection was cancelled")


def wait_for_version(
    connection: PolicyConnection, observation: np.ndarray, version: int, mask: np.ndarray | None = None
) -> None:
    """Return when `version` or a newer one answers to an observation, and to its action mask, if the policy has masks.
    Raises ConnectionLost after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    seen = 0
    while time.monotonic() < deadline:
        rows = np.asarray(observation, np.float32)[None]
        seen = connection.insist(rows, masks=None if mask is None else mask[None]).version
        if seen >= version:
            return
        time.sleep(0.02)
    raise ConnectionLost(f"the endpoint still answers with version {seen}, not {version}, after {PATIENCE_S} s")
