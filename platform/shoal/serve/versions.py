"""The versions of one model in one replica: which are loaded, and which one answers.

Called by the follower, which stages and flips, and by the replica's forward. Never reads a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import InferenceError
from shoal.serve.call import Arrays
from shoal.serve.predictor import LoadedModel, Predictor
from shoal.weights import WeightSnapshot


@dataclass(frozen=True)
class Prediction:
    """The outputs for one request, and the version of the weights that made all of them."""

    outputs: dict[str, np.ndarray]
    version: int


class Versions:
    """One version that serves and, at times, one beside it that is staged."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._staged: LoadedModel | None = None
        self._serving: LoadedModel | None = None

    @property
    def version(self) -> int:
        """The version that answers the next batch; 0 before the first."""
        serving = self._serving
        return serving.version if serving else 0

    def stage(self, snapshot: WeightSnapshot) -> None:
        """Load a version beside the one that serves. Raises WeightsError, and then nothing has changed."""
        self._staged = self._predictor.load(snapshot)

    def flip(self) -> int:
        """Let the staged version answer from the next batch on; the version that serves now."""
        if self._staged is not None:
            self._serving, self._staged = self._staged, None
        return self.version

    def predict_batch(self, requests: Sequence[Arrays]) -> list[Prediction]:
        """One batch, by one version. Raises InferenceError: 503 without weights, 500 for bad outputs."""
        serving = self._serving
        if serving is None:
            raise InferenceError(503, "no weights have been loaded yet; try again later")
        return [Prediction(outputs, serving.version) for outputs in serving.predict_batch(requests)]
