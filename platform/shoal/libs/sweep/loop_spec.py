"""A trial of a sweep that is a run of the loop: external actors teach a policy, in the process of the trial.

Owns the spec of such a trial, where it comes from, and the checks before a sweep of them. Called by `spec` and by
`api`. Imports no Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from pydantic import Field

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.extend.flows import MEAN_RETURN, ActorLearnerSpec, is_loop_job, require_local
from shoal.extend.registry import AliasNames
from shoal.extend.rl import RLSpec
from shoal.extend.train import find_source_file, load_task_file, unload_if_changed
from shoal.search.space import SearchSpace

# Where a trial runs, how long, and what it leaves.
_SAME = (
    "recipe",
    "env",
    "actors",
    "stop",
    "reports",
    "model_name",
    "aliases",
    "learn_from_endpoint",
    "wait",
    "priority",
    "track",
)
_SAME_INNER = ("learner.device", "learner.replicas", "gateway.host", "gateway.port", "gateway.curve")


class LoopStopSpec(Spec):
    """When a trial ends: at the first of these. Trials are compared after as much of it.

    steps:  environment steps of all its actors together
    wall_s: seconds from its first segment, without the time between two attempts
    """

    steps: int | None = Field(default=None, ge=1)
    wall_s: float | None = Field(default=None, gt=0)

    def compute_progress(self, steps: int, elapsed_s: float) -> float:
        """The finished share of a trial, 1 at its end."""
        shares = [0.0 if self.steps is None else steps / self.steps]
        shares.append(0.0 if self.wall_s is None else elapsed_s / self.wall_s)
        return min(1.0, max(shares))


class LoopTrialSpec(RLSpec):
    """One trial.

    recipe:  the job whose `spec()` it begins with: a file of ./jobs, or `my_job.py`
    actors:  processes that the trial starts, and ends with itself
    reports: how often it reports its mean return, evenly over its budget: by these the scheduler decides
    model_name, aliases: of the best trial's policy in the registry
    """

    recipe: str = ""
    actors: int = Field(default=2, ge=1)
    stop: LoopStopSpec = LoopStopSpec()
    reports: int = Field(default=20, ge=1)
    model_name: str = "policy"
    aliases: AliasNames | None = None


def make_own_space(loop: LoopTrialSpec, fixed: Collection[str]) -> dict[str, dict[str, Any]]:
    """The `space` of a sweep that is given none, that of its algorithm without the `fixed` paths, and the `first`
    trial's values, which are those of `loop`. Raises ConfigError where nothing is left to search."""
    words = {f"algorithm.{name}": word for name, word in loop.algorithm.search_space.items()}
    space = SearchSpace.parse({path: word for path, word in words.items() if path not in fixed})
    first = {path: getattr(loop.algorithm, path.partition(".")[2]) for path in space}
    return {"space": {path: str(each.include(first[path])) for path, each in space.items()}, "first": first}


def is_loop_recipe(task: str) -> bool:
    """Whether what `task` names is a job of the loop, and no Task. Reads its file, and runs nothing of it."""
    path = find_source_file(task)
    return path is not None and is_loop_job(path)


def load_loop_recipe(recipe: str) -> LoopTrialSpec:
    """A trial of a job of the loop, without its target and its endpoint. Raises ConfigError."""
    unload_if_changed(recipe)
    path = find_source_file(recipe)
    if path is None or not path.is_file():
        raise ConfigError("recipe", recipe, "is no file of ./jobs", "name one, as in actor_learner or my_job.py")
    make_spec = getattr(load_task_file(path, recipe), "spec", None)
    base = make_spec() if make_spec is not None else None
    if not isinstance(base, ActorLearnerSpec):
        problem = f"{path.name}'s spec() gave a {type(base).__name__}" if make_spec else f"{path.name} has no spec()"
        raise ConfigError("recipe", recipe, problem, "define spec(), which returns an ActorLearnerSpec")
    values: dict[str, Any] = {name: getattr(base, name) for name in RLSpec.model_fields}
    values |= {"recipe": recipe, "model_name": base.model_name, "aliases": base.aliases}
    return LoopTrialSpec.parse({**values, "learn_from_endpoint": False})


def require_loop_fields(loop: LoopTrialSpec, space: SearchSpace) -> None:
    """Raise ConfigError for a budget that never ends, what a trial cannot have, and what all trials have in common."""
    if loop.stop == LoopStopSpec():
        problem = "has no number of steps or seconds: nothing says when to end a trial"
        raise ConfigError("stop", None, problem, "give stop.steps=100000, or stop.wall_s=60")
    require_local(loop)
    for path in space:
        if path.split(".")[0] in _SAME or path in _SAME_INNER:
            raise ConfigError(path, str(space[path]), "is the same in all trials of a sweep", "fix its value instead")


def require_loop_search(search: str, metric: str, direction: str, reports: int, *, uses_asha: bool) -> None:
    """Raise ConfigError for a search, a metric or a direction that trials of the loop do not have."""
    if search == "pbt":
        problem = "copies checkpoints between processes, while a run of the loop goes on"
        raise ConfigError("search", "pbt", problem, "shoal run rl_population changes learners in place")
    if metric not in ("", MEAN_RETURN):
        raise ConfigError("metric", metric, "is not reported by a run of the loop", f"there is {MEAN_RETURN}")
    if direction == "min":
        raise ConfigError("direction", "min", "more return is better", "leave it out")
    if uses_asha and reports < 2:
        problem = "reports a trial at its end alone, too late for --scheduler asha"
        raise ConfigError("reports", reports, problem, "use 20")


def add_module_folders(recipe: str) -> None:
    """Let this process find an environment's module where the job does: in its folder, and in the present one."""
    source = find_source_file(recipe)
    for folder in (os.getcwd(), str(source.parent) if source is not None else ""):
        if folder and folder not in sys.path:
            sys.path.append(folder)


def check_loop(spec: LoopTrialSpec) -> None:
    """Raise ConfigError for an environment that cannot be created or learned from, by a trial with these values."""
    add_module_folders(spec.recipe)
    from shoal.extend.flows import inspect_environment

    inspect_environment(spec)
