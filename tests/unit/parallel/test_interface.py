"""Which interface gloo is told to speak by."""

import os
from types import SimpleNamespace

import pytest

from shoal.network_address import find_local_address
from shoal.parallel.comm import world
from shoal.parallel.comm.world import (
    GLOO_INTERFACE_VARIABLE,
    NCCL_INTERFACE_VARIABLE,
    set_network_interface,
    set_network_interface_towards,
)


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
