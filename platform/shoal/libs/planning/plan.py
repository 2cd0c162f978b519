"""`shoal plan`: which plan is fastest for a Task on given hardware, and why.

Parse, call, print. No Ray, no worker: fake process groups simulate a plan of many ranks.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout

import click

from shoal.config import format_override
from shoal.extend.cli import PRINTED, Overrides, Printed, TaskName, verb
from shoal.extend.runs import WaitReporter

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing torch: else its profiler prints remarks


@verb(**PRINTED)
def plan(task: TaskName, overrides: Overrides = ()) -> Printed:
    """Rank the ways of training TASK in parallel, by predicted step time and memory, and say why.

    The hardware: hosts, devices (of each host), network and latency (between hosts), device_memory, device_flops,
    device_bandwidth (within a host). What is left out is measured on this machine. Other overrides are the task's own.

    \b
    Examples:
      shoal plan lenet
      shoal plan lenet hosts=4 devices=8 network=10Gbit
      shoal plan my_task.py:MyTask args.width=512 batch_size=256 devices=2 device_memory=8GB --json
    """
    from shoal.extend.train import make_task, spec_from_overrides
    from shoal.libs.planning.candidates import require_open_choices
    from shoal.libs.planning.estimate import describe_choice, describe_plans, to_json
    from shoal.libs.planning.hardware import HardwareSpec
    from shoal.libs.planning.planner import rank_plans

    names = HardwareSpec.model_fields
    hardware_overrides = [override for override in overrides if override.partition("=")[0] in names]
    sync = [override for override in overrides if override.startswith("sync.")]  # for the plans that have these fields
    own_overrides = [override for override in overrides if override not in (*hardware_overrides, *sync)]
    hardware = HardwareSpec().override(hardware_overrides)
    require_open_choices([*own_overrides, *sync])
    with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
        spec = spec_from_overrides([format_override("task", task), *own_overrides])
        with WaitReporter("the plans") as reporter:
            estimates = rank_plans(make_task(task, spec.args), spec, hardware, reporter.wait_for, sync)
    title = click.style(f"{task}, batch of {spec.batch_size}, {hardware.hosts} host(s)", bold=True)
    lines = (title, describe_plans(estimates, spec), describe_choice(estimates, task, own_overrides))
    plans = [to_json(each, spec) for each in estimates]
    return Printed(lines, {"task": task, "batch_size": spec.batch_size, "plans": plans})
