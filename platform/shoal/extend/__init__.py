"""What a user adds to Shoal in files of their own: interfaces, and what implementations need (docs/extending.md).

| interface                            | used by                                         | entry points          |
|--------------------------------------|-------------------------------------------------|-----------------------|
| `AlgorithmConfig`, of an `Algorithm` | `algorithm=my_algorithm.py:MyConfig`            | `shoal.algorithms`    |
| `SyncConfig`, of a `Synchronizer`    | `sync.kind=my_sync.py:MyConfig`                 | `shoal.synchronizers` |
| `ModelFormat`, of a template         | `shoal models add FILE --format my_format:NAME` | `shoal.formats`       |
| `Tracker`                            | `track=my_tracker.py:MyTracker`                 | `shoal.trackers`      |
| `shoal.sources.StreamSource`         | `shoal.Data(train=MySource())`                  |                       |
| `Library`: verbs and displays        | `shoal VERB`                                    | `shoal.libraries`     |
| a function of Task and TrainSpec     | `shoal inspect`, the predicted cost of a run    | `shoal.estimators`    |

Names are imported at their first use: some need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.plugins.find import find_extension

if TYPE_CHECKING:
    from shoal.plugins.library import Library
    from shoal.registry import Signature, TensorSignature
    from shoal.registry.model_format import ModelFormat
    from shoal.rl.algorithm_config import AlgorithmConfig
    from shoal.rl.algorithms.algorithm import Algorithm, NonFiniteLoss, build_model
    from shoal.rl.algorithms.normalization import Normalizer
    from shoal.rl.algorithms.segments import evaluate_rows, make_grid, to_tensors
    from shoal.rl.experience.queue import ExperienceBatch
    from shoal.rl.spec import RLSpec
    from shoal.runs.run_reader import MetricValue, Run
    from shoal.runs.tracking.tracker import Tracker
    from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig
    from shoal.sync.config import SyncConfig
    from shoal.sync.rank_signals import RankSignals
    from shoal.sync.synchronizer import AllReduce, Replica, Synchronizer
    from shoal.wire import ExperienceSpec

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "AllReduce",
    "Arrays",
    "ExperienceBatch",
    "ExperienceSpec",
    "Forward",
    "Library",
    "MetricValue",
    "ModelFormat",
    "NonFiniteLoss",
    "Normalizer",
    "PeerSync",
    "RLSpec",
    "RankSignals",
    "Replica",
    "Run",
    "Signature",
    "SyncConfig",
    "Synchronizer",
    "TemplateConfig",
    "TensorSignature",
    "Tracker",
    "build_model",
    "evaluate_rows",
    "make_grid",
    "to_tensors",
]

_HOMES = {
    **dict.fromkeys(("Algorithm", "NonFiniteLoss", "build_model"), "shoal.rl.algorithms.algorithm"),
    **dict.fromkeys(("evaluate_rows", "make_grid", "to_tensors"), "shoal.rl.algorithms.segments"),
    **dict.fromkeys(("Arrays", "Forward", "TemplateConfig"), "shoal.serve.model.formats.template"),
    **dict.fromkeys(("MetricValue", "Run"), "shoal.runs.run_reader"),
    **dict.fromkeys(("Signature", "TensorSignature"), "shoal.registry"),
    **dict.fromkeys(("AllReduce", "Replica", "Synchronizer"), "shoal.sync.synchronizer"),
    "AlgorithmConfig": "shoal.rl.algorithm_config",
    "ExperienceBatch": "shoal.rl.experience.queue",
    "ExperienceSpec": "shoal.wire",
    "Library": "shoal.plugins.library",
    "ModelFormat": "shoal.registry.model_format",
    "Normalizer": "shoal.rl.algorithms.normalization",
    "RLSpec": "shoal.rl.spec",
    "RankSignals": "shoal.sync.rank_signals",
    "SyncConfig": "shoal.sync.config",
    "Tracker": "shoal.runs.tracking.tracker",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return find_extension(name, "shoal.extend", {})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
