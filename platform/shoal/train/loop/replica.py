"""What the Trainer gives to a synchronizer: this rank's part of the run, as far as other replicas need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shoal.sync.synchronizer import Replica, ReplicaState
from shoal.train.loop.components import TrainComponents


@dataclass(frozen=True, kw_only=True)
class TrainReplica(Replica):
    """A Replica with all of its components, for synchronizers that take part in the loop, such as Hogwild's."""

    parts: TrainComponents


def make_replica_state(parts: TrainComponents) -> ReplicaState:
    def get() -> dict[str, Any]:
        return {"state": parts.state(), "counts": parts.get_counts()}

    def load(found: dict[str, Any]) -> None:
        parts.load_state(found["state"])
        parts.load_counts(found["counts"])

    def get_weights() -> tuple[float, float]:
        weight = parts.model.step_weight
        if isinstance(weight, torch.Tensor):  # of a `Mean`, by which its gradients are not multiplied yet
            return float(weight), float(weight)
        return 1.0, parts.training.relative_share

    return ReplicaState(get, load, get_weights)
