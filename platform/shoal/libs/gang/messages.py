"""What a replica and its workers send each other, over connections of a secret.

| from     | to                | message                                          | answer                        |
|----------|-------------------|--------------------------------------------------|-------------------------------|
| replica  | a spare worker    | BuildModel, before JoinGang                      | WorkerAnswer                  |
| replica  | every worker      | JoinGang: its rank and peers                     | WorkerAnswer: a store's port  |
| replica  | every worker      | LoadVersion, DropVersion                         | WorkerAnswer to LoadVersion   |
| replica  | every worker      | RunBatch: the inputs of a micro-batch            | WorkerAnswer of the last one  |
| worker   | the next stage's  | the micro-batch's activation, or the error       | none                          |

Each connection carries its messages in order, and all workers get the same order, so that nothing needs a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.extend.registry import ModelFactory
from shoal.extend.serve import TemplateConfig
from shoal.extend.sync import ChannelAddress
from shoal.libs.gang.plan import GangPlan
from shoal.weights import WeightFile


@dataclass(frozen=True)
class BuildModel:
    """Build a model without weights and drop it: what this imports is there when a version is to be loaded."""

    factory: ModelFactory


@dataclass(frozen=True)
class JoinGang:
    """The first message to a worker that is no spare one.

    next: the worker of the next stage, to which activations go; None without one
    store: where workers that split layers find each other; None without, and for the one that opens it
    """

    rank: int
    size: int
    splits_layers: bool
    next: ChannelAddress | None = None
    store: tuple[str, int] | None = None


@dataclass(frozen=True)
class LoadVersion:
    """Load a version, to be named by `key`."""

    key: int
    config: TemplateConfig
    plan: GangPlan
    file: WeightFile


@dataclass(frozen=True)
class DropVersion:
    """Free a version."""

    key: int


@dataclass(frozen=True)
class RunBatch:
    """Compute a micro-batch."""

    key: int
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class WorkerAnswer:
    """What became of a message: a value, or an error."""

    value: Any = None
    error: Exception | None = None
