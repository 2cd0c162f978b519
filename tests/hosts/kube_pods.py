"""What KubeRay does with a manifest, on hosts of a network: each is a pod. Called by the test of rendered manifests.

A pod begins by its container's command and KubeRay's own behind it, with the variables of the manifest and those that
KubeRay adds. Folders that a pod has of its own are elsewhere here, since a host's disk is not at the root.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import yaml
from network import Host

from shoal_program import ROOT, STATE_S, Program

GCS, DASHBOARD = 6379, 8265
READ = "import sys, httpx2; print(httpx2.get(sys.argv[1], verify=False, timeout=5).status_code)"


class Pods:
    """A RayCluster: the pods of one manifest. `stack` ends them."""

    def __init__(self, cluster: Mapping[str, Any], secret: Mapping[str, Any], stack: ExitStack) -> None:
        self._cluster, self._tokens, self._stack = cluster, secret["stringData"], stack
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
