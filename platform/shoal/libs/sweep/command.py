"""`shoal sweep`: many trials of a task, over a search space. Parse and call; the job is `jobs/sweep.py`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

import click

from shoal.config import format_override, last_override
from shoal.errors import ConfigError
from shoal.extend.cli import RunArguments, address_option, find_job, launch_run, plain_option, strip_task_key
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


@click.command(
    epilog="""\b
examples:
  shoal sweep lenet 'optimizer.learning_rate=log(1e-4,1e-1)' --trials 20 stop.steps=500
  shoal sweep lenet 'batch_size=choice(64,128)' 'args.dropout=uniform(0,0.5)' --scheduler asha stop.epochs=5
  shoal sweep my_task.py:MyTask 'optimizer.weight_decay=log(1e-6,1e-2)' --search optuna --gpus-per-trial 0.25
  shoal sweep actor_learner 'algorithm.learning_rate=log(1e-4,1e-2)' --trials 8 --actors 2 stop.steps=50000
  shoal sweep actor_learner env=CartPole-v1 algorithm=impala stop.steps=50000
  shoal sweep --resume 20261120-064501-3f2a"""
)
@click.argument("task", required=False, callback=lambda c, p, task: strip_task_key(c, p, task or ""))
@click.argument("overrides", nargs=-1, metavar="[A.B=C|A.B=log(1e-4,1e-1)]...")
@click.option("--trials", type=click.IntRange(min=1), help="How many trials.  [default: 10]")
@click.option(
    "--search",
    type=click.Choice(["random", "optuna", "bohb", "pbt"]),
    help="Which values are tried: at random, by Optuna, by Optuna from trials that end early as well, or changed while "
    "the trials go on (population-based training).  [default: random]",
)
@click.option(
    "--scheduler",
    type=click.Choice(["none", "asha"]),
    help="Which trials end early.  [default: asha with --search bohb, else none]",
)
@click.option("--metric", help="Of the evaluation; default: that of stop.target, or the first but the loss.")
@click.option("--direction", type=click.Choice(["max", "min"]), help="Whether more of it is better, or less.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the search.  [default: 0]")
@click.option("--cpus-per-trial", type=float, help="Processors of a trial on one worker.  [default: 1]")
@click.option("--gpus-per-trial", type=float, help="Devices of a trial, or a share of one.  [default: 0]")
@click.option("--concurrent", type=click.IntRange(min=1), help="Trials at a time; default: as many as there is room.")
@click.option("--actors", type=click.IntRange(min=1), help="Of each trial that is a run of the loop.  [default: 2]")
@click.option("--resume", metavar="RUN", help="Go on with a sweep: its finished trials are not repeated.")
@click.option("--retry-failed", is_flag=True, default=None, help="With --resume: run its failed trials again.")
@address_option
@plain_option
def sweep(
    task: str,
    overrides: tuple[str, ...],
    resume: str | None,
    address: str | None,
    plain: bool,
    actors: int | None,
    **options: object,
) -> None:
    """Train TASK with values from a search space, and register the best network.

    TASK is a Task, or a job of the loop such as actor_learner, whose trials have actors of their own.

    A word whose value is a distribution is searched: uniform(LOW,HIGH), log(LOW,HIGH), int(LOW,HIGH),
    logint(LOW,HIGH) or choice(A,B,...). Another word sets a field of every trial, as for `shoal run train`.

    Without a distribution, a job of the loop searches its algorithm's own space, but for the fields that are set; the
    first trial has the defaults.
    """
    if options["retry_failed"] and not resume:
        raise ConfigError("retry_failed", True, "is for a sweep that goes on", "give --resume RUN")
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
