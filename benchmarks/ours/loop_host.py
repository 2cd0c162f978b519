"""A host with the gateway and the learner of one run, for benchmarks that lose it.

    python -m benchmarks.ours.loop_host FOLDER lag|numbers

Experience and checkpoints outlive it in $SHOAL_STORE. Says its address, and how many segments it has recovered; then,
when asked, what became of these. `numbers`: lag is the difference of two version numbers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from benchmarks.gateway_durable import EXPERIENCE, TOKEN
from benchmarks.talk import commands, say
from shoal.checkpoint.stored import open_run_store
from shoal.rl import published_versions
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.experience.segment_log import open_log
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec
from shoal.weights import WeightStore, store

RUN = "host-loss"
WORDS = ["learner.checkpoint_every_s=1", "learner.batch_steps=1024", "hidden=[16]"]
UPDATE_S = 0.2  # a learner that is slower than its actors: the queue is full when the host is lost


def main(folder: Path) -> None:
    spec = RLSpec().override(WORDS)
    queue, weights = ExperienceQueue(spec.queue_capacity, Ledger(folder / "ledger.sqlite")), WeightStore()
    commit = GroupCommit(open_log(RUN, EXPERIENCE), queue)
    num_recovered, outcomes, acknowledge = len(queue), list[str | None](), queue.acknowledge

    def note(lease_id, found, evidence=()):  # type: ignore[no-untyped-def]
        outcomes.extend(found)
        return acknowledge(lease_id, found, evidence)

    queue.acknowledge = note  # type: ignore[method-assign]
    learner = Learner(spec, EXPERIENCE, queue, weights, folder / "checkpoints", store=open_run_store(RUN))
    learner.on_batch = lambda _: time.sleep(UPDATE_S)
    gateway = Gateway(GatewaySetting(spec.applied_gateway, EXPERIENCE, TOKEN, RUN), queue, weights, group_commit=commit)
    gateway.start()
    learner.thread.start()
    say(address=gateway.address, recovered=num_recovered, version=learner.version)
    for _ in commands():
        of_recovered = outcomes[:num_recovered]
        say(known=len(of_recovered), learnt=of_recovered.count(None), updates=learner.updates)


if __name__ == "__main__":
    if sys.argv[2] == "numbers":
        mock.patch.object(published_versions, "measure_lag", lambda newest, versions, _: newest - versions).start()
        mock.patch.object(store, "measure_lag", lambda newest, versions, _: newest - versions).start()
    main(Path(sys.argv[1]))
