"""Installs an endpoint's front on the host of the ingress, before Serve starts there.

Called by `deploy`. Serve itself is always given loopback: its own address is also that of the replicas' servers, which
speak plain HTTP to HAProxy alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayTaskError

from shoal.cluster.capacity import make_head_affinity
from shoal.cluster.ingress.front import Front, install_front, read_front_spec
from shoal.cluster.ingress.listening import require_listenable
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, find_ingress_folder
from shoal.cluster.ingress.tls import choose_name, read_certificate
from shoal.errors import ShoalError
from shoal.serve.on_ray.bind_address import is_head
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.reach import Reach

P = ParamSpec("P")
T = TypeVar("T")


def prepare_front(spec: EndpointSpec, ports: Mapping[str, int | None]) -> EndpointSpec:
    """Install the front; returns the spec with the name in its addresses.

    Raises ConfigError for an address or a certificate that cannot be used, ClusterError in a cluster not started for
    serving.

    ports: where HAProxy will listen, by field; none where it does already
    """
    reach = _get_reach(spec)
    _call_on_head(require_listenable, spec.host, ports)
    if BINARY_VARIABLE not in os.environ and reach == Reach():
        return spec
    return spec.model_copy(update=dict(_call_on_head(_install_here, reach)))


def adopt_front(spec: EndpointSpec) -> EndpointSpec:
    """The spec with the front of the endpoint that it joins. Raises ConfigError for fields that differ from it."""
    has_front = BINARY_VARIABLE in os.environ
    return spec.adopt_reach(Reach.from_yaml(_call_on_head(_read_here)) if has_front else Reach())


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
    front = Front(reach.host, pem, client_ca, proxies, reach.ingress_threads, reach.model_dump_json())
    install_front(front, find_ingress_folder())
    return reach


def _read_here() -> str:
    return read_front_spec(find_ingress_folder())


def _call_on_head(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call on the head's host, where the user's files and HAProxy's are. Raises the function's errors."""
    if is_head(ray.util.get_node_ip_address()):
        return function(*arguments, **named)
    task: Any = ray.remote(num_cpus=0, scheduling_strategy=make_head_affinity())(function)
    try:
        answer: T = ray.get(task.remote(*arguments, **named))
        return answer
    except RayTaskError as error:
        if isinstance(error.cause, ShoalError):
            raise error.cause from None
        raise
