"""A run with a synchronizer of a user's own goes on when its processes die."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
from test_asynchronous_faults import KillingLog, Processes, spec_of

from shoal.extend import PeerSync, SyncConfig
from shoal.libs.asynchronous.replicas import fit_replicas


class MeanConfig(SyncConfig):
    every: int = 4

    synchronizer: ClassVar[str] = "test_peer_faults:MeanOfAll"


class MeanOfAll(PeerSync):
    config: MeanConfig

    def after_step(self) -> None:
        if self.num_steps % self.config.every == 0 and (found := self.gather(self.weights)):
            self.load_weights([torch.stack(each).mean(0) for each in zip(*found.values(), strict=True)])


def test_a_run_of_peers_goes_on_when_a_worker_and_the_chief_are_killed(tmp_path: Path) -> None:
    processes = Processes()
    log = KillingLog(processes, {20: "worker 1", 60: "worker 0"})
    spec = spec_of(sync={"kind": f"{__file__}:MeanConfig"}, workers=3, batch_size=48)
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert (outcome.reason, outcome.steps, processes.num_started) == ("steps", 120, 3 + 2)
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    assert sorted(details["index"] for details in log.find("worker_lost")) == [0, 1]
    lost = [before - after for before, after in pairwise(log.steps)]
    assert max(lost) < 4, "the chief goes back to its newest exchange, and no further"
    [counted] = log.find("peers")
    assert counted["rounds"] >= 120 // 4
