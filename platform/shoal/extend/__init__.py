"""What a user adds to Shoal in files of their own: interfaces, and what implementations need (docs/extending.md).

| interface                            | used by                                         | entry points           |
|--------------------------------------|-------------------------------------------------|------------------------|
| `AlgorithmConfig`, of an `Algorithm` | `algorithm=my_algorithm.py:MyConfig`            | `shoal.algorithms`     |
| `SyncConfig`, of a `Synchronizer`    | `sync.kind=my_sync.py:MyConfig`                 | `shoal.synchronizers`  |
| `ModelFormat`, of a template         | `shoal models add FILE --format my_format:NAME` | `shoal.formats`        |
| `Tracker`                            | `track=my_tracker.py:MyTracker`                 | `shoal.trackers`       |
| `shoal.sources.StreamSource`         | `shoal.Data(train=MySource())`                  |                        |
| `RunFlow`: a kind of run             | `shoal run my_run.py`                           |                        |
| `RunPanels` of a kind of run         | `shoal report`, `shoal console`                 | `shoal.panels`         |
| `Estimator`, of a step's cost        | `shoal inspect`, the predicted cost of a run    | `shoal.estimators`     |
| `data.FileDataset`                   | `shoal.data.formats`                            | `shoal.data_formats`   |
| `Library`: verbs and displays        | `shoal VERB`                                    | `shoal.libraries`      |

`contracts` has tests to inherit. The other modules here, a room of Shoal each, are for libraries
(docs/stability.md). Names are imported at their first use: some need torch.
"""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.config import Spec
    from shoal.errors import ConfigError, ShoalError
    from shoal.flows.run_flow import RunFlow
    from shoal.plugins.library import Library
    from shoal.registry import Signature, TensorSignature
    from shoal.registry.model_format import ModelFormat
    from shoal.rl.algorithm_config import AlgorithmConfig
    from shoal.rl.algorithms.algorithm import Algorithm, NonFiniteLoss, build_model
    from shoal.rl.algorithms.normalization import Normalizer
    from shoal.rl.algorithms.segments import evaluate_rows, make_grid, to_tensors
    from shoal.rl.experience.queue import ExperienceBatch
    from shoal.rl.local_loop import LocalLoop
    from shoal.rl.spec import RLSpec, experience_spec
    from shoal.runs import RunKind, RunRecorder
    from shoal.runs.panels import Panel, RunPanels
    from shoal.runs.run_reader import MetricValue, Run
    from shoal.runs.tracker import Tracker
    from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig
    from shoal.sync.config import SyncConfig
    from shoal.sync.synchronizer import AllReduce, RankSignals, Replica, Synchronizer
    from shoal.train.launch.predicted_cost import Estimator
    from shoal.wire import ExperienceSpec

__getattr__ = load_on_demand(__name__, "shoal.extend")
