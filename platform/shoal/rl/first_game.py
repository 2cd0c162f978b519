"""The gateway of a run that has no spaces yet: it listens where the gateway will, until a game has brought them.

A run with `env=ask` has it first. After a `hello` with `offers` that the run can learn from, games are told to connect
again, until the gateway takes the same ports. Spaces and ports are facts of the ledger: a run that is resumed has them.
Called by `LocalLoop.open`, and by a Ray worker.
"""

from __future__ import annotations

import hmac
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from shoal.atomic_file import make_folder
from shoal.errors import ConfigError, ProtocolViolation
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.gateway.listener import find_listener, read_frames
from shoal.rl.gateway.sessions import find_hello_problem, to_printable
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.zmq_listener import bind_router, format_address
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, MessageLimits, PolicySpec, TensorSpec, encode
from shoal.wire.given_spaces import GivenSpaces, find_wrong_spaces
from shoal.wire.messages import PROTOCOL_VERSION, Bye, ErrorMessage, Hello, Message, reject_version

STAY_S = 0.05  # between two looks at whether the gateway comes
WAITING_PRINT_S = 30.0  # between two lines that say what a run waits for
EXAMPLE = '"offers": {"observation": [4], "action": 3}'
print_line = partial(print, flush=True)
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
        self._limits = MessageLimits(max_message_bytes=spec.gateway.max_message_bytes)
        make_folder(folder)
        self._ledger = ledger = Ledger(folder / LEDGER_NAME)
        self.env, self.brought_by = ledger.get_fact("spaces") or "", ledger.get_fact("spaces_from") or ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            port = int(ledger.get_fact("port") or 0)
            self._socket, self.port = bind_router(self._context, spec.gateway, port, curve_keys)
            ledger.set_fact("port", str(self.port))
            setting = GatewaySetting(spec.gateway, _NOTHING, token, curve_keys=curve_keys)
            listener, port = find_listener(spec.gateway), int(ledger.get_fact("websocket_port") or 0)
            self._listener = None if listener is None else listener(setting, port)
            if self._listener is not None:
                ledger.set_fact("websocket_port", str(self._listener.port))
            ledger.commit()
        except BaseException:
            self._context.destroy(linger=0)
            ledger.close()
            raise
        self._routes: dict[bytes, None] = {}  # of those that have the token
        self._sweep_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._listener is not None:
            self._poller.register(self._listener.fileno(), zmq.POLLIN)

    def format_addresses(self, host: str = "") -> list[str]:
        """Where games may connect: by ZeroMQ, and by WebSocket where the run has that. host: by default the
        advertised, or the spec's"""
        advertised, port = self.spec.gateway.advertised
        host = advertised or host or self.spec.gateway.host
        addresses = [format_address("tcp", host, port or self.port)]
        if self._listener is not None:
            addresses.append(format_address(self._listener.scheme, host, self._listener.port))
        return addresses

    def wait(self, timeout_s: float) -> bool:
        """Answer games until one has brought the spaces, or the time is over; returns whether one has."""
        deadline = time.monotonic() + timeout_s
        while not self.env and (left_s := deadline - time.monotonic()) > 0:
            self._answer(left_s)
        return bool(self.env)

    def stay(self, closing: threading.Event) -> None:
        """Tell games that the run begins, until then."""
        while not closing.is_set():
            self._answer(STAY_S)

    def close(self) -> None:
        """Free the ports. Idempotent."""
        if self._context.closed:
            return
        for route in self._routes:
            self._send(route, Bye("the run has ended", True))
        if self._listener is not None:
            self._listener.close()
        self._context.destroy(linger=500)
        self._ledger.close()

    def _answer(self, timeout_s: float) -> None:
        """Wait this long for messages, and answer a round of them."""
        ready = dict(self._poller.poll(int(1000 * min(timeout_s, self.spec.gateway.heartbeat_s)) + 1))
        if self._socket in ready:
            route, *frames = self._socket.recv_multipart()
            self._take(route, read_frames(frames, self._limits))
        if self._listener is not None:
            for route, received, _ in self._listener.receive(is_busy=False):
                if received is not None:
                    self._take(route, received)
                else:
                    self._routes.pop(route, None)
        if self._listener is not None and time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + self.spec.gateway.heartbeat_s
            list(self._listener.sweep(()))

    def _take(self, route: bytes, message: Message | ProtocolViolation) -> None:
        try:
            if isinstance(message, ProtocolViolation):
                raise message
            if not isinstance(message, Hello):
                raise ProtocolViolation("hello_required", "say hello first")
            self._take_hello(route, message)
        except ProtocolViolation as error:
            self._send(route, ErrorMessage(error.code, error.message, error.code in _FATAL, error.seq))

    def _take_hello(self, route: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise reject_version(hello.protocol)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise ProtocolViolation("bad_token", "the token is not the one of this gateway")
        if (problem := find_hello_problem(hello, None)) is not None:
            raise ProtocolViolation(*problem)
        if self.env:
            return self._send(route, _BEGINS)
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
            self._send(each, _BEGINS)
        self._routes.clear()

    def _send(self, route: bytes, message: Message) -> None:
        if self._listener is not None and route in self._listener:
            self._listener.send(route, message, ())
            return
        try:
            self._socket.send_multipart([route, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


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


def name_first_game(run_id: str) -> str:
    """Of its Ray worker, for the gateway that takes its ports."""
    return f"first-game-{run_id}"


def describe_waiting(addresses: list[str], server_key: str = "", token: str = "") -> str:
    """What to do while a run waits for its first game. token: where it is"""
    key = f"\n    with the server key {server_key}" if server_key else ""
    key += f"\n    with the token in {token}" if token else ""
    lines = "".join(f"\n    {address}" for address in addresses)
    hello = f'{{"kind": "hello", "protocol": 1, "token": TOKEN, "actor_id": "me", "incarnation": 1, {EXAMPLE}}}'
    return f"waiting for a game that brings its spaces, at{lines}{key}\n    which begins with {hello}"
