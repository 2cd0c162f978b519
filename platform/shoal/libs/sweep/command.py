"""`shoal sweep`: many trials of a task, over a search space. Parse and call; the job is `jobs/sweep.py`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from shoal.config import format_override, last_override
from shoal.errors import ConfigError
from shoal.extend.cli import (
    Address,
    NotNegative,
    Plain,
    Positive,
    RunArguments,
    TaskName,
    Texts,
    find_job,
    launch_run,
    verb,
)
from shoal.extend.flows import is_loop_job
from shoal.extend.runs import format_masked_command
from shoal.search.space import SearchSpace

JOB = "sweep"
_DISTRIBUTION = re.compile(r"\s*[A-Za-z_]+\s*\(.*\)\s*", re.DOTALL)


@dataclass(frozen=True)
class SweepArguments(RunArguments):
    """The overrides of the job, and the command line that was typed for it."""

    command: tuple[str, ...] = ()

    def to_command_line(self) -> str:
        resumed = last_override(self.overrides, "resume")
        address = ["--address", self.address] if self.address else []
        typed = ["--resume", resumed] if resumed else [*self.command]
        return format_masked_command(["shoal", "sweep", *typed, *address])


@verb(
    epilog="""\b
examples:
  shoal sweep lenet 'optimizer.learning_rate=log(1e-4,1e-1)' --trials 20 stop.steps=500
  shoal sweep lenet 'batch_size=choice(64,128)' 'args.dropout=uniform(0,0.5)' --scheduler asha stop.epochs=5
  shoal sweep my_task.py:MyTask 'optimizer.weight_decay=log(1e-6,1e-2)' --search optuna --gpus-per-trial 0.25
  shoal sweep actor_learner 'algorithm.learning_rate=log(1e-4,1e-2)' --trials 8 --actors 2 stop.steps=50000
  shoal sweep actor_learner env=CartPole-v1 algorithm=impala stop.steps=50000
  shoal sweep --resume 20261120-064501-3f2a"""
)
def sweep(
    task: TaskName = "",
    overrides: Annotated[Texts, "[A.B=C|A.B=log(1e-4,1e-1)]..."] = (),
    *,
    trials: Annotated[Positive | None, "How many trials.  [default: 10]"] = None,
    search: Annotated[
        Literal["random", "optuna", "bohb", "pbt"] | None,
        "Which values are tried: at random, by Optuna, by Optuna from trials that end early as well, or changed while "
        "the trials go on (population-based training).  [default: random]",
    ] = None,
    scheduler: Annotated[
        Literal["none", "asha"] | None, "Which trials end early.  [default: asha with --search bohb, else none]"
    ] = None,
    metric: Annotated[str | None, "Of the evaluation; default: that of stop.target, or the first but the loss."] = None,
    direction: Annotated[Literal["max", "min"] | None, "Whether more of it is better, or less."] = None,
    seed: Annotated[NotNegative | None, "Of the search.  [default: 0]"] = None,
    cpus_per_trial: Annotated[float | None, "Processors of a trial on one worker.  [default: 1]"] = None,
    gpus_per_trial: Annotated[float | None, "Devices of a trial, or a share of one.  [default: 0]"] = None,
    concurrent: Annotated[Positive | None, "Trials at a time; default: as many as there is room."] = None,
    actors: Annotated[Positive | None, "Of each trial that is a run of the loop.  [default: 2]"] = None,
    resume: Annotated[str | None, "--resume RUN", "Go on with a sweep: its finished trials are not repeated."] = None,
    retry_failed: Annotated[bool | None, "With --resume: run its failed trials again."] = None,
    address: Address = None,
    plain: Plain = False,
) -> None:
    """Train TASK with values from a search space, and register the best network.

    TASK is a Task, or a job of the loop such as actor_learner, whose trials have actors of their own.

    A word whose value is a distribution is searched: uniform(LOW,HIGH), log(LOW,HIGH), int(LOW,HIGH),
    logint(LOW,HIGH) or choice(A,B,...). Another word sets a field of every trial, as for `shoal run train`.

    Without a distribution, a job of the loop searches its algorithm's own space, but for the fields that are set; the
    first trial has the defaults.
    """
    if retry_failed and not resume:
        raise ConfigError("retry_failed", True, "is for a sweep that goes on", "give --resume RUN")
    options: dict[str, object] = {"trials": trials, "search": search, "scheduler": scheduler, "metric": metric}
    options |= {"direction": direction, "seed": seed, "cpus_per_trial": cpus_per_trial}
    options |= {"gpus_per_trial": gpus_per_trial, "concurrent": concurrent, "retry_failed": retry_failed}
    job_overrides = [f"{name}={value}" for name, value in options.items() if value is not None]
    if resume:
        if task or overrides or actors:
            raise ConfigError("resume", resume, "has its task and search space in its record", "leave the words out")
        job_overrides.append(format_override("resume", resume))
    else:
        job_overrides += make_overrides(task, overrides, actors)
    given = {name: value for name, value in {**options, "actors": actors}.items() if value is not None}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    typed = SweepArguments(JOB, tuple(job_overrides), 0, address, command=(task, *overrides, *flags))
    launch_run(typed, plain=plain)


def make_overrides(task: str, overrides: tuple[str, ...], actors: int | None = None) -> list[str]:
    """The overrides of `jobs/sweep.py` for a task and its overrides. Raises ConfigError for a wrong distribution."""
    if not task:
        raise ConfigError("task", task, "is missing", "name a recipe, or a file, as in my_task.py:MyTask")
    prefix, source = "train.", "task"
    with suppress(ConfigError):  # a Task by the name of its class
        if is_loop_job(find_job(task)):
            prefix, source = "loop.", "recipe"
    if actors and source == "task":
        raise ConfigError("actors", actors, f"{task} is a Task, which needs none", "leave --actors out")
    searched = [override for override in overrides if _DISTRIBUTION.fullmatch(override.partition("=")[2])]
    fixed = [f"{prefix}{override}" for override in overrides if override not in searched]
    fixed += [f"loop.actors={actors}"] if actors else []
    fixed.insert(0, format_override(f"{prefix}{source}", task))
    if source == "recipe" and not searched:  # its algorithm's
        return fixed
    return [*fixed, f"space={json.dumps(SearchSpace.from_overrides(searched).describe())}"]
