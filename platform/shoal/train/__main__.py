"""`python -m shoal.train task=my_task.py:MyTask a.b=c ...`: train here, without Ray. Under torchrun, one of its ranks.

torchrun --nproc-per-node 2 -m shoal.train task=my_task.py:MyTask parallel=ddp
"""

from __future__ import annotations

import os
import sys
from signal import SIGINT

from shoal.cluster.job_main import ALL, HELP, print_help
from shoal.config import last_override
from shoal.errors import ConfigError, NotReached, ShoalError
from shoal.gc_freeze import freeze_loaded_objects
from shoal.runs.record.provenance import format_masked_command
from shoal.runs.waits import print_line
from shoal.train.launch.finalize import describe_missed_target
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import list_task_arguments, spec_from_overrides


def main(arguments: list[str]) -> int:
    """Train, and return the exit status."""
    if not arguments or not set(HELP).isdisjoint(arguments):
        try:
            spec = spec_from_overrides([each for each in arguments if each not in (ALL, *HELP)])
            print_help(spec, list_task_arguments(spec), has_all=ALL in arguments)
        except ShoalError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    with freeze_loaded_objects():  # also freezes the modules loaded above
        import torch._dynamo  # noqa: F401 - as every optimiser does
    rank, is_alone = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1") == "1"
    try:
        spec = spec_from_overrides(arguments)
        if not spec.has_replicas:
            workers = last_override(arguments, "workers")
            size = os.environ.get("WORLD_SIZE", "1")
            if workers not in ("", size):
                remedy = f"start them with torchrun --nproc-per-node {workers}, or let `shoal run` do it"
                raise ConfigError(
                    "workers", workers, f"here {'is one process' if size == '1' else f'are {size}'}", remedy
                )
        outcome = fit_locally(spec, predicts=not spec.has_replicas, say=print_line)
    except ShoalError as error:
        # Each rank prints its own error, even if all have the same: torchrun ends the others as soon as one has ended.
        print(f"error: {error}" if is_alone else f"[rank {rank}] error: {error}", file=sys.stderr)
        return 1
    if rank == "0" and outcome.is_interrupted:
        print(f"Go on with: {_format_resume_command(outcome.run_id, arguments)}", flush=True)
    if missed := describe_missed_target(spec, outcome):
        print(missed, file=sys.stderr)
        return NotReached.EXIT_STATUS
    return 128 + (outcome.signal or SIGINT) if outcome.is_interrupted else 0


def _format_resume_command(run_id: str, arguments: list[str]) -> str:
    """This command again, for the rest of the run."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    program = ["python"] if size == "1" else ["torchrun", "--nproc-per-node", size]
    repeated = [each for each in arguments if not each.startswith("resume=")]
    return format_masked_command([*program, "-m", "shoal.train", f"resume={run_id}", *repeated])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
