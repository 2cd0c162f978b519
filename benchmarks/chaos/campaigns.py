"""Campaigns of `shoal chaos` on the jobs and endpoints that it knows: violations, by seed.

    python -m benchmarks.chaos.campaigns [--runs SEEDS] [--only loop ddp server canary text store] [--quick]

loop: CartPole with two actors, two gateways and its endpoint. store: with one gateway, and a bucket (moto's server).
ddp: two ranks, whose losses are those of an undisturbed run, to the bit. server: two workers and a parameter server.
canary: an endpoint with two replicas of two models, one with a canary that is promoted meanwhile. text: two replicas of
a language model of 0.4 million parameters. Each campaign has six faults. The replay of the first seed of each strikes
with the same ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.agents.letters import pretrain
from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write

NUM_FAULTS = 6
TIMEOUT_S = 900.0
TOY = f"{ROOT}/tests/train_task.py:Toy"
LOOP = ("run", "actor_learner", "--actors", "2", "max_wall_s=45", "target_return=1000")
TRAINING = (f"task={TOY}", 'args={"step_s": 0.05, "count": 4096}', "workers=2", "threads=1", "stop.steps=600")
SAVING = ("checkpoint.every_steps=50", "log_every_steps=1")
JOBS: dict[str, tuple[str, ...]] = {
    "loop": (*LOOP, "gateway.shards=2"),
    "store": LOOP,
    "ddp": ("run", "train", *TRAINING, *SAVING, "parallel=ddp", "--equal", "train/loss"),
    "server": ("run", "train", *TRAINING, *SAVING, "sync.kind=parameter_server", "sync.staleness=2"),
    "canary": ("endpoint", "one"),
    "text": ("endpoint", "letters"),
}


class House:
    """A home of its own, and commands that have it. environment: of these"""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self.environment = {**os.environ, "SHOAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **environment}

    def call(self, *words: str, expect: tuple[int, ...] = (0,)) -> str:
        """What `shoal WORDS` prints. Raises RuntimeError."""
        return self.run([OUR_PYTHON, "-m", "shoal", *words], expect)

    def run(self, command: list[str], expect: tuple[int, ...] = (0,)) -> str:
        ended = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if ended.returncode not in expect:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout

    def chaos(self, *words: str) -> dict[str, Any]:
        """What a campaign has found."""
        said = self.call("chaos", *words, "--json", expect=(0, 1))
        found: dict[str, Any] = json.loads(said[said.index("{") :])
        return found


@contextmanager
def serve_canary(house: House) -> Iterator[Callable[[], None]]:
    """Two models on two replicas; yields what promotes a version of one while it is struck."""
    for name, number in (("one", 2), ("other", 1)):
        for seed in range(number):
            house.call("run", "train", f"task={TOY}", "stop.steps=20", f"seed={seed}", f"name={name}")
    house.call("up")
    try:
        house.call("serve", "deploy", "one@1", "other@1", "--name", "one", "--replicas", "2")
        house.call("serve", "canary", "one@2", "--percent", "30")
        yield lambda: print(house.call("serve", "promote", "one", expect=(0, 1)).strip(), flush=True)
    finally:
        house.call("down")


@contextmanager
def serve_text(house: House) -> Iterator[Callable[[], None]]:
    start = pretrain(QUICK_RESULTS / "agents_start")
    house.run([OUR_PYTHON, "-c", REGISTER, str(start)])
    house.call("up")
    try:
        house.call("serve", "deploy", "letters@1", "--replicas", "2")
        yield do_nothing
    finally:
        house.call("down")


def do_nothing() -> None:
    """There is nothing to do meanwhile."""


SERVED = {"canary": serve_canary, "text": serve_text}
REGISTER = """
import sys
from shoal.extend.train import make_task
from shoal.libs.agents.config import GRPOConfig
from shoal.libs.agents.model import describe, register
from shoal.weights import WeightSnapshot
config = GRPOConfig(pretrained=sys.argv[1])
network = describe(config)
from shoal.libs.agents.algorithm import _make_task
from shoal.extend.train import load_initial_weights
task = _make_task(config, None)
model = task.model()
load_initial_weights(model, task.initial_weights())
arrays = {name: each.detach().numpy() for name, each in model.state_dict().items()}
register(network, "letters", WeightSnapshot.of(1, arrays))
"""


@contextmanager
def open_site(name: str, folder: Path) -> Iterator[tuple[House, Callable[[], None]]]:
    """Where a campaign of this kind runs, and what is done in the middle of it."""
    with ExitStack() as closing:
        environment: dict[str, str] = {}
        if name == "store":
            sys.path.insert(0, str(ROOT / "tests"))
            from bucket_server import BUCKET, running_bucket

            environment = {**closing.enter_context(running_bucket()), "SHOAL_STORE": f"s3://{BUCKET}/chaos"}
            environment["SHOAL_STORE_TIMEOUT_S"] = "60"
        house = House(folder, environment)
        if name in SERVED:
            yield house, closing.enter_context(SERVED[name](house))
        else:
            yield house, do_nothing


def strike(name: str, seed: int, num_faults: int) -> dict[str, Any]:
    """A campaign, and its replay for the first seed."""
    with scratch() as folder, open_site(name, folder) as (house, act):
        acting = threading.Timer(10.0, act)
        acting.start()
        found = house.chaos(*JOBS[name], "--seed", str(seed), "--faults", str(num_faults))
        acting.join()
        broken = [each for each in found["promises"] if not each["is_satisfied"]]
        faults = [f"{each['fault']['kind']} {each['fault']['target']}" for each in found["strikes"]]
        print(f"{name}, seed {seed}: {found['seconds']:.0f} s, {', '.join(faults)}; broken: {broken}", flush=True)
        found["broken"] = len(broken)
        found["is_replayed"] = True
        if seed == 0:
            again = house.chaos("replay", found["file"])
            first, second = (sorted(map(str, (e["fault"] for e in each["strikes"]))) for each in (found, again))
            found["is_replayed"] = first == second
    return found


def main() -> None:
    chosen = options(__doc__, runs=10, only=tuple(JOBS))
    rows: list[Row] = []
    for name in chosen.only:
        found = [strike(name, seed, 2 if chosen.quick else NUM_FAULTS) for seed in range(chosen.runs)]
        struck = sum(len(each["strikes"]) for each in found)
        note = f"{struck} faults; {sum(each['is_replayed'] for each in found)} of {len(found)} replayed alike"
        title = f"chaos, {name}: broken promises in {len(found)} campaigns"
        rows.append(compare(title, "", "lower", [sum(e["broken"] for e in found)], bar=0, bar_kind="value", note=note))
    write("chaos_campaigns", rows, chosen.results)


if __name__ == "__main__":
    main()
