"""What HAProxy's configuration on one of several nodes has of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cluster.ingress.every_node import list_addresses, read_front, refuse_health, use_node_address
from shoal.cluster.ingress.front import Front, install_front, read_front_node

CLOSED = "unix@/h.sock"
CHECK = '    http-request return status {} content-type text/plain string "{}" if healthcheck'


@pytest.mark.parametrize(
    ("front", "node", "serves", "addresses"),
    [
        (None, "a", "127.0.0.1", ["127.0.0.1:80"]),
        (None, "a", "198.18.7.10", [CLOSED]),  # the node's replica has not installed it yet
        (None, "a", "*", [CLOSED]),
        (Front("0.0.0.0"), "a", "127.0.0.1", ["0.0.0.0:80"]),
        (Front("0.0.0.0", node="a", address="198.18.7.11"), "a", "198.18.7.10", ["0.0.0.0:80"]),
        (Front("::", node="a", address="198.18.7.11"), "a", "198.18.7.10", ["0.0.0.0:80", ":::80"]),
        (Front("0.0.0.0", node="a", address="198.18.7.11"), "b", "198.18.7.10", [CLOSED]),  # of a former cluster
        (Front("127.0.0.1", node="a", address="127.0.0.1"), "b", "127.0.0.1", [CLOSED]),  # a second node of this host
    ],
)
def test_a_node_listens_where_its_own_front_says(
    tmp_path: Path, front: Front | None, node: str, serves: str, addresses: list[str]
) -> None:
    if front is not None:
        install_front(front, tmp_path)
        assert read_front_node(tmp_path) == front.node
    found = read_front(tmp_path / "front.json", node)
    assert list_addresses(found or {}, serves, "80", CLOSED) == addresses


def test_replicas_of_its_own_node_are_asked_at_the_nodes_address() -> None:
    lines = [
        "    balance leastconn",
        "    server a 127.0.0.1:30000 check observe layer4",
        "    server b ::1:40000 proto h2 check",
        "    server c 198.18.7.10:30000 check",
        "    server unavailable unix@/u.sock no-check backup",
    ]
    assert use_node_address(lines, "") == lines
    assert use_node_address(lines, "198.18.7.11") == [
        "    balance leastconn",
        "    server a 198.18.7.11:30000 check observe layer4",
        "    server b 198.18.7.11:40000 proto h2 check",
        *lines[3:],
    ]


@pytest.mark.parametrize(
    ("status", "message", "is_left"),
    [
        (503, "This node is being drained.", True),
        (503, "No replicas are available yet.", True),
        (503, "Service Unavailable", False),  # its last line, for when no replica is up
        (200, "success", False),
    ],
)
def test_a_balancer_hears_that_a_node_is_left(status: int, message: str, is_left: bool) -> None:
    rules = refuse_health(["    acl healthcheck path -i /-/healthz", CHECK.format(status, message)])
    assert bool(rules) == is_left


def test_the_front_says_nothing_of_nodes_where_the_head_alone_listens(tmp_path: Path) -> None:
    install_front(Front(), tmp_path)
    assert {"node", "address"}.isdisjoint(json.loads((tmp_path / "front.json").read_text()))
