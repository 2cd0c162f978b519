"""`shoal.sweep`, for notebooks and scripts. It attaches this process to a cluster as `shoal.fit` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.api import attachment, load_run, make_train_spec
from shoal.libs.sweep.loop_spec import is_loop_recipe, load_loop_recipe, make_own_space
from shoal.libs.sweep.spec import SweepSpec, check_sweep, remove_target
from shoal.libs.sweep.trials import Sweep, load_sweep
from shoal.search.space import SearchSpace, flatten

if TYPE_CHECKING:
    from shoal.extend.train import Task, TrainSpec


def sweep(
    task: type[Task] | Task | str | TrainSpec,
    space: Mapping[str, Any] | None = None,
    *,
    train: Mapping[str, Any] | None = None,
    register: bool = True,
    **fields: Any,
) -> Sweep:
    """Train a Task several times on a cluster, with values from a search space; register the best network.

    task:   as for `fit`; or a job of the loop, as `actor_learner`: then `train` has fields of `LoopTrialSpec`
    space:  by the path of a field of TrainSpec: a word such as `log(1e-4,1e-1)`, or a list of options; for a job of the
            loop by default that of its algorithm, but for the fields of `train`: then the first trial has the defaults
    train:  the other fields of TrainSpec, nested ones as dicts: `{"stop": {"steps": 500}}`
    fields: of SweepSpec: `trials=20`, `search="optuna"`, `scheduler="asha"`, `gpus_per_trial=0.25`,
            `metric="accuracy"`, `seed=0`

    Returns the trials: `result.find_best().parameters`, `result.rank()`. Each has a run of its own, for `load_run`.
    Raises ConfigError for an impossible space, an unknown field or a metric that is not evaluated, before any work;
    MissingExtra without Optuna; RunError when no trial has finished.

        space = {"optimizer.learning_rate": "log(1e-4,1e-1)"}
        result = shoal.sweep("lenet", space, trials=8, train={"stop": {"steps": 200}})
    """
    if isinstance(task, str) and is_loop_recipe(task):
        loop = load_loop_recipe(task).update(train or {})
        trial = {"loop": loop.model_dump()}
        if space is None:
            trial |= make_own_space(loop, dict(flatten(train or {})))
    else:
        base = make_train_spec(task, train or {})
        if isinstance(task, str) and "target" not in (train or {}).get("stop", {}):
            base = remove_target(base)
        trial = {"train": base.model_dump()}
    if space is not None:
        trial["space"] = SearchSpace.parse(space).describe()
    spec = SweepSpec.parse({**trial, "registers": register, **fields})
    checked = check_sweep(spec)
    attachment.acquire()
    try:
        from shoal.libs.sweep.flow import JOB, run_sweep  # imports ray, which reads its settings from the environment

        return load_sweep(load_run(run_sweep(spec, JOB, checked)))
    finally:
        attachment.release()
