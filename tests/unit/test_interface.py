"""Which interface gloo is told to speak by."""

from __future__ import annotations

import os

import pytest

from shoal.parallel.interface import VARIABLE, address_towards, speak_from


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)


def test_the_one_that_has_the_address() -> None:
    speak_from("127.0.0.1")
    assert os.environ[VARIABLE] == "lo"


def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    speak_from("127.0.0.1")
    assert os.environ[VARIABLE] == "ib0"


def test_an_address_of_nobody_here_says_nothing() -> None:
    speak_from("192.0.2.7")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("no-such-host.invalid", None)])
def test_the_address_by_which_a_host_sees_this_one(host: str, address: str | None) -> None:
    assert address_towards(host) == address
