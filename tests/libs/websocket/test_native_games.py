"""Games in C++ and C#: they learn, outlive cuts and restarts, and name what a server or their game does wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.server import ServerConnection, serve

from cutting_proxy import CuttingProxy
from rl_setting import TOKEN, Parts, serving
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec
from waiting import wait_for

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / "clients"
TOOLS = {"c++": ("g++",), "c#": ("mcs", "mono")}
SPEC = RLSpec(hidden=(32,), segment_length=32).override(
    [
        "learner.batch_steps=256",
        "learner.max_batch_steps=256",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.03",
        "algorithm.discount=0.8",
        "algorithm.entropy_cost=0.003",
        "gateway.websocket=0",
    ]
)
OBSERVATION = "0.25,-0.5,0.125,1"
Programs = dict[str, list[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The command of each language's game, where the machine has its compiler."""
    folder = tmp_path_factory.mktemp("games")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    sources = [HERE / "NativeGame.cs", CLIENTS / "csharp" / "Catch.cs", CLIENTS / "csharp" / "Shoal.cs"]
    compilers = {
        "c++": ["g++", *flags, "-I", CLIENTS / "cpp", HERE / "native_game.cpp", "-o", folder / "game"],
        "c#": ["mcs", "-warnaserror", "-main:NativeGame", f"-out:{folder / 'game.exe'}", *sources],
    }
    commands = {"c++": [str(folder / "game")], "c#": ["mono", str(folder / "game.exe")]}
    found = {name: command for name, command in commands.items() if all(map(shutil.which, TOOLS[name]))}
    for name in found:
        subprocess.run(compilers[name], check=True)
    return found


@pytest.fixture(params=list(TOOLS))
def program(request: pytest.FixtureRequest, programs: Programs) -> list[str]:
    if request.param not in programs:
        pytest.skip(f"needs {' and '.join(TOOLS[request.param])}")
    return programs[request.param]


@contextmanager
def started(command: list[str], token: str = TOKEN) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "SHOAL_TOKEN": token}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_end(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (0, "the run is over\n")


def count_steps(stats: dict[str, Any]) -> dict[str, int]:
    return {actor["actor_id"]: actor["steps"] for actor in stats["actors"]}


def test_they_learn_together_until_the_game_is_solved(tmp_path: Path, programs: Programs) -> None:
    experience = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(3), SPEC)
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN, target_return=4.5) as loop, ExitStack() as games:
        addresses = f"ws://127.0.0.1:1,{loop.websocket_address}"  # nothing listens at the first
        playing = [games.enter_context(started([*command, addresses, "8"])) for command in programs.values()]
        wait_for(lambda: all(loop.gateway.stats()["actors"]) and len(loop.gateway.stats()["actors"]) == len(programs))
        assert loop.wait_until_solved(timeout_s=600) > 0
        stats = loop.gateway.stats()
        loop.close()
        for process in playing:
            wait_for_end(process)
    assert all(actor["invalid"].keys() <= {"unknown_kind"} for actor in stats["actors"])
    totals = loop.ledger.get_totals()
    assert (totals.is_balanced, totals.duplicates) == (True, 0)


def test_episodes_go_on_after_a_cut_and_after_a_restart_of_the_gateway(tmp_path: Path, programs: Programs) -> None:
    """Each episode of Catch has 25 steps, a segment of 16 and one of 9, and an odd return."""
    with ExitStack() as games, serving(tmp_path, websocket=0, queue_capacity=10_000) as first:
        address = first.gateway.format_websocket_address()
        port = int(address.rpartition(":")[2])
        playing, proxies = [], []
        for number, command in enumerate(programs.values()):
            proxy = games.enter_context(CuttingProxy(("127.0.0.1", port), limit=20_000 + number))
            near = proxy.url.replace("http", "ws")
            playing.append(games.enter_context(started([*command, f"{near},{address}", str(1 + 3 * number)])))
            proxies.append(proxy)
        wait_for(lambda: all(proxy.is_cut for proxy in proxies), what="cut connections")
        before = count_steps(first.gateway.stats())
        wait_for(lambda: all(steps > before[name] + 100 for name, steps in count_steps(first.gateway.stats()).items()))
        lengths = first.take(1, 10**6, 10**5).lengths.tolist()
        assert set(lengths) == {16, 9}
        assert 0 <= lengths.count(16) - lengths.count(9) <= 5  # the open episodes
        assert first.ledger.get_totals().duplicates == 0
        first.gateway.close()
        with serving(tmp_path, websocket=port, queue_capacity=10_000) as second:
            wait_for(lambda: len(count_steps(second.gateway.stats())) == len(programs))
            wait_for(lambda: all(steps > 100 for steps in count_steps(second.gateway.stats()).values()))
            assert set(second.gateway._progress.returns) <= {-5.0, -3.0, -1.0, 1.0, 3.0, 5.0}  # with what came before
            assert second.ledger.get_totals().duplicates == 0
            second.gateway.close(finished=True)
            for process in playing:
                wait_for_end(process)
