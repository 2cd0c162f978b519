"""`shoal run`: a job with its cluster and actors. Parse and call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from shoal.cli.commands.run_session import RunArguments, launch_run
from shoal.cli.support.jobs import show_fields
from shoal.cli.support.options import Address, NotNegative, Overrides, Plain, Positive, Texts
from shoal.cli.support.verbs import verb
from shoal.cluster.job_main import ALL
from shoal.cluster.runtime_env import format_options, parse_job_environment


class _RunCommand(click.Command):
    """`shoal run NAME --help [--all]` has the fields of NAME, and `shoal run --help` the options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if set(ctx.help_option_names).isdisjoint(args) or "--" in args:
            return super().parse_args(ctx, args)
        rest = [word for word in args if word not in (ALL, *ctx.help_option_names)]
        try:
            super().parse_args(ctx, rest)
        except click.UsageError:  # no NAME
            return super().parse_args(ctx, args)
        ctx.exit(show_fields(ctx.params["job"], [*ctx.params["overrides"], *([ALL] if ALL in args else [])]))


@verb(
    cls=_RunCommand,
    epilog="""\b
examples:
  shoal run actor_learner --actors 4
  shoal run actor_learner --actors 4 --envs 8
  shoal run actor_learner --actors 4 env=Acrobot-v1 target_return=-100
  shoal run jobs/my_job.py learner.batch_steps=4096 --address http://head.example:8265
  shoal run train task=my_task.py:MyTask --pip 'einops>=0.8' --env HF_TOKEN
  shoal run actor_learner resume=20261120-064501-3f2a""",
)
def run(
    job: str,
    overrides: Overrides = (),
    *,
    actors: Annotated[NotNegative, "External actor processes to start on this machine."] = 0,
    envs: Annotated[Positive, "Environments of each of these processes."] = 1,
    inference: Annotated[
        Literal["local", "remote"], "Where these actors' policy runs: in them, or at the gateway."
    ] = "local",
    runtime_env: Annotated[
        Path | None, "--runtime-env FILE", "YAML of Ray's runtime_env for the job and its workers."
    ] = None,
    pip: Annotated[Texts, "--pip PACKAGE", "A package that Ray installs for them; may be repeated."] = (),
    image: Annotated[str, "The container image that they run in; nodes need Podman."] = "",
    env: Annotated[Texts, "--env NAME[=VALUE]", "A variable of theirs; may be repeated."] = (),
    address: Address = None,
    plain: Plain = False,
) -> None:
    """Run JOB, a file or the name of one in ./jobs, with fields of its spec set by A.B=C words.

    `shoal run JOB --help` lists the main fields, with types, present values and meanings; with --all, every one.

    Without a cluster (see `shoal up`), one is started for this run and ends with it. Values of --env are in no record:
    --env NAME takes the value from this command's own environment.
    """
    added = parse_job_environment(runtime_env, pip, image, env)
    typed = format_options(runtime_env, pip, image, env)
    launch_run(RunArguments(job, overrides, actors, address, envs, inference, added, typed), plain=plain)
