"""What an autoscaler may add to the cluster: its types of nodes, and how many of each.

No call of Ray 2.60 says so. Its own record of it (`ray._private.state`) is written by managed platforms alone, so on
others the autoscaler's own configuration is read, on the head: the file that its process was started with (`ray up`,
`ray start --autoscaling-config`), or the RayCluster of the head's pod (KubeRay). Called by `capacity`, when something
does not fit on the present nodes.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import ray
import yaml

HEAD = "node:__internal_head__"  # the resource by which Ray marks the head
# For a worker that must be on the head. By this resource, since a head that comes back has another node id.
ON_HEAD: Mapping[str, float] = MappingProxyType({HEAD: 0.001})
UNLIMITED = 10_000  # nodes of a type without a limit
_OPTION, _ADDRESS = "--autoscaling-config=", "--gcs-address="
_KUBERAY_NAME = "RAY_CLUSTER_NAME"  # KubeRay sets it in every pod
_KUBERAY_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_STEP = 1e-9  # what a sum of fractions may lack
Bundle = Mapping[str, float]  # what one worker needs: {"CPU": 1.0}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeType:
    """Nodes that an autoscaler adds and removes."""

    name: str
    resources: Bundle
    max_nodes: int


@dataclass(frozen=True)
class Growth:
    """All that a cluster may have: its head, and every node that its autoscaler may add. False without any.

    max_nodes: of all types together
    """

    head: Bundle
    node_types: tuple[NodeType, ...] = ()
    max_nodes: int = UNLIMITED

    def __bool__(self) -> bool:
        return bool(self.node_types)

    def __str__(self) -> str:
        types = []
        for each in self.node_types:
            amounts = [
                f"{amount:g} {name}" for name, amount in sorted(each.resources.items()) if name.isupper() and amount
            ]
            types.append(f"{each.max_nodes} {each.name} ({', '.join(amounts) or 'no CPU'})")
        is_less = self.max_nodes < sum(each.max_nodes for each in self.node_types)
        return ", ".join(types) + (f", {self.max_nodes} nodes in all" if is_less else "")

    def can_hold(self, bundles: Sequence[Bundle]) -> bool:
        """Whether there may be a place for each; certain for bundles that are all the same, else an upper limit."""
        if not self:
            return False
        distinct = Counter(tuple(sorted(bundle.items())) for bundle in bundles)
        total: Counter[str] = Counter()
        for items, count in distinct.items():
            slots: float = sum(self._list_amounts(partial(_count_on, bundle=dict(items))))
            if slots < count:
                return False
            total.update({name: amount * count for name, amount in items})
        return all(sum(self.list_hosts(name)) + _STEP >= amount for name, amount in total.items())

    def list_hosts(self, resource: str) -> list[float]:
        """The amount of a resource on each host that may be there: of the most nodes, those with the most of it."""
        return self._list_amounts(lambda host: host.get(resource, 0.0))

    def _list_amounts(self, measure: Callable[[Bundle], float]) -> list[float]:
        nodes = [amount for each in self.node_types for amount in [measure(each.resources)] * each.max_nodes]
        return [measure(self.head), *sorted(nodes, reverse=True)[: self.max_nodes]]


def _count_on(host: Bundle, bundle: Bundle) -> float:
    needs = {name: amount for name, amount in bundle.items() if amount}
    return min((math.floor(host.get(name, 0.0) / amount + _STEP) for name, amount in needs.items()), default=math.inf)


def find_growth() -> Growth:
    """What the connected cluster may have. Takes a worker's start on the head where this process is elsewhere."""
    from ray._private.state import state

    head = next(node for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"])
    record = state.get_cluster_config()  # of managed platforms
    groups = record.node_group_configs if record is not None else ()
    types = [NodeType(each.name, dict(each.resources), each.max_count) for each in groups if each.max_count]
    growth = Growth({}, tuple(replace(each, max_nodes=UNLIMITED) if each.max_nodes < 0 else each for each in types))
    if not growth:
        address = ray.get_runtime_context().gcs_address
        if head["NodeID"] == ray.get_runtime_context().get_node_id():
            growth = find_on_head(address)
        else:
            task = ray.remote(num_cpus=0, resources=dict(ON_HEAD))(find_on_head)
            growth = ray.get(task.remote(address))
    return replace(growth, head=head["Resources"])


def find_on_head(gcs_address: str) -> Growth:
    """What the autoscaler of this host may add; nothing without one. Also nothing, with a warning, when that cannot be
    read."""
    try:
        if config := _find_config_file(gcs_address):
            return parse_growth(yaml.safe_load(config.read_text()) or {})
        if _KUBERAY_NAME in os.environ and _KUBERAY_NAMESPACE.exists():
            from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient

            client = KubernetesHttpApiClient(_KUBERAY_NAMESPACE.read_text().strip())
            return parse_ray_cluster(client.get(f"rayclusters/{os.environ[_KUBERAY_NAME]}"))
    except (OSError, yaml.YAMLError) as error:  # an HTTPError of requests is an OSError
        logger.warning("only present nodes count, since the autoscaler's configuration cannot be read: %s", error)
    return Growth({})


def _find_config_file(gcs_address: str) -> Path | None:
    """The file of the autoscaler that runs here for this cluster."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if f"{_ADDRESS}{gcs_address}" in words:
            for word in words:
                if word.startswith(_OPTION):
                    return Path(word.removeprefix(_OPTION))
    return None


def parse_ray_cluster(ray_cluster: Mapping[str, Any]) -> Growth:
    """What a RayCluster may add; nothing unless it has an autoscaler."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    if not ray_cluster["spec"].get("enableInTreeAutoscaling"):
        return Growth({})
    return parse_growth(autoscaling_config._derive_autoscaling_config_from_ray_cr(ray_cluster))


def parse_growth(config: Mapping[str, Any]) -> Growth:
    """What an autoscaler may add by its configuration."""
    config = {name: value for name, value in config.items() if value is not None}
    most = config.get("max_workers", UNLIMITED)
    types = tuple(
        NodeType(name, each.get("resources") or {}, min(most, each.get("max_workers", most)))
        for name, each in config.get("available_node_types", {}).items()
        if name != config.get("head_node_type") and min(most, each.get("max_workers", most))
    )
    return Growth({}, types, most)


def count_waiting(bundle: Bundle) -> int | None:
    """How many workers with exactly these needs wait for a place; None while the head does not say."""
    status = _get_status()
    if status is None:
        return None
    demands = status.resource_demands.ray_task_actor_demand
    wanted = {name: amount for name, amount in bundle.items() if amount}
    return sum(each.count for demand in demands for each in demand.bundles_by_count if each.bundle == wanted)


def count_waiting_groups(bundles: Sequence[Bundle]) -> int | None:
    """How many placement groups of exactly these bundles wait for a place; None while the head does not say."""
    status = _get_status()
    if status is None:
        return None
    wanted = sorted(sorted(bundle.items()) for bundle in bundles)
    waiting = [
        sorted(sorted(each.bundle.items()) for each in demand.bundles_by_count for _ in range(each.count))
        for demand in status.resource_demands.placement_group_demand
    ]
    return waiting.count(wanted)


def describe_launches() -> str:
    """What the autoscaler does now: `1 small is being started`; "" for nothing, for one of version 1, and while
    the head does not say."""
    status = _get_status()
    if status is None:
        return ""
    launching = Counter(node.ray_node_type_name for node in status.pending_nodes)
    for launch in status.pending_launches:
        launching[launch.ray_node_type_name] += launch.count
    failures = {launch.ray_node_type_name: launch.details for launch in status.failed_launches}
    parts = [f"{count} {name} {'is' if count == 1 else 'are'} being started" for name, count in launching.items()]
    return "; ".join(parts + [f"{name} could not be started ({details})" for name, details in failures.items()])


def _get_status() -> Any:
    from ray.autoscaler.v2.sdk import get_cluster_status  # the GCS answers it on clusters of every kind

    try:
        return get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception as error:  # noqa: BLE001 - it raises that type itself, for an answer that is late
        logger.warning("what waits for nodes is not known now: %s", error)
        return None
