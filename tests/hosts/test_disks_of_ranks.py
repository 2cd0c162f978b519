"""Ranks that keep their weights whole lose a host with its disk."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from bucket_hosts import STEPS, TRAINING, Lost, begin, bucket_cluster, find, lose_host
from network import why_none

from shoal_program import STATE_S

NEEDS_HOSTS = pytest.mark.skipif(bool(why_none()), reason=why_none())
pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(3600)]


def test_ranks_of_ddp_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    with bucket_cluster(tmp_path, num_cpus=2, num_head_cpus=2) as cluster, ExitStack() as stack:
        run = find(begin(stack, cluster, "train", *TRAINING, "workers=3", "parallel=ddp"), cluster)
        saved = lose_host(cluster, {"ddp": run})
        assert run.program.wait(STATE_S) == 0
        [(_, lost), (_, restored), (_, stopped)] = run.list_events("workers_lost", "restored", "stopped")
        Lost(lost["step"], restored["step"], saved["ddp"]).check("ddp")
        assert stopped["step"] == STEPS


@pytest.mark.soak
def test_a_trial_of_a_sweep_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Both trials are on the host that is lost."""
    words = [f"train.{word}" for word in TRAINING] + ["trials=2", "concurrent=2", "metric=loss", "direction=min"]
    words.append("space={optimizer.learning_rate: 'log(0.001,0.01)'}")
    with bucket_cluster(tmp_path, num_cpus=2, num_head_cpus=0) as cluster, ExitStack() as stack:
        sweep = find(begin(stack, cluster, "sweep", *words), cluster)
        trials = {f"trial {number}": replace(sweep, id=f"{sweep.id}-t{number:03d}") for number in range(2)}
        saved = lose_host(cluster, trials)
        assert sweep.program.wait(STATE_S) == 0
        assert any(trial.list_events("restored") for trial in trials.values())
        for name, trial in trials.items():
            assert trial.step == STEPS
            for _, restored in trial.list_events("restored"):
                Lost(STEPS, restored["step"], saved[name]).check(name)
