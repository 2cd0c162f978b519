"""Installs an endpoint's front on the hosts of the ingress, before HAProxy listens there.

Called by `deploy`, by each replica for its node, which may have come later, where each node has an ingress, and by a
controller that starts again, perhaps on a head that has come back. Serve itself is given loopback (or there, the head's
address): its own address is also that of the replicas' servers, which speak plain HTTP to HAProxy alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.schema import ProxyStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.cluster.capacity import get_head_address, get_head_id, list_other_nodes
from shoal.cluster.growth import ON_HEAD
from shoal.cluster.ingress.front import (
    Front,
    install_front,
    is_listening,
    is_routed,
    read_front_field,
    require_listenable,
)
from shoal.cluster.ingress.serve_environment import (
    BINARY_VARIABLE,
    find_ingress_folder,
    hold_while_asleep,
    limit_answers,
    prepare_ingress,
)
from shoal.cluster.ingress.shared_listener import ADMIN_SOCKET
from shoal.cluster.ingress.tls import choose_name, keep_certificate, read_certificate
from shoal.errors import ClusterError, ConfigError, ShoalError
from shoal.serve.on_ray.bind_address import is_head
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.reach import EVERY_NODE, LOOPBACK, Reach

ROUTED_TIMEOUT_S, POLL_S = 60.0, 0.05
P = ParamSpec("P")
T = TypeVar("T")


def prepare_front(spec: EndpointSpec, ports: Mapping[str, int | None]) -> EndpointSpec:
    """Install the front; returns the spec with the name in its addresses.

    Raises ConfigError for an address or a certificate that cannot be used, ClusterError in a cluster not started for
    serving.

    ports: where HAProxy will listen, by field; none where it does already
    """
    reach = _get_reach(spec)
    call_on_head(require_listenable, spec.host, ports)
    if BINARY_VARIABLE not in os.environ and reach == Reach():
        return spec
    reach = call_on_head(_install_here, reach)
    if reach.ingress == EVERY_NODE:  # on the nodes that are up, to report by name what one of them lacks
        head = get_head_address()
        others = [node for node, address in list_other_nodes().items() if address != head]
        _get_answer([_call_on_node(node, _install_on_node, reach, ports) for node in others])
    return spec.model_copy(update=dict(reach))


def list_sleeping() -> list[str]:
    """The applications that may sleep, on the head."""
    return call_on_head(lambda: sorted(mark.name for mark in (find_ingress_folder() / "asleep").glob("*")))


def wait_until_routed(spec: EndpointSpec) -> None:
    """Return once HAProxy listens and sends requests to a replica, which Serve's own status does not wait for; on each
    node that has a replica, if `endpoint.ingress` is every_node.

    Raises ClusterError when that takes too long.
    """
    if BINARY_VARIABLE not in os.environ:
        return
    call_on_head(_wait_here, spec, get_head_id())
    if spec.ingress == EVERY_NODE:
        leaving = (ProxyStatus.DRAINING, ProxyStatus.DRAINED)
        nodes = {node for node, status in serve.status().proxies.items() if status not in leaving}
        head = get_head_address()
        others = {node for node, address in list_other_nodes().items() if address != head}
        _get_answer([_call_on_node(node, _wait_here, spec, node) for node in nodes & others])


def _wait_here(spec: EndpointSpec, node: str) -> None:
    deadline_s = time.monotonic() + ROUTED_TIMEOUT_S
    socket = find_ingress_folder() / node / ADMIN_SOCKET
    while not (is_routed(spec.name, socket) and is_listening(LOOPBACK.get(spec.host, spec.host), spec.port)):
        if time.monotonic() > deadline_s:
            where = f"of the node {ray.util.get_node_ip_address()}"
            raise ClusterError(f"HAProxy {where} sends no requests to {spec.name!r}: see Serve's logs of its proxies")
        time.sleep(POLL_S)


def join_ingress(spec: EndpointSpec) -> None:
    """Let this node's HAProxy listen, for the endpoint of a replica here, and renew its certificate from now on.

    Called by a replica where each node has an ingress; does nothing on the head. Raises what `prepare_front` raises.
    """
    if is_on_head():
        return
    restore_front(spec)
    hold_while_asleep(os.environ, spec.name, spec.may_sleep, spec.key_digests)
    limit_answers(os.environ, spec.name, spec.answer_s)
    if spec.tls is not None:
        certificate = spec.tls.files, find_ingress_folder()
        threading.Thread(target=keep_certificate, args=certificate, daemon=True).start()


def restore_front(spec: EndpointSpec) -> None:
    """Install the front on this node, which may be new: a head that comes back has another id. Does nothing where it
    is installed."""
    if BINARY_VARIABLE not in os.environ:
        return
    reach, folder = _get_reach(spec), find_ingress_folder()
    node = ray.get_runtime_context().get_node_id() if reach.ingress == EVERY_NODE else ""
    if read_front_field(folder, "node") != node or read_front_field(folder, "spec") != reach.model_dump_json():
        _install_on_node(reach, {})


def adopt_front(spec: EndpointSpec) -> EndpointSpec:
    """The spec with the front of the endpoint that it joins. Raises ConfigError for fields that differ from it."""
    if BINARY_VARIABLE not in os.environ:
        return spec.adopt_reach(Reach())
    front = call_on_head(lambda: read_front_field(find_ingress_folder(), "spec"))
    return spec.adopt_reach(Reach.from_yaml(front or "{}"))


def _get_reach(spec: EndpointSpec) -> Reach:
    return Reach.model_construct(**{name: getattr(spec, name) for name in Reach.model_fields})


def _install_here(reach: Reach) -> Reach:
    """Install the front on this host, which its private key never leaves; returns it with the name in its addresses."""
    pem = client_ca = b""
    if reach.tls is not None:
        certificate = read_certificate(reach.tls.files, time.time())
        pem, client_ca = certificate.pem, certificate.client_ca
        name = reach.tls.name or choose_name(certificate.names, reach.host)
        reach = reach.model_copy(update={"tls": reach.tls.model_copy(update={"name": name})})
    proxies = tuple(reach.trusted_proxies)
    node = address = ""
    if reach.ingress == EVERY_NODE:
        address = ray.util.get_node_ip_address()
        node = get_head_id() if is_head(address) else ray.get_runtime_context().get_node_id()
    front = Front(reach.host, pem, client_ca, proxies, reach.ingress_threads, reach.model_dump_json(), node, address)
    install_front(front, find_ingress_folder())
    return reach


def _install_on_node(reach: Reach, ports: Mapping[str, int | None]) -> None:
    """Install the front on this host, which is not the head's and has files of its own.

    ports: those that must be free: Serve does not report an HAProxy that cannot listen
    """
    try:
        prepare_ingress(os.environ)
        _install_here(reach)
        require_listenable(reach.host, ports)
    except ShoalError as error:
        where = f"on the node {ray.util.get_node_ip_address()}, which endpoint.ingress = every_node includes"
        if isinstance(error, ConfigError):
            raise ConfigError(error.field, error.value, f"{error.problem}, {where}", error.remedy) from None
        raise ClusterError(f"{error} ({where})") from None


def is_on_head() -> bool:
    return is_head(ray.util.get_node_ip_address())


def call_on_head(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call on the head's host, where the user's files and HAProxy's are. Raises the function's errors."""
    if is_on_head():
        return function(*arguments, **named)
    task: Any = ray.remote(num_cpus=0, resources=dict(ON_HEAD))(function)
    answer: T = _get_answer(task.remote(*arguments, **named))
    return answer


def _call_on_node(node: str, function: Callable[..., object], *arguments: object) -> Any:
    """Begin a call on a node; returns Ray's reference to its answer."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(num_cpus=0, scheduling_strategy=there)(function)
    return task.remote(*arguments)


def _get_answer(tasks: Any) -> Any:
    """What one or several tasks return. Raises their errors."""
    try:
        return ray.get(tasks)
    except RayTaskError as error:
        if isinstance(error.cause, ShoalError):
            raise error.cause from None
        raise
