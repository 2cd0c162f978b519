"""A page in headless Chromium that plays Catch with its own policy, at a gateway and a learner in this process.

    python -m benchmarks.browser [--runs N] [--quick]

Steps a second and bytes a step to the gateway, with the tab shown and then hidden, in one run without a target; the
network is 64 x 64, and every step is learnt from. Then the time until a page that has just loaded has solved the game
(4.5 of 5 drops more caught than missed, in the mean of 100 episodes), from its first segment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box, Discrete

from benchmarks.children import ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec

sys.path.append(str(ROOT / "tests"))
from chromium import Chromium

TOKEN = "benchmark"
SPEC = RLSpec(env="catch", segment_length=64).override(
    [
        "learner.batch_steps=256",
        "learner.max_batch_steps=512",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.01",
        "algorithm.discount=0.9",
        "gateway.websocket=0",
    ]
)
TARGET = 4.5
NICE = "Chromium lowers the priority of a hidden tab's process (nice 5): on a busy machine other programs come first"


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def make_loop(folder: Path, hidden: tuple[int, ...], target: float | None) -> LocalLoop:
    spec = SPEC.update({"hidden": hidden})
    experience = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(3), spec)
    return LocalLoop(spec, experience, folder, TOKEN, target_return=target)


def format_page(site: str, loop: LocalLoop) -> str:
    return f"{site}/catch/index.html?address={loop.websocket_address}#{TOKEN}"


def measure_rate(browser: Chromium, seconds: float) -> tuple[float, float]:
    """Steps a second that the page plays now, and bytes a step that it sends."""
    read = "[played.steps, played.run.countBytes()]"
    began_at, before = time.monotonic(), browser.run(read)
    time.sleep(seconds)
    after, ended_at = browser.run(read), time.monotonic()
    steps = after[0] - before[0]
    return steps / (ended_at - began_at), (after[1] - before[1]) / steps


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 1.0 if chosen.quick else 5.0
    found = defaultdict[str, list[float]](list)
    handler = partial(_QuietHandler, directory=str(ROOT / "clients/javascript"))
    with scratch() as folder, ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}"
        (folder / "chromium").mkdir()
        browser = Chromium(folder / "chromium")
        for number in range(chosen.runs):
            with make_loop(folder / f"rate-{number}", (64, 64), None) as loop:
                for is_hidden in (False, True):
                    browser.show(format_page(site, loop), is_hidden)
                    time.sleep(2.0)  # the page loads, the compiler of the browser has seen the loop
                    rate, size = measure_rate(browser, seconds)
                    found["hidden" if is_hidden else "shown"].append(rate)
                    found["bytes"].append(size)
                browser.show("about:blank")
            with make_loop(folder / f"solve-{number}", (16,), TARGET) as loop:
                browser.show(format_page(site, loop))
                found["solved_s"].append(loop.wait_until_solved(timeout_s=60.0))
            print(f"run {number + 1}: { {name: round(values[-1], 2) for name, values in found.items()} }", flush=True)
        browser.close()
        server.shutdown()
    name = "a page with its own policy of 64 x 64"
    rows = [
        compare(name, "steps/s", "higher", found["shown"], bar=20_000.0, bar_kind="value"),
        compare(f"{name}: sent a step", "bytes", "lower", found["bytes"], bar=64.0, bar_kind="value"),
        compare(
            f"{name}: hidden",
            "steps/s",
            "higher",
            found["hidden"],
            found["shown"],
            "the tab, shown",
            0.9,
            "ratio",
            NICE,
        ),
        compare("Catch is solved by a page", "s", "lower", found["solved_s"], bar=3.0, bar_kind="value"),
    ]
    write("browser", rows, chosen.results)


if __name__ == "__main__":
    main()
