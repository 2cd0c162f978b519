"""Connections between processes of ours: what is sent arrives as it was, and nobody without the secret gets in."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from shoal.channel import connection
from shoal.channel.connection import Channel, ChannelListener, connect
from shoal.errors import ConnectionLost
from waiting import wait_for

HOST = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[ChannelListener]:
    with closing(ChannelListener(HOST)) as opened:
        yield opened


@pytest.fixture
def ends(listener: ChannelListener) -> Iterator[tuple[Channel, Channel]]:
    with closing(connect(listener.address)) as ours:
        theirs = listener.accept(10.0)
        assert theirs is not None
        assert theirs.pid == os.getpid()
        with closing(theirs):
            yield ours, theirs


def test_what_is_sent_arrives_as_it_was_and_is_the_readers_own(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    tensor, array = torch.ones(3, dtype=torch.bfloat16), np.arange(6.0).reshape(2, 3).T
    ours.send((tensor, array, np.zeros((0, 2))))
    own_tensor, own_array, none = theirs.receive()
    assert torch.equal(own_tensor, tensor)
    np.testing.assert_array_equal(own_array, array, strict=True)
    assert none.shape == (0, 2)
    own_tensor += 1
    own_array += 1
    with pytest.raises(AttributeError):
        ours.send(lambda: None)
    theirs.send("goes on")
    assert ours.receive() == "goes on"


def test_a_peer_that_is_silent_or_gone_is_lost(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    with pytest.raises(ConnectionLost):
        ours.receive(timeout_s=0.05)
    closing_later = threading.Timer(0.1, theirs.close)
    closing_later.start()
    with pytest.raises(ConnectionLost, match="has ended"):
        ours.receive()
    closing_later.join()
    with pytest.raises(ConnectionLost):
        theirs.send(bytes(2**20))


def test_nobody_without_the_secret_gets_in(listener: ChannelListener) -> None:
    with pytest.raises(ConnectionLost, match="proved"):
        connect(listener.address._replace(secret=b"another"))
    connect(listener.address).close()
    assert listener.accept(10.0) is not None
    assert listener.accept(0) is None
    listener.close()
    listener.close()
    assert listener.accept() is None
    with pytest.raises(ConnectionLost, match="nothing listens"):
        connect(listener.address)


def test_connections_without_the_secret_end_and_hinder_no_other(
    listener: ChannelListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROOF_S", 0.5)
    before = threading.active_count()
    strangers = [socket.create_connection(listener.address[:2]) for _ in range(connection.MAX_STRANGERS + 20)]
    try:
        wait_for(lambda: threading.active_count() > before)
        assert threading.active_count() - before <= connection.MAX_STRANGERS
        wait_for(lambda: threading.active_count() == before)
        connect(listener.address).close()
    finally:
        for each in strangers:
            each.close()
