"""The gateway of a run that has no spaces yet: it listens where the gateway will, until a game has brought them.

A run with `env=ask` has it first. After a `hello` with `offers` that the run can learn from, games are told to connect
again, until the gateway takes the same ports. Spaces and ports are facts of the ledger: a run that is resumed has them.
Called by `LocalLoop.open`, and by a Ray worker.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shoal.atomic_file import make_folder
from shoal.errors import ConfigError, ProtocolViolation
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.gateway.connections import Connections
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.gateway.sessions import find_hello_problem, to_printable
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.zmq_listener import format_address
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, PolicySpec, TensorSpec
from shoal.wire.given_spaces import GivenSpaces, find_wrong_spaces
from shoal.wire.messages import Bye, ErrorMessage, Hello, Message

STAY_S = 0.05  # between two looks at whether the gateway comes
WAITING_PRINT_S = 30.0  # between two lines that say what a run waits for
EXAMPLE = '"offers": {"observation": [4], "action": 3}'
_NOTHING = ExperienceSpec(TensorSpec("float32"), TensorSpec("int64"), 1, PolicySpec("", "", ()))
_BEGINS = Bye("the run begins, and its learner starts: connect again")
_FATAL = ("bad_version", "bad_token", "wrong_spaces")


class FirstGame:
    """Listen on the ports of `spec.gateway` in `wait`. Raises ConfigError when one cannot be bound.

    folder: of the run, where its ledger is
    env:    the spaces as `spec.env` has them; "" until a game has brought them
    brought_by: that game's actor id
    """

    def __init__(self, spec: RLSpec, folder: Path, token: str, curve_keys: tuple[bytes, bytes] | None = None) -> None:
        self.spec, self._token = spec, token
        setting = GatewaySetting(spec.gateway, _NOTHING, token, curve_keys=curve_keys)
        make_folder(folder)
        self._ledger = ledger = Ledger(folder / LEDGER_NAME)
        self.env, self.brought_by = ledger.get_fact("spaces") or "", ledger.get_fact("spaces_from") or ""
        with ExitStack() as opened:
            opened.callback(ledger.close)
            self._connections = Connections(setting, ledger)
            opened.callback(self._connections.close)
            ledger.commit()
            self._opened = opened.pop_all()
        self._closing, self._answering = threading.Event(), threading.Lock()
        self._routes: dict[bytes, None] = {}  # of those that have the token
        self._sweep_at = 0.0

    def format_addresses(self, host: str = "") -> list[str]:
        """Where games may connect: by ZeroMQ, and by WebSocket where the run has that. host: by default the
        advertised, or the spec's"""
        advertised, port = self.spec.gateway.advertised
        host = advertised or host or self.spec.gateway.host
        addresses = [format_address("tcp", host, port or self._connections.port)]
        if websocket := format_websocket_address(self._connections.listener, host):
            addresses.append(websocket)
        return addresses

    def wait(self, timeout_s: float) -> tuple[str, str]:
        """Answer games until one has brought the spaces, or the time is over; returns `env` and `brought_by`."""
        deadline = time.monotonic() + timeout_s
        while not self.env and (left_s := deadline - time.monotonic()) > 0:
            self._answer(left_s)
        return self.env, self.brought_by

    def stay(self) -> None:
        """Tell games that the run begins, until another thread closes this."""
        with self._answering:
            while not self._closing.is_set():
                self._answer(STAY_S)

    def close(self) -> None:
        """Free the ports, before the gateway binds them. Idempotent."""
        self._closing.set()
        with self._answering:
            for route in self._routes:
                self._connections.send(route, Bye("the run has ended", True))
            self._routes.clear()
            self._opened.close()

    def _answer(self, timeout_s: float) -> None:
        """Wait this long for messages, and answer a round of them."""
        connections = self._connections
        timeout_ms = int(1000 * min(timeout_s, self.spec.gateway.heartbeat_s)) + 1
        for route, message, _ in connections.receive(dict(connections.poller.poll(timeout_ms))):
            if message is not None:
                self._take(route, message)
            else:
                self._routes.pop(route, None)
        if connections.listener is not None and time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + self.spec.gateway.heartbeat_s
            list(connections.listener.sweep(()))

    def _take(self, route: bytes, message: Message | ProtocolViolation) -> None:
        try:
            if isinstance(message, ProtocolViolation):
                raise message
            if not isinstance(message, Hello):
                raise ProtocolViolation("hello_required", "say hello first")
            self._take_hello(route, message)
        except ProtocolViolation as error:
            self._connections.send(route, ErrorMessage(error.code, error.message, error.code in _FATAL, error.seq))

    def _take_hello(self, route: bytes, hello: Hello) -> None:
        if (problem := find_hello_problem(hello, self._token, lambda actor_id: None)) is not None:
            raise ProtocolViolation(*problem)
        if self.env:
            self._connections.send(route, _BEGINS)
            return
        self._routes[route] = None
        if not hello.offers:
            remedy = f"add them to hello, as {EXAMPLE}"
            raise ProtocolViolation("no_spaces", f"this run takes its spaces from the first game that joins: {remedy}")
        try:
            spec = self.spec.update({"env": hello.offers})
            experience, _ = describe_given(spec)
        except ConfigError as error:
            reason = f"{error.problem}. {error.remedy}".removesuffix(". ") if error.field == "env" else str(error)
            raise ProtocolViolation("wrong_spaces", f"this run cannot learn from them: {reason}") from None
        if difference := find_wrong_spaces(hello.offers, experience):
            raise ProtocolViolation("wrong_spaces", difference)
        self.env, self.brought_by = spec.env, to_printable(hello.actor_id)
        self._ledger.set_fact("spaces", self.env)
        self._ledger.set_fact("spaces_from", self.brought_by)
        self._ledger.commit()
        self._ledger.close()
        for each in self._routes:
            self._connections.send(each, _BEGINS)
        self._routes.clear()


def describe_given(spec: RLSpec) -> tuple[ExperienceSpec, np.ndarray]:
    """`experience_spec` of the spaces that `spec.env` gives, and an observation. Raises ConfigError."""
    if "policies" in spec.given:
        problem = "gives spaces of several policies"
        raise ConfigError("env", spec.env, problem, "use `shoal run policies`, or give observation and action")
    if spec.ignore:
        raise ConfigError("ignore", spec.ignore[0], "is no part of spaces that are given", "leave it out")
    given = GivenSpaces.parse(spec.given)
    experience = experience_spec(given.observation, given.action, spec, given.has_masks)
    return experience, given.make_first_observation()


def describe_waiting(addresses: list[str], server_key: str = "", token: str = "") -> str:
    """What to do while a run waits for its first game. token: where it is"""
    key = f"\n    with the server key {server_key}" if server_key else ""
    key += f"\n    with the token in {token}" if token else ""
    lines = "".join(f"\n    {address}" for address in addresses)
    hello = f'{{"kind": "hello", "protocol": 1, "token": TOKEN, "actor_id": "me", "incarnation": 1, {EXAMPLE}}}'
    return f"waiting for a game that brings its spaces, at{lines}{key}\n    which begins with {hello}"
