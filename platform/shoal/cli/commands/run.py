"""`shoal run`: a job with its cluster and actors. Parse and call."""

from __future__ import annotations

import click

from shoal.cli.commands.launch.session import RunArguments, launch_run


@click.command(
    epilog="""\b
examples:
  shoal run actor_learner --actors 4
  shoal run actor_learner --actors 4 --envs 8
  shoal run actor_learner --actors 4 env=Acrobot-v1 target_return=-100
  shoal run jobs/my_job.py learner.batch_steps=4096 --address http://head.example:8265
  shoal run actor_learner resume=20261120-064501-3f2a"""
)
@click.argument("job")
@click.argument("overrides", nargs=-1, metavar="[A.B=C]...")
@click.option(
    "--actors",
    default=0,
    type=click.IntRange(min=0),
    show_default=True,
    help="External actor processes to start on this machine.",
)
@click.option(
    "--envs",
    default=1,
    type=click.IntRange(min=1),
    show_default=True,
    help="Environments of each of these processes.",
)
@click.option(
    "--inference",
    default="local",
    type=click.Choice(["local", "remote"]),
    show_default=True,
    help="Where these actors' policy runs: in them, or at the gateway.",
)
@click.option("--address", default=None, help="The cluster to use: a dashboard URL, or 'local' for a new one.")
@click.option("--plain", is_flag=True, help="Plain lines, even on a terminal.")
def run(
    job: str, overrides: tuple[str, ...], actors: int, envs: int, inference: str, address: str | None, plain: bool
) -> None:
    """Run JOB, a file or the name of one in ./jobs, with fields of its spec set by A.B=C words.

    Without a cluster (see `shoal up`), one is started for this run and ends with it.
    """
    launch_run(RunArguments(job, overrides, actors, address, envs, inference), plain=plain)
