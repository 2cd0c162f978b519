"""Runs of replicas on two hosts, of which one is lost: elastic, of local steps, and with parameter servers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from network import network, start_ray, why_none

from shoal_program import ROOT

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(1800)]
SCRIPT = ROOT / "tests/hosts/train_replicas.py"
KINDS = {"elastic", "diloco", "parameter_server"}


@pytest.mark.soak
def test_survivors_go_on_with_every_step_when_a_host_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on the network says that it is gone. The head has places for the chiefs alone."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}")
    with network(tmp_path) as made:
        head, lost = made.add("head"), made.add("lost")
        for host in (head, lost):
            start_ray(host, head, num_cpus=len(KINDS))
        shared = tmp_path / "shared"
        train = f"cd; . ~/shoal-host.env; python {SCRIPT} {shared} /dev/shm"
        with head.start(["bash", "-c", train]) as training:
            training.wait_for_line("^training$")
            made.cut(lost)
            assert training.wait() == 0
        found: dict[str, Any] = json.loads(training.said.splitlines()[-1])
    assert {file.name for file in shared.glob("*@*")} == {
        f"{kind}@{host}" for kind in KINDS for host in ("head", "lost")
    }
    assert set(found) == KINDS
    for kind, run in found.items():
        steps, events = run["steps"], dict(run["events"])
        assert steps == sorted(set(steps)), f"{kind}: no step was repeated"
        assert run["ended"] == ["interrupted", steps[-1]]
        lost_workers = [details["index"] for event, details in run["events"] if event == "worker_lost"]
        assert lost_workers == [1], kind
        assert "restored" not in events
        if kind == "elastic":
            assert steps == list(range(1, len(steps) + 1))
            assert events["elastic"]["restarts"] == 0
        else:
            assert events["staleness"]["lost"] < events["staleness"]["updates"]  # since its state on disk
    lost_servers = [details for event, details in found["parameter_server"]["events"] if event == "server_lost"]
    assert [details["index"] for details in lost_servers] == [1], lost_servers
