"""Rendered manifests of Kubernetes, on hosts that share a bucket alone: each host is a pod, as KubeRay starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kube_pods import Pods
from network import Host, network, why_none

from bucket_server import BUCKET
from certificates import Authority
from shoal.libs.kube import command
from shoal_program import ROOT

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600), pytest.mark.soak]
RATE, ASKING_S = 10, 45


def render(folder: Path, *words: str) -> list[dict[str, Any]]:
    said = CliRunner().invoke(command.kube, ["render", *words, "--out", str(folder)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return [
        each for line in said.output.splitlines() for each in yaml.safe_load_all(Path(line.split()[-1]).read_text())
    ]


def test_pods_train_and_serve_and_a_drained_one_cuts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's driver is on the head, which has no CPUs; Kubernetes' Service would be before the workers."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(command, "validate_overrides", lambda path, words: None)  # the job checks them in the cluster
    authority = Authority(tmp_path)
    (tmp_path / "hosts").mkdir()
    with network(tmp_path / "hosts", has_disks=True) as made, ExitStack() as stack:
        bucket = made.add("bucket")
        serving = [sys.executable, str(ROOT / "tests/bucket_server.py"), bucket.address]
        server = stack.enter_context(bucket.start(serving, stdin=subprocess.PIPE))
        made.environment |= json.loads(server.wait_for_line(r"^\{.*")[0])
        head, one, two, client = map(made.add, ("head", "one", "two", "client"))
        common = ["kube.image=i", f"kube.store=s3://{BUCKET}/shoal", "kube.workers.cpus=2", "kube.drain_s=300"]
        task = ["task=line.py:Line", "workers=3", "parallel=ddp", "batch_size=24", "stop.epochs=2", "name=line"]
        _, job = render(tmp_path / "job", "job", "train", *task, *common)
        fields = ["endpoint.num_replicas=2", "endpoint.num_cpus=1.5", "kube.tls_secret=tls"]
        secret, service = render(tmp_path / "endpoint", "endpoint", "line@1", *fields, *common)
        pods = Pods(service["spec"]["rayClusterConfig"], secret, stack)

        def add_pod(host: Host) -> None:
            shutil.copy(ROOT / "tests/hosts/line.py", host.files / "project")
            files = authority.sign(name=host.name, names=(host.address,))
            host.run("mkdir", "/tmp/ray/tls", "/tmp/ray/home")
            root = Path(*host.files.parts[:4])
            for name, file in (("tls.crt", files.certificate), ("tls.key", files.key)):
                (root / "tmp/ray/tls" / name).write_bytes(Path(file).read_bytes())
            if host is head:
                pods.start_head(host)
            else:
                pods.start_worker(host, "workers")

        for each in (head, one, two):
            add_pod(each)
        assert "2 epochs" in pods.submit(client, job["spec"])
        pods.apply_service(client, service["spec"]["serveConfigV2"])
        server.wait_until(lambda: all(pods.is_ready(client, each, "workers") for each in (one, two)), "ready pods")

        spare = made.add("spare")
        add_pod(spare)
        (client.files / "ca.pem").write_bytes(authority.ca.read_bytes())
        url, token = f"https://{two.address}:8000", secret["stringData"]["shoal_token"]
        asking = [
            sys.executable,
            str(ROOT / "tests/hosts/ask_steadily.py"),
            url,
            token,
            "line",
            str(RATE),
            str(ASKING_S),
        ]
        with client.start(asking, {"SHOAL_CA": str(client.home / "ca.pem")}) as asked:
            asked.wait_for_line("^asking$")
            pods.stop(one, "workers")
            assert not pods.is_ready(client, one, "workers")
            assert pods.is_ready(client, two, "workers")
            server.wait_until(lambda: pods.is_ready(client, spare, "workers"), "a replica on the spare pod")
            assert asked.wait() == 0
            assert json.loads(asked.said.splitlines()[-1]) == {"200": RATE * ASKING_S}
