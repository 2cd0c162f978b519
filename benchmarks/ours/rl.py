"""Starting a run and its external actors as children: what the benchmarks of the loop share.

Called by `time_to_solve`, `experience`, `weights` and others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child

START_TIMEOUT_S = 120.0
TOKEN = os.urandom(16).hex()
# A NumPy that starts threads for a 64 x 64 product only wastes time: `shoal run` sets this too.
ACTOR_ENV = {"SHOAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}


@contextmanager
def run_of(engine: str, folder: Path, **setting: Any) -> Iterator[tuple[Child, str]]:
    """A run on `engine` ("local" or "ray") and the address of its gateway. Without Ray, `pause_s` and `pause_factor`
    slow the learner: after each batch it sleeps so many seconds, and so many times as long as the batch took. Of
    `batches_ahead` batches the experience is in the queue or on its way to it, where it is not 0."""
    defaults: dict[str, Any] = {
        "spec": {},
        "words": [],
        "balancing": False,
        "still": False,
        "target_return": None,
        "pause_s": 0,
        "pause_factor": 0,
        "batches_ahead": 0,
    }
    whole = {**defaults, **setting, "folder": str(folder / f"run-{os.urandom(4).hex()}")}
    env = {"SHOAL_TOKEN": TOKEN, "SHOAL_HOME": str(folder)}
    words = [OUR_PYTHON, "-m", "benchmarks.ours.run", engine, json.dumps(whole)]
    with Child(words, folder, env) as child:
        yield child, child.answer(START_TIMEOUT_S)["address"]


@contextmanager
def actors_of(folder: Path, num_actors: int, words: Sequence[str]) -> Iterator[list[Child]]:
    """`num_actors` counted actors, all of which have made their first step."""
    with ExitStack() as closing:
        actors = [
            closing.enter_context(
                Child([OUR_PYTHON, "-m", "benchmarks.ours.actor", "--seed", str(seed), *words], folder, ACTOR_ENV)
            )
            for seed in range(num_actors)
        ]
        for actor in actors:
            while "ready" not in actor.answer(START_TIMEOUT_S):
                pass
        yield actors
        for actor in actors:  # all at once, so that the last does not wait for the first
            assert actor.process.stdin is not None
            actor.process.stdin.close()
