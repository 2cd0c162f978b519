"""A FirstGame as a Ray worker, on the host where the gateway of the run will be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray

from shoal.actor.environment import ASK
from shoal.cluster.capacity import get_head_address, get_node_address, make_host_options
from shoal.errors import ClusterError, RecordUnwritable, error_summary
from shoal.home import home
from shoal.ray_call import NAMESPACE
from shoal.rl.first_game import WAITING_PRINT_S, FirstGame, describe_waiting, name_first_game, print_line
from shoal.rl.gateway.zmq_listener import load_curve_keys, require_reachable_gateway, resolve_reachable_host
from shoal.rl.spec import RLSpec
from shoal.runs import RunRecorder

SpecT = TypeVar("SpecT", bound=RLSpec)
START_TIMEOUT_S = 60.0


@ray.remote(max_concurrency=2)
class FirstGameWorker:
    """Forwards to its FirstGame."""

    def __init__(self, spec: RLSpec, folder: Path, token: str, keys: tuple[bytes, bytes] | None) -> None:
        self._game = FirstGame(spec, folder, token, keys)
        self._closing, self._answering = threading.Event(), threading.Lock()

    def addresses(self) -> list[str]:
        host = resolve_reachable_host(self._game.spec.gateway.host, ray.util.get_node_ip_address())
        return self._game.format_addresses(host)

    def wait(self, timeout_s: float) -> tuple[str, str]:
        """The spaces and the game that has brought them; empty until then."""
        self._game.wait(timeout_s)
        return self._game.env, self._game.brought_by

    def stay(self) -> None:
        with self._answering:
            self._game.stay(self._closing)

    def close(self) -> None:
        """Before the gateway binds the same ports."""
        self._closing.set()
        with self._answering:
            self._game.close()


def take_spaces(
    spec: SpecT, recorder: RunRecorder, token: str, staying: ExitStack, say: Callable[[str], None] = print_line
) -> SpecT:
    """The spec of a run with `env=ask` with the spaces of the first game that joins, as its record then has it; other
    specs as they are.

    staying: is to be closed when the gateway has taken its ports; until then games are told that the run begins
    say:     gets, every half a minute, what is waited for

    Raises ClusterError when the worker cannot start, or is gone.
    """
    if spec.env != ASK:
        return spec
    keys = load_curve_keys(recorder.folder) if spec.gateway.curve else None
    placement = make_host_options()
    require_reachable_gateway(spec, get_node_address(placement["scheduling_strategy"].node_id), get_head_address())
    worker: Any = FirstGameWorker.options(  # type: ignore[attr-defined]
        name=name_first_game(recorder.id), namespace=NAMESPACE, **placement
    ).remote(spec, recorder.folder, token, keys)
    staying.callback(ray.kill, worker)
    try:
        addresses = ray.get(worker.addresses.remote(), timeout=START_TIMEOUT_S)
        with suppress(RecordUnwritable):
            recorder.record_event("spaces_asked", addresses=addresses)
        while True:
            waiting = describe_waiting(addresses, keys[0].decode() if keys else "", str(home() / "token"))
            say(f"run {recorder.id}: {waiting}")
            env, brought_by = ray.get(worker.wait.remote(WAITING_PRINT_S))
            if env:
                break
        worker.stay.remote()
    except (ray.exceptions.RayError, TimeoutError) as error:
        reason = error_summary(str(error)) or str(error).strip().splitlines()[-1]
        raise ClusterError(f"the run cannot wait for its first game: {reason}") from error
    with suppress(RecordUnwritable):
        recorder.record_event("spaces_taken", actor_id=brought_by, spaces=env)
    say(f"run {recorder.id}: {brought_by} brings the spaces {env}")
    taken = spec.update({"env": env})
    recorder.change_spec(taken.to_record())
    return taken
