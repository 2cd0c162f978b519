"""Rendered manifests of Kubernetes, on hosts that share a bucket alone: each host is a pod, as KubeRay starts it."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from network import Host, network, why_none

from bucket_server import BUCKET
from certificates import Authority
from shoal.libs.kube import command
from shoal_program import ROOT, STATE_S, Program
from typed import said

GCS, DASHBOARD = 6379, 8265
READ = "import sys, httpx2; print(httpx2.get(sys.argv[1], verify=False, timeout=5).status_code)"


class Pods:
    """A RayCluster: the pods of one manifest. `stack` ends them."""

    def __init__(self, cluster: Mapping[str, Any], secret: Mapping[str, Any], stack: ExitStack) -> None:
        self._cluster = cluster
        self._tokens = secret["stringData"]
        self._stack = stack
        self._head: Host | None = None
        self._programs: dict[str, Program] = {}

    @property
    def head(self) -> Host:
        assert self._head is not None
        return self._head

    @property
    def ray_environment(self) -> dict[str, str]:
        """Which KubeRay gives to all containers of a cluster with `authOptions`."""
        assert self._cluster["authOptions"]["mode"] == "token"
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._tokens["auth_token"]}

    def start_head(self, host: Host) -> None:
        self._head = host
        self._start(host, "head", self._cluster["headGroupSpec"], {"head": ""})

    def start_worker(self, host: Host, group: str) -> None:
        [found] = [each for each in self._cluster["workerGroupSpecs"] if each["groupName"] == group]
        self._start(host, group, found, {"address": f"{self.head.address}:{GCS}"})

    def stop(self, host: Host, group: str) -> None:
        """As Kubernetes removes a pod: `preStop`, then SIGTERM."""
        [found] = [each for each in self._cluster["workerGroupSpecs"] if each["groupName"] == group]
        container = found["template"]["spec"]["containers"][0]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        with host.start(
            command, self._get_environment(container) | {"RAY_ADDRESS": f"{self.head.address}:{GCS}"}
        ) as stopping:
            assert stopping.wait() == 0
        host.run("bash", "-c", "! pgrep -x raylet && kill -TERM $(pgrep -f '[r]ay start')")
        self._programs[host.name].wait(STATE_S)

    def submit(self, client: Host, job: Mapping[str, Any]) -> str:
        """What the submitter of a RayJob says, to the job's end. Raises AssertionError when it fails."""
        words = ["ray", "job", "submit", "--address", f"http://{self.head.address}:{DASHBOARD}"]
        if "entrypointResources" in job:
            words += ["--entrypoint-resources", job["entrypointResources"]]
        typed = f"{shlex.join(words)} -- {_place(job['entrypoint'])}"
        with client.start(["bash", "-c", typed], self.ray_environment) as submitting:
            assert submitting.wait() == 0
            return submitting.said

    def apply_service(self, client: Host, config: str) -> None:
        """Give Serve a RayService's configuration, and wait until its applications run."""
        url = f"http://{self.head.address}:{DASHBOARD}/api/serve/applications/"
        content = json.dumps(yaml.safe_load(_place(config)))
        client.run(sys.executable, str(ROOT / "tests/hosts/apply_serve.py"), url, self._tokens["auth_token"], content)

    def is_ready(self, client: Host, host: Host, group: str) -> bool:
        """Whether the pod passes its readiness probe."""
        [found] = [each for each in self._cluster["workerGroupSpecs"] if each["groupName"] == group]
        probe = found["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        url = f"{probe.get('scheme', 'HTTP').lower()}://{host.address}:{probe['port']}{probe['path']}"
        with client.start([sys.executable, "-c", READ, url]) as reading:
            return reading.wait() == 0 and reading.said.split()[-1] == "200"

    def _start(self, host: Host, name: str, group: Mapping[str, Any], first: Mapping[str, str]) -> None:
        container = group["template"]["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        given = {"num-cpus": limits["cpu"], "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
        given |= {**group["rayStartParams"], "object-store-memory": "200000000"}
        options = [f"--{option}={value}" if value else f"--{option}" for option, value in {**first, **given}.items()]
        ray = f"ray start {' '.join(options)} --block"
        command = f"{' '.join(container['command'])} && ulimit -n $(ulimit -Hn); {ray}"
        address = "127.0.0.1" if "head" in first else self.head.address
        environment = self._get_environment(container) | {"RAY_ADDRESS": f"{address}:{GCS}"}
        program = self._stack.enter_context(host.start(["bash", "-c", _place(command)], environment))
        self._programs[host.name] = program
        program.wait_for_line(".*Ray runtime started.*")

    def _get_environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        found = dict(self.ray_environment)
        for each in container["env"]:
            secret = each.get("valueFrom", {}).get("secretKeyRef")
            found[each["name"]] = self._tokens[secret["key"]] if secret else _place(each["value"])
        return found


def _place(text: str) -> str:
    """Put the folders of the image, and those of volumes, where hosts have them."""
    places = {
        "/opt/shoal/jobs": str(ROOT / "jobs"),
        "/var/lib/shoal": "/tmp/ray/home",
        "/etc/shoal/tls": "/tmp/ray/tls",
        "shoal.cluster.host_environment)": "shoal.cluster.host_environment /tmp/ray/ha)",
    }
    for there, here in places.items():
        text = text.replace(there, here)
    return text


pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600), pytest.mark.soak]
RATE, ASKING_S = 10, 45


def render(folder: Path, *words: str) -> list[dict[str, Any]]:
    lines = said("kube render", *words, "--out", str(folder)).splitlines()
    return [each for line in lines for each in yaml.safe_load_all(Path(line.split()[-1]).read_text())]


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
        script = [sys.executable, str(ROOT / "tests/hosts/ask_steadily.py")]
        asking = [*script, url, token, "line", str(RATE), str(ASKING_S)]
        with client.start(asking, {"SHOAL_CA": str(client.home / "ca.pem")}) as asked:
            asked.wait_for_line("^asking$")
            pods.stop(one, "workers")
            assert not pods.is_ready(client, one, "workers")
            assert pods.is_ready(client, two, "workers")
            server.wait_until(lambda: pods.is_ready(client, spare, "workers"), "a replica on the spare pod")
            assert asked.wait() == 0
            assert json.loads(asked.said.splitlines()[-1]) == {"200": RATE * ASKING_S}
