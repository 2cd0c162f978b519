"""Ranks that keep their weights whole lose a host with its disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from bucket_hosts import STEPS, TRAINING, Lost, begin, bucket_cluster, find, lose_host
from network import why_none

from shoal_program import STATE_S

NEEDS_HOSTS = pytest.mark.skipif(bool(why_none()), reason=why_none())
pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(3600), pytest.mark.soak]


def test_ranks_of_ddp_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    with bucket_cluster(tmp_path, num_cpus=2, num_head_cpus=2) as cluster, ExitStack() as stack:
        run = find(begin(stack, cluster, "train", *TRAINING, "workers=3", "parallel=ddp"), cluster)
        saved = lose_host(cluster, {"ddp": run})
        assert run.program.wait(STATE_S) == 0
        [(_, lost), (_, restored), (_, stopped)] = run.list_events("workers_lost", "restored", "stopped")
        Lost(lost["step"], restored["step"], saved["ddp"]).check("ddp")
        assert stopped["step"] == STEPS
