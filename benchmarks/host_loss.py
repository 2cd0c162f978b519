"""Segments that are learnt after the host with gateway and learner is lost, of those that were recovered.

    python -m benchmarks.host_loss [--runs N] [--quick]

A run loses its host N times (ten, unless told otherwise): SIGKILL, and the next process begins in an empty folder with
the same store, at another port. Four actors follow it by a file with its address. `by numbers` is the same where lag is
the difference of two version numbers, for three losses.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.gateway_durable import TOKEN, make_segment
from benchmarks.result import compare, options, write
from shoal.actor import ActorClient
from shoal.errors import ShoalError

NUM_ACTORS, LIFE_S, TIMEOUT_S = 4, 3.0, 120.0


def act(place: str, name: str, ended: threading.Event, counts: dict[str, int]) -> None:
    """Send segments of the newest weights that have come."""
    segment, version = make_segment(), 1
    with ActorClient(place, TOKEN, name, timeout_s=TIMEOUT_S) as client:
        while not ended.is_set():
            newer = client.newer_weights(version)
            version = newer[0] if newer else version
            try:
                client.send(replace(segment, versions=np.full_like(segment.versions, version)), timeout_s=0.5)
            except ShoalError:
                continue
        counts[name] = client.reconnects


def lose_hosts(folder: Path, kind: str, num_losses: int) -> tuple[list[float], list[float], dict[str, int]]:
    """Of each loss: the share of recovered segments that is learnt, and the seconds until the next host serves."""
    place, ended, counts = folder / "gateway.address", threading.Event(), dict[str, int]()
    environment = {"SHOAL_STORE": str(folder / "store"), "SHOAL_HOME": str(folder / "home")}
    shares, away_s, actors = list[float](), list[float](), list[threading.Thread]()
    for number in range(num_losses + 1):
        began_s = time.perf_counter()
        with ExitStack() as opened:
            words = [OUR_PYTHON, "-m", "benchmarks.ours.loop_host", str(folder / f"disk-{number}"), kind]
            (folder / f"disk-{number}").mkdir()
            host = opened.enter_context(Child(words, folder, environment))
            begun = host.answer(TIMEOUT_S)
            (folder / "draft").write_text(begun["address"])
            os.replace(folder / "draft", place)
            if number:
                away_s.append(time.perf_counter() - began_s)
                found = host.ask()
                while found["known"] < begun["recovered"]:
                    time.sleep(0.1)
                    found = host.ask()
                shares.append(found["learnt"] / begun["recovered"] if begun["recovered"] else float("nan"))
                print(f"{kind}, loss {number}: {begun['recovered']} recovered, {found['learnt']} learnt", flush=True)
            for index in range(NUM_ACTORS if not number else 0):
                words_of_actor = (str(place), f"a{index}", ended, counts)
                actors.append(threading.Thread(target=act, args=words_of_actor, daemon=True))
                actors[-1].start()
            time.sleep(LIFE_S)
            if number == num_losses:
                ended.set()
                for each in actors:
                    each.join(TIMEOUT_S)
            host.process.kill()
    return shares, away_s, counts


def main() -> None:
    chosen = options(__doc__, runs=10)
    found = {}
    for kind in ("lag", "numbers"):
        with scratch() as folder:
            found[kind] = lose_hosts(folder, kind, chosen.runs if kind == "lag" else min(3, chosen.runs))
    reconnects = found["lag"][2]
    assert len(reconnects) == NUM_ACTORS, "an actor has not followed"
    note = f"{NUM_ACTORS} actors, which reconnected {sum(reconnects.values())} times over {chosen.runs} losses"
    title = "recovered segments that are learnt"
    rows = [
        compare(title, "", "higher", found["lag"][0], found["numbers"][0], "lag by numbers", 0.95, "value", note),
        compare("a host's loss, until the next one serves", "s", "lower", found["lag"][1], note=note),
    ]
    write("host_loss", rows, chosen.results)


if __name__ == "__main__":
    main()
