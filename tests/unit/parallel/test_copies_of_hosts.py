"""`parallel=hybrid`: one sharded copy of the model in each host; and the interface by which hosts speak."""

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import PlanError
from shoal.network_address import find_local_address
from shoal.parallel import ParallelSpec, World
from shoal.parallel.comm import world
from shoal.parallel.comm.world import (
    GLOO_INTERFACE_VARIABLE,
    NCCL_INTERFACE_VARIABLE,
    set_network_interface,
    set_network_interface_towards,
)


@pytest.mark.parametrize(
    ("plan", "workers", "ranks_per_host", "copies"),
    [
        ("hybrid", 8, 4, 2),
        ("hybrid", 8, 8, 1),
        ("hybrid", 8, 1, 8),
        ("hybrid", 8, None, 1),
        ({"shard": True, "replicate": "hosts", "tensor": 2}, 16, 8, 2),
        ({"shard": True, "replicate": "hosts", "pipeline": 2}, 16, 4, 2),  # a stage has two hosts
        ({"shard": True, "replicate": "hosts", "pipeline": 4}, 16, 8, 1),  # a host has two stages
        ({"shard": True, "replicate": 4}, 8, 4, 4),
    ],
)
def test_copies(plan: Any, workers: int, ranks_per_host: int | None, copies: int) -> None:
    degrees = ParallelSpec.model_validate(plan).resolve_dims(workers, ranks_per_host)
    assert degrees.replicate == copies
    if ranks_per_host and isinstance(plan, str):
        shards = degrees.data // copies
        hosts = [{rank // ranks_per_host for rank in range(first, first + shards)} for first in range(0, 8, shards)]
        assert all(len(each) == 1 for each in hosts)


def test_copies_that_hosts_would_share_are_refused() -> None:
    spec = ParallelSpec.parse({"shard": True, "replicate": "hosts", "tensor": 2})
    with pytest.raises(PlanError, match=r"6 data ranks of 2 each do not fill hosts of 8. give the number of copies"):
        spec.resolve_dims(12, 8)
    with pytest.raises(PlanError, match="do not fill hosts of 3"):
        spec.resolve_dims(6, 3)


@dataclass(frozen=True)
class Placed(World):
    """A world whose ranks have these places in their hosts."""

    places: tuple[int, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return list(self.places)


def _place(*places: int) -> World:
    return Placed(0, len(places), torch.device("cpu"), places=places)


def test_ranks_of_a_host_are_counted() -> None:
    assert _place(0).count_ranks_per_host() == 1
    assert _place(0, 1, 2, 3).count_ranks_per_host() == 4
    assert _place(0, 1, 0, 1).count_ranks_per_host() == 2
    for uneven in ((0, 1, 0), (0, 0, 1, 1), (0, 1, 2, 0)):
        with pytest.raises(PlanError, match="hosts differ in their ranks"):
            _place(*uneven).count_ranks_per_host()


# -- which interface gloo is told to speak by


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO_INTERFACE_VARIABLE, NCCL_INTERFACE_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_the_one_that_has_the_address() -> None:
    set_network_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE_VARIABLE] == "lo"
    assert os.environ[NCCL_INTERFACE_VARIABLE] == "=lo"


def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE_VARIABLE, "ib0")
    set_network_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE_VARIABLE] == "ib0"
    assert os.environ[NCCL_INTERFACE_VARIABLE] == "=ib0"  # both speak by one
    monkeypatch.setenv(NCCL_INTERFACE_VARIABLE, "^docker")
    set_network_interface("127.0.0.1")
    assert os.environ[NCCL_INTERFACE_VARIABLE] == "^docker"


def test_an_address_of_nobody_here_says_nothing() -> None:
    set_network_interface("192.0.2.7")
    assert GLOO_INTERFACE_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("no-such-host.invalid", None), ("a..b", None), ("", None)]
)
def test_the_address_by_which_a_host_sees_this_one(host: str, address: str | None) -> None:
    assert find_local_address(host) == address


@pytest.mark.parametrize(("has_others", "expected"), [(False, "lo"), (True, "eth7")])
def test_the_first_of_several_hosts_does_not_offer_loopback_to_the_others(
    monkeypatch: pytest.MonkeyPatch, has_others: bool, expected: str
) -> None:
    """Its own name leads there."""
    towards = {"first": "127.0.0.1", "192.0.2.1": "10.1.2.3"}
    names = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth7": [SimpleNamespace(address="10.1.2.3")]}
    monkeypatch.setattr(world, "find_local_address", towards.get)
    monkeypatch.setattr(world.psutil, "net_if_addrs", lambda: names)
    set_network_interface_towards("first", has_others)
    assert os.environ[GLOO_INTERFACE_VARIABLE] == expected
