"""Playing episodes through an endpoint, as a client that has nothing but its URL.

Called by flows and by tests. Speaks the Open Inference Protocol over plain HTTP; knows no Ray and holds no weights.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from contextlib import ExitStack, closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.actor.environment import make_environment, translate_environment_errors
from shoal.errors import ConnectionLost, InferenceError, RunError

PATIENCE_S = 60.0  # with an endpoint that is away: a replica that died is back by then


class Answer(NamedTuple):
    """One inference: the output tensors by name, and the version of the weights that made them."""

    outputs: dict[str, np.ndarray]
    version: int


class InferenceConnection:
    """One kept-alive connection to one model of an endpoint. Not for use by several threads."""

    def __init__(self, url: str, model: str, token: str, timeout_s: float = 10.0) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        self._path = f"/v2/models/{model}/infer"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def infer(self, observations: np.ndarray) -> Answer:
        """Ask for `observations` [B, *obs]. Raises InferenceError with the endpoint's words, or ConnectionLost.

        Asking again is safe: it changes nothing. See `insist`.
        """
        tensor = {
            "name": "observation",
            "datatype": "FP32",
            "shape": list(observations.shape),
            "data": observations.ravel().tolist(),
        }
        try:
            self._connection.request("POST", self._path, json.dumps({"inputs": [tensor]}), self._headers)
            response = self._connection.getresponse()
            body: dict[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise ConnectionLost(f"the endpoint did not answer: {error}") from error
        if response.status != 200:
            raise InferenceError(response.status, str(body.get("error", body)))
        outputs = {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in body["outputs"]}
        return Answer(outputs, int(body["model_version"]))

    def insist(self, observations: np.ndarray, patience_s: float = PATIENCE_S) -> Answer:
        """`infer`, again and again while the endpoint is away or says 503: a replica may be on its way back."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self.infer(observations)
            except (InferenceError, ConnectionLost) as error:
                if time.monotonic() > deadline or (isinstance(error, InferenceError) and error.status != 503):
                    raise
            time.sleep(0.05)

    def close(self) -> None:
        self._connection.close()


class Evaluation(NamedTuple):
    """`returns` of the episodes, in order; how many requests and seconds that took; the versions that answered."""

    returns: list[float]
    num_requests: int
    versions: set[int]
    duration_s: float

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    @property
    def sure_return(self) -> float:
        """The mean less twice its standard error: what the mean over other episodes will hardly fall below."""
        if len(self.returns) < 2:
            return self.mean_return
        return self.mean_return - 2.0 * float(np.std(self.returns, ddof=1)) / math.sqrt(len(self.returns))


def wait_for_version(
    connection: InferenceConnection, observation: np.ndarray, version: int, timeout_s: float = PATIENCE_S
) -> None:
    """Return when `version` or a newer one answers. Raises ConnectionLost after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    seen = 0
    while time.monotonic() < deadline:
        seen = connection.insist(np.asarray(observation, np.float32)[None], timeout_s).version
        if seen >= version:
            return
        time.sleep(0.02)
    raise ConnectionLost(f"the endpoint still answers with version {seen}, not {version}, after {timeout_s} s")


def play_through(
    connection: InferenceConnection, env: str, num_episodes: int, seed: int, max_rows: int, timeout_s: float = 300.0
) -> Evaluation:
    """Play `num_episodes` greedily, side by side: each request carries one observation of every unfinished episode, or
    of `max_rows` of them where there are more: what the endpoint takes at once.

    Raises RunError when they have not ended after `timeout_s`, ConfigError for what an environment raises, and what
    `InferenceConnection.insist` does.
    """
    started = time.monotonic()
    with ExitStack() as opened:  # what cannot be played to its end is closed too: there may be another trial
        environments = [opened.enter_context(closing(make_environment(env))) for _ in range(num_episodes)]
        with translate_environment_errors(env):
            observations = [each.reset(seed=seed + index)[0] for index, each in enumerate(environments)]
        returns = [0.0] * num_episodes
        playing = list(range(num_episodes))
        versions: set[int] = set()
        num_requests = 0
        while playing:
            if time.monotonic() - started > timeout_s:
                still_s = f"{len(playing)} of {num_episodes} episodes of {env} have not ended after {timeout_s:g} s"
                raise RunError(f"{still_s}: give the environment a time limit, or raise eval_timeout_s")
            actions: list[int] = []
            for start in range(0, len(playing), max_rows):
                rows = [observations[index] for index in playing[start : start + max_rows]]
                answer = connection.insist(np.stack(rows).astype(np.float32))
                num_requests += 1
                versions.add(answer.version)
                actions += answer.outputs["action"].astype(int).tolist()
            still = []
            for index, action in zip(playing, actions, strict=True):
                with translate_environment_errors(env):
                    observations[index], reward, terminated, truncated, _ = environments[index].step(action)
                returns[index] += float(reward)
                if not (terminated or truncated):
                    still.append(index)
            playing = still
    return Evaluation(returns, num_requests, versions, time.monotonic() - started)
