"""What a replica and its workers send each other, over connections that prove a secret, and how tensors travel.

| from     | to                | message                                          | answer                        |
|----------|-------------------|--------------------------------------------------|-------------------------------|
| replica  | a spare worker    | BuildModel, before JoinGang                      | WorkerAnswer                  |
| replica  | every worker      | JoinGang: its rank and peers                     | WorkerAnswer: a store's port  |
| replica  | every worker      | LoadVersion, DropVersion                         | WorkerAnswer to LoadVersion   |
| replica  | every worker      | RunBatch: the inputs of a micro-batch            | WorkerAnswer of the last one  |
| worker   | the next stage's  | the micro-batch's activation, or the error       | none                          |

Each connection carries its messages in order, and all workers get the same order, so that nothing needs a number.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.extend.registry import ModelFactory
from shoal.extend.serve import TemplateConfig
from shoal.libs.gang.plan import GangPlan
from shoal.network_address import watch_host
from shoal.weights import WeightFile

Address = tuple[str, int]
LOST_S = 4  # after which a host that acknowledges nothing is lost
PROOF_S, START_S = 5, 60  # after which a peer that does not prove the secret is a stranger; or has not started


@dataclass(frozen=True)
class BuildModel:
    """Build a model without weights and drop it: what this imports is there when a version is to be loaded."""

    factory: ModelFactory


@dataclass(frozen=True)
class JoinGang:
    """The first message to a worker that is no spare one.

    next: the worker of the next stage, to which activations go; None without one
    store: where workers that split layers find each other; None without, and for the one that opens it
    """

    rank: int
    size: int
    splits_layers: bool
    next: Address | None = None
    store: Address | None = None


@dataclass(frozen=True)
class LoadVersion:
    """Load a version, to be named by `key`."""

    key: int
    config: TemplateConfig
    plan: GangPlan
    file: WeightFile


@dataclass(frozen=True)
class DropVersion:
    """Free a version."""

    key: int


@dataclass(frozen=True)
class RunBatch:
    """Compute a micro-batch."""

    key: int
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class WorkerAnswer:
    """What became of a message: a value, or an error."""

    value: Any = None
    error: Exception | None = None


def accept(listener: Listener, secret: bytes) -> Connection:
    """The next connection that proves the secret. Raises OSError when the listener is closed."""
    while True:
        connection = listener.accept()
        try:
            _prove(connection, secret, PROOF_S, deliver_challenge, answer_challenge)
            return connection
        except (AuthenticationError, EOFError, OSError):  # it is not of ours
            connection.close()


def connect(address: Address, secret: bytes) -> Connection:
    """Raises OSError, EOFError, AuthenticationError."""
    connection = Client(address)
    _prove(connection, secret, START_S, answer_challenge, deliver_challenge)
    return connection


def _prove(connection: Connection, secret: bytes, limit_s: int, *challenges: Callable[..., None]) -> None:
    """Prove the secret to each other in this time. From then on send at once, and notice that the peer's host is
    gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", limit_s, 0))
        for challenge in challenges:
            challenge(connection, secret)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_host(opened, LOST_S)


def close(connection: Connection) -> None:
    """Close a connection that another thread may be reading: its reading then ends."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as opened:
            opened.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or the peer is gone
        return


def write_tensor(connection: Connection, tensor: Tensor) -> None:
    """Send an activation without a further copy."""
    tensor = tensor.detach().contiguous()
    connection.send((tensor.dtype, tensor.shape))
    if tensor.numel():
        connection.send_bytes(_view_bytes(tensor))


def read_tensor(connection: Connection) -> Tensor | Exception:
    """An activation, or the error that was sent in place of one. Raises EOFError, OSError."""
    described = connection.recv()
    if isinstance(described, Exception):
        return described
    dtype, shape = described
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        connection.recv_bytes_into(_view_bytes(tensor))
    return tensor


def _view_bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
