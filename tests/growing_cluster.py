"""A cluster on this machine that grows: a head, and Ray's autoscaler, whose nodes are processes here.

Ray's fake provider starts a raylet for each node; the autoscaler itself is the real one, of version 2 as on KubeRay.
Every process inherits the cluster's mark, so the cluster ends the autoscaler and its nodes with itself.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.cluster.embedded_cluster import EmbeddedCluster, start_cluster
from shoal.cluster.processes import CLUSTER_ID_VARIABLE

HEAD, HEAD_ID = "ray.head.default", "f" * 51 + "00000"  # as the fake provider has them
UPDATE_S = 1  # Ray takes integers
OBJECT_STORE_BYTES = 100_000_000
_ABSENT: dict[str, Any] = {
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}


@contextmanager
def growing_cluster(
    node_types: Mapping[str, tuple[Mapping[str, float], int]], *, head_cpus: int = 0, idle_s: float = 5.0
) -> Iterator[EmbeddedCluster]:
    """The cluster, while its autoscaler runs.

    node_types: the resources of each type of node, and the most nodes of it
    """
    head = {"RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_NODE_TYPE_NAME": HEAD}
    with start_cluster(num_cpus=head_cpus, environment={**head, "RAY_enable_autoscaler_v2": "1"}) as cluster:
        assert cluster.temp_dir is not None
        config = cluster.temp_dir / "autoscaler.yaml"
        config.write_text(json.dumps(_make_config(cluster.address, node_types, head_cpus, idle_s)))  # YAML, too
        with _start_autoscaler(cluster, config):
            yield cluster


def _make_config(
    address: str, node_types: Mapping[str, tuple[Mapping[str, float], int]], head_cpus: int, idle_s: float
) -> dict[str, Any]:
    types = {
        name: {
            "resources": {**resources, "object_store_memory": OBJECT_STORE_BYTES},
            "node_config": {},
            "min_workers": 0,
            "max_workers": most,
        }
        for name, (resources, most) in node_types.items()
    }
    head = {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "growing",
        "max_workers": sum(most for _, most in node_types.values()),
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "gcs_address": address,
        },
        "available_node_types": {HEAD: head, **types},
        "head_node_type": HEAD,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": idle_s / 60,
        **_ABSENT,
    }


@contextmanager
def _start_autoscaler(cluster: EmbeddedCluster, config: Path) -> Iterator[None]:
    assert cluster.temp_dir is not None
    assert cluster.cluster_id is not None
    logs = cluster.temp_dir / "autoscaler"
    logs.mkdir()
    ray = find_spec("ray")  # its import would read the environment too early
    assert ray.origin is not None
    entry = Path(ray.origin).parent / "autoscaler/v2/monitor.py"
    command = [sys.executable, str(entry), f"--gcs-address={cluster.address}", f"--autoscaling-config={config}"]
    environment = {
        **os.environ,
        **cluster.environment,
        CLUSTER_ID_VARIABLE: cluster.cluster_id,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": str(UPDATE_S),
    }
    with open(logs / "output.log", "w") as log:
        process = subprocess.Popen(
            [*command, f"--logs-dir={logs}"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()
