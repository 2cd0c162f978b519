"""Asynchronous training over a link that is cut, and one that is slow: between two network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

TOY = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"
HERE, THERE = "198.18.9.1", "198.18.9.2"  # of RFC 2544, for tests of networks
STEPS = 14
BEYOND = ("worker 1", "server 1")


def has_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
    return os.geteuid() == 0 and tools and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root and iproute2")


class Link:
    """Two namespaces, each held by a process, and the link between them."""

    def __init__(self, here: int, there: int) -> None:
        self.here, self.there = here, there
        self._run(here, "ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(there))
        for namespace, device, address in ((here, "near", HERE), (there, "far", THERE)):
            self._run(namespace, "ip", "link", "set", "lo", "up")
            self._run(namespace, "ip", "addr", "add", f"{address}/24", "dev", device)
            self._run(namespace, "ip", "link", "set", device, "up")

    def cut(self, seconds: float) -> None:
        self._run(self.there, "ip", "link", "set", "far", "down")
        time.sleep(seconds)
        self._run(self.there, "ip", "link", "set", "far", "up")

    def slow_down(self, rate: str) -> None:
        for namespace, device in ((self.here, "near"), (self.there, "far")):
            self._run(namespace, *f"tc qdisc add dev {device} root tbf rate {rate} burst 16kb latency 500ms".split())

    def num_bytes_sent(self) -> int:
        """From there to here."""
        found = self._run(self.here, "cat", "/sys/class/net/near/statistics/rx_bytes", mounts=True)
        return int(found)

    def _run(self, namespace: int, *words: str, mounts: bool = False) -> str:
        if mounts:  # /sys shows the devices of the namespace in which it was mounted
            script = f"mount -t sysfs sysfs /sys && {' '.join(words)}"
            words = ("unshare", "--mount", "sh", "-c", script)
        done = subprocess.run(
            ["nsenter", "-t", str(namespace), "-n", *words], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout


@contextmanager
def linked() -> Iterator[Link]:
    with ExitStack() as closing:
        holders = []
        for _ in range(2):
            words = ["unshare", "--net", "sh", "-c", "echo up; read -r _"]
            holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            closing.callback(holder.communicate)
            closing.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            holders.append(holder.pid)
        yield Link(*holders)


class LinkedRun:
    """The lines of a `linked_run`, as they come."""

    def __init__(self, link: Link, folder: Path, spec: dict[str, Any], beyond: tuple[str, ...]) -> None:
        folder.mkdir()
        program = Path(__file__).with_name("linked_run.py")
        words = [sys.executable, str(program), str(link.there), HERE, str(folder), json.dumps(spec), *beyond]
        within = ["nsenter", "-t", str(link.here), "-n", *words]
        self._process = subprocess.Popen(within, stdout=subprocess.PIPE, text=True)
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.outcome: dict[str, Any] = {}

    def read_until(self, step: int | None = None) -> None:
        """To that step, or to the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            if "event" in found:
                self.events.setdefault(found.pop("event"), []).append(found)
            elif "weights" in found:
                self.outcome = found
            elif step is not None and found["step"] >= step:
                return
        assert step is None, "the run ended early"
        assert self._process.wait(60) == 0
        assert self.events.keys().isdisjoint({"worker_lost", "server_lost"})

    def weights(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.outcome["weights"])

    def __enter__(self) -> LinkedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def spec_of(**changes: Any) -> dict[str, Any]:
    sync = {"kind": "parameter_server", "servers": 2, "transport": "frames"}  # they have one memory all the same
    base = {"task": TOY, "args": {"dropout": 0.0, "step_s": 0.05}, "workers": 2, "batch_size": 32, "sync": sync}
    return {**base, "log_every_steps": 1, "stop": {"steps": STEPS}, "threads": 1, **changes}


def test_a_link_that_is_cut_loses_no_update_and_repeats_none(tmp_path: Path) -> None:
    """A worker and a server are beyond it. Staleness 0: the weights are those of a run with a good link, to the bit."""
    with linked() as link:
        runs = []
        for name in ("calm", "cut"):
            with LinkedRun(link, tmp_path / name, spec_of(), BEYOND) as run:
                if name == "cut":
                    for step in (3, 8):
                        run.read_until(step)
                        link.cut(1.5)
                run.read_until()
            [counted] = run.events["staleness"]
            assert (counted["updates"], counted["lost"], counted["dropped"]) == (STEPS, 0, 0)
            assert counted["counts"] == {"0": 2 * STEPS}
            runs.append(run.weights())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.soak
def test_a_slow_link_is_not_loaded_twice(tmp_path: Path) -> None:
    """Each gradient takes longer on the way than a call on one host waits before it is sent again."""
    steps, hidden = 3, 300
    size = 4 * (8 * hidden + hidden + hidden * hidden + hidden + 3 * hidden + 3)
    with linked() as link:
        link.slow_down("2500kbit")
        spec = spec_of(args={"dropout": 0.0, "hidden": hidden}, stop={"steps": steps})
        spec["sync"]["servers"] = 1
        with LinkedRun(link, tmp_path / "slow", spec, ("worker 1",)) as run:
            run.read_until()
        [counted] = run.events["staleness"]
        assert (counted["updates"], counted["lost"], counted["dropped"]) == (steps, 0, 0)
        assert steps * size <= link.num_bytes_sent() < 1.5 * steps * size
