"""The second order: two towers behind an endpoint score the candidates again, within a deadline.

Called by each request that has candidates. An answer that is late, or an endpoint that is absent or rejects the
request, leaves the first order; each outcome is counted and shown on the page. Imports no torch: the client is HTTP.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from films.factorisation import Floats, Ints
from shoal.client import Client
from shoal.errors import ConfigError, ConnectionLost, InferenceError

MAX_HISTORY = 50  # the newest ratings that the user tower sees
Outcome = Literal["off", "reranked", "late", "absent", "rejected"]


@dataclass(frozen=True)
class Reranking:
    """`order` [C]: positions among the candidates, the best first. `version`: of the towers; None: the first order."""

    order: Ints
    outcome: Outcome
    version: int | None = None


class Reranker:
    """A client of the towers at `url`, for any number of threads; with "" every order stays the first one.

    deadline_s: for one call, including the connection
    """

    def __init__(self, url: str, model: str, deadline_s: float, token: str = "") -> None:
        self.url, self._model, self._deadline_s = url, model, deadline_s
        self._client = Client(url, token=token, num_retries=0) if url else None
        self._lock, self._counts = threading.Lock(), Counter[Outcome]()

    def rerank(self, rated: Ints, ratings: Floats, candidates: Ints) -> Reranking:
        """Order `candidates` [C], film ids, for someone who has rated `rated` [H], from old to new."""
        reranking = self._ask(rated, ratings, candidates)
        with self._lock:
            self._counts[reranking.outcome] += 1
        return reranking

    def counts(self) -> dict[Outcome, int]:
        """How many orders had each outcome, since the process began."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _ask(self, rated: Ints, ratings: Floats, candidates: Ints) -> Reranking:
        first = np.arange(len(candidates))
        if self._client is None or not len(candidates) or not len(rated):
            return Reranking(first, "off")
        missing = max(MAX_HISTORY - len(rated), 0)  # rows of one length share a batch at the endpoint
        inputs = {
            "history": np.pad(rated[-MAX_HISTORY:], (0, missing))[None],
            "ratings": np.pad(ratings[-MAX_HISTORY:], (0, missing))[None].astype(np.float32),
            "candidates": candidates[None],
        }
        try:
            answer = self._client.infer(self._model, inputs, deadline_s=self._deadline_s)
        except ConnectionLost:
            return Reranking(first, "absent")
        except InferenceError as error:
            return Reranking(first, "late" if error.status == 504 else "rejected")
        except ConfigError:  # a model of this name with other inputs
            return Reranking(first, "rejected")
        scores = next(iter(answer.values()))
        if scores.shape != inputs["candidates"].shape:
            return Reranking(first, "rejected")
        return Reranking(np.argsort(-scores[0], kind="stable"), "reranked", answer.version)
