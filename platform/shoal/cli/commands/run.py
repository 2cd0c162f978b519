"""`shoal run`: a job with its cluster and actors. Parse and call."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.commands.run_session import RunArguments, launch_run
from shoal.cli.support.jobs import show_fields
from shoal.cli.support.options import address_option, overrides_argument, plain_option
from shoal.cluster.job_main import ALL
from shoal.cluster.runtime_env import format_options, parse_job_environment

FILE = click.Path(path_type=Path)


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


@click.command(
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
@click.argument("job")
@overrides_argument
@click.option(
    "--actors",
    default=0,
    type=click.IntRange(min=0),
    show_default=True,
    help="External actor processes to start on this machine.",
)
@click.option(
    "--envs", default=1, type=click.IntRange(min=1), show_default=True, help="Environments of each of these processes."
)
@click.option(
    "--inference",
    default="local",
    type=click.Choice(["local", "remote"]),
    show_default=True,
    help="Where these actors' policy runs: in them, or at the gateway.",
)
@click.option("--runtime-env", type=FILE, metavar="FILE", help="YAML of Ray's runtime_env for the job and its workers.")
@click.option("--pip", multiple=True, metavar="PACKAGE", help="A package that Ray installs for them; may be repeated.")
@click.option("--image", default="", help="The container image that they run in; nodes need Podman.")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="A variable of theirs; may be repeated.")
@address_option
@plain_option
def run(
    job: str,
    overrides: tuple[str, ...],
    actors: int,
    envs: int,
    inference: str,
    runtime_env: Path | None,
    pip: tuple[str, ...],
    image: str,
    env: tuple[str, ...],
    address: str | None,
    plain: bool,
) -> None:
    """Run JOB, a file or the name of one in ./jobs, with fields of its spec set by A.B=C words.

    `shoal run JOB --help` lists the main fields, with types, present values and meanings; with --all, every one.

    Without a cluster (see `shoal up`), one is started for this run and ends with it. Values of --env are in no record:
    --env NAME takes the value from this command's own environment.
    """
    added = parse_job_environment(runtime_env, pip, image, env)
    typed = format_options(runtime_env, pip, image, env)
    launch_run(RunArguments(job, overrides, actors, address, envs, inference, added, typed), plain=plain)
