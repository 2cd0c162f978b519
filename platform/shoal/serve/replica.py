"""What a replica of an endpoint is: predictor and versions, the batcher before them, the follower behind, app on top.

Made and closed by the Ray shell, or by a test, on the event loop that serves. Plain Python: knows nothing of Ray.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from shoal.errors import ShoalError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.batcher import Batcher
from shoal.serve.endpoint import EndpointSpec
from shoal.serve.follower import WeightFollower
from shoal.serve.open_inference import OpenInferenceApp
from shoal.serve.options import ModelOptions
from shoal.serve.predictor import Predictor
from shoal.serve.versions import Prediction, Versions
from shoal.weights import WeightSource

# A thread that computes in Python (a forward's own code, weights being staged) makes the event loop wait this long for
# its turn. The default of 5 ms is an eternity here; below 1 ms nothing more is gained.
SWITCH_INTERVAL_S = 0.001


class EndpointReplica:
    """Fulfils `open_inference.Model`. `app` is the ASGI application."""

    def __init__(self, spec: EndpointSpec, factory: ModelFactory, signature: Signature, source: WeightSource) -> None:
        """Must run on the event loop that will serve. Raises ConfigError."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        predictor = Predictor(factory, signature, ModelOptions(), spec.torch_threads)
        self._versions = Versions(predictor)
        self._batcher: Batcher[dict[str, np.ndarray], Prediction] = Batcher(on_thread_start=predictor.enter_thread)
        self._queue = self._batcher.add_queue(
            spec.name,
            lambda group, requests: self._versions.predict_batch(requests),
            max_batch_rows=spec.model.max_batch_size,
            max_queue_rows=spec.model.max_queue_size,
        )
        self._follower = WeightFollower(source, self._versions)
        self.app = OpenInferenceApp(
            spec.name,
            signature,
            self,
            max_body_bytes=spec.max_body_bytes,
            bearer=spec.token and f"Bearer {spec.token.get_secret_value()}".encode(),
        )

    @property
    def version(self) -> int:
        return self._versions.version

    async def infer(self, inputs: dict[str, np.ndarray], num_rows: int) -> Prediction:
        return (await self._queue.submit(inputs, num_rows)).answer

    def check_health(self) -> None:
        """Raises ShoalError when a thread of this replica has died, so that it is replaced."""
        if not (self._batcher.alive and self._follower.alive):
            raise ShoalError("a thread of this replica has died")

    def stats(self) -> dict[str, Any]:
        """The application's and the batcher's counters, and who counts."""
        rejected = self._follower.rejected
        return {
            "pid": os.getpid(),
            **self.app.stats(),
            "rejected_version": rejected,
            "batcher": asdict(self._queue.counts()),
        }

    def close(self) -> None:
        """Stop following, fail what is queued. Idempotent."""
        self._follower.close(timeout_s=2.0)
        self._batcher.close(timeout_s=2.0)
