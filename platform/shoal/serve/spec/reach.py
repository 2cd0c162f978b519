"""How clients reach an endpoint, in its spec: certificates, addresses, proxies. Pure data; opens no file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from shoal.cluster.ingress.front import CertificateFiles
from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.network_address import is_loopback

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
MAX_NETWORKS = 50  # of a line of HAProxy's, which has 64 words
EVERY_NODE = "every_node"
OTHER_REACH = "leave it out, end the other endpoints (`shoal serve status` lists them), or use another cluster"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address at which this machine reaches it


def _require_address(host: str) -> str:
    try:
        if host != "localhost" and getattr(ipaddress.ip_address(host), "scope_id", None):
            raise ValueError  # of one link: HAProxy knows no names of links
    except ValueError:
        raise ValueError("is no address: give one of this host, or 0.0.0.0 or :: for all of them") from None
    return host


def _require_full_path(path: str) -> str:
    if path and not Path(path).is_absolute():
        raise ValueError("is relative: give the full path of the file on the cluster's head")
    return path


def _require_network(network: str) -> str:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ValueError(f"is no network such as 10.0.0.0/8 ({error})") from None
    return network


def _require_name(name: str) -> str:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name and _NAME.fullmatch(name) is None:
            raise ValueError("is no name of a host, such as models.example, and no address") from None
    return name


Address = Annotated[str, AfterValidator(_require_address)]
HostName = Annotated[str, AfterValidator(_require_name)]
FilePath = Annotated[str, AfterValidator(_require_full_path)]
Network = Annotated[str, AfterValidator(_require_network)]


class TlsOptions(Spec):
    """The files of an endpoint's certificate, on the cluster's head, in PEM. New content is picked up within seconds.

    certificate: with its chain
    key:         its private key
    client_ca:   when set, a client needs a certificate of one of these authorities
    name:        the host in the endpoint's address; "": `host`, or where the certificate is not for it, its first name
    """

    certificate: FilePath = Field(min_length=1)
    key: FilePath = Field(min_length=1)
    client_ca: FilePath = ""
    name: HostName = ""

    @property
    def files(self) -> CertificateFiles:
        return CertificateFiles(self.certificate, self.key, self.client_ca)


class Reach(Spec):
    """The fields of an endpoint about its address.

    host:            where the ingress listens; beyond loopback with `tls`, or `insecure`
    tls:             for https, and gRPC over TLS; None: plain HTTP and gRPC
    insecure:        accept plain HTTP beyond loopback: others read the requests, and the token in each of them
    trusted_proxies: networks of the proxies whose X-Forwarded-* count
    ingress_threads: threads of the ingress: TLS of many connections takes more than one
    ingress:         "head": the head listens at `host` and the endpoint's port; "every_node": so does each node that
                     has a replica, for a balancer in front of them
    """

    tls: TlsOptions | None = None
    insecure: bool = False
    host: Address = "127.0.0.1"  # after these, which its validation needs
    trusted_proxies: list[Network] = Field(default_factory=list, max_length=MAX_NETWORKS)
    ingress_threads: int = Field(default=1, ge=1, le=64)
    ingress: Literal["head", "every_node"] = "head"  # after host, which its validation needs

    @field_validator("insecure")
    @classmethod
    def _contradicts_tls(cls, insecure: bool, info: ValidationInfo) -> bool:
        if insecure and info.data.get("tls") is not None:
            raise ValueError("contradicts tls, with which nothing is in plain text: leave one of them out")
        return insecure

    @field_validator("host")
    @classmethod
    def _require_encryption(cls, host: str, info: ValidationInfo) -> str:
        if info.data.get("tls", False) is None and not info.data.get("insecure", True) and not is_loopback(host):
            problem = "is beyond loopback, where plain HTTP shows every request and its token"
            raise ValueError(f"{problem}: give tls.certificate and tls.key, or insecure: true")
        return host

    @field_validator("ingress")
    @classmethod
    def _require_common_address(cls, ingress: str, info: ValidationInfo) -> str:
        host = info.data.get("host", "::")
        if ingress == EVERY_NODE and not (host in LOOPBACK or is_loopback(host)):
            raise ValueError(f"needs a host that all nodes have, and {host} is one node's: give host: 0.0.0.0 or ::")
        return ingress


def require_one_address(applications: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError when two applications of a Serve file, which share the ingress, want other addresses of it.

    applications: the `endpoint` of the `args` of each; one that is not valid is left to its own application
    """
    reaches: dict[str, Reach] = {}
    for name, fields in applications.items():
        with suppress(ConfigError):
            reach = Reach.parse({field: each for field, each in fields.items() if field in Reach.model_fields})
            tls = None if reach.tls is None else reach.tls.model_copy(update={"name": ""})  # its address alone
            reaches[name] = reach.model_copy(update={"tls": tls})
    for (first, there), (name, reach) in pairwise(reaches.items()):
        for field in Reach.model_fields:
            own, other = getattr(reach, field), getattr(there, field)
            if own != other:
                problem = f"is of the application {name!r}, and {first!r} has {other!r}: they share one address"
                raise ConfigError(
                    f"endpoint.{field}", own, problem, "give both the same, or one application both models"
                )
