"""Segments a second that a gateway acknowledges: with `durable: store` beside `disk` beside a ledger in memory.

    python -m benchmarks.gateway_durable [--runs N] [--quick]

Four actors send segments of 256 steps of CartPole (10 KB), as fast as they have credit; a learner takes all and learns
nothing. Gateway, actors and learner are threads of this process. The S3 server is moto's, in a process of its own on
the same cores, which takes part of what the others would have; a store in a folder writes to the disk by fsync.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.checkpoint_store import BUCKET, ENVIRONMENT, TIMEOUT_S
from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import compare, options, write
from shoal.actor import ActorClient
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.experience.segment_log import SegmentLog
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.part_specs import GatewaySpec
from shoal.store import Store, open_store
from shoal.weights import WeightSnapshot, WeightStore
from shoal.wire import ExperienceSpec, PolicySpec, Segment, TensorSpec

NUM_ACTORS, NUM_STEPS, TOKEN = 4, 256, "benchmark"
SIDES = ("memory", "disk", "folder", "bucket", "bucket, wide")
WIDE = GatewaySpec(max_credits=32, queue_capacity=512)
POLICY = PolicySpec("mlp_categorical", "tanh", (("w", "b"),))
EXPERIENCE = ExperienceSpec(TensorSpec("float32", (4,)), TensorSpec("int64", (), 0, 1), NUM_STEPS, POLICY)


def make_segment() -> Segment:
    """Of noise: nothing that compresses."""
    numbers = np.random.default_rng(0)
    return Segment(
        numbers.standard_normal((NUM_STEPS + 1, 4)).astype(np.float32),
        numbers.integers(0, 2, NUM_STEPS),
        np.ones(NUM_STEPS, np.float32),
        np.full(NUM_STEPS, np.log(0.5), np.float32),
        np.ones(NUM_STEPS, np.int64),
    )


@contextmanager
def serving(
    spec: GatewaySpec,
    ledger: Ledger,
    store: Store | None,
    segments_per_s: float = math.inf,
    publish_s: float = math.inf,
) -> Iterator[Gateway]:
    """A gateway whose queue a learner empties, at this rate; it publishes a version each `publish_s`."""
    weights, tensors = WeightStore(), {"w": np.zeros((2, 4), np.float32), "b": np.zeros(2, np.float32)}
    weights.publish(WeightSnapshot.of(1, tensors))
    queue = ExperienceQueue(spec.queue_capacity or 96, ledger)
    commit = None if store is None else GroupCommit(SegmentLog(store, EXPERIENCE), queue)
    gateway = Gateway(GatewaySetting(spec, EXPERIENCE, TOKEN), queue, weights, group_commit=commit)
    gateway.start()
    ended = threading.Event()

    def learn() -> None:
        request = BatchRequest(4 * NUM_STEPS, 16 * NUM_STEPS, 16, 0.1)
        version, published_s = 1, time.monotonic()
        while not ended.is_set():
            if time.monotonic() > published_s + publish_s:
                version, published_s = version + 1, time.monotonic()
                weights.publish(WeightSnapshot.of(version, tensors))
            request = request._replace(number=request.number + 1)
            batch = queue.take("learner", request)
            if batch is not None:
                queue.acknowledge(batch.lease_id, [None] * len(batch.lengths))
                request = request._replace(position=batch.position, lease=batch.lease_id)
                ended.wait(len(batch.lengths) / segments_per_s)

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        yield gateway
    finally:
        ended.set()
        learner.join(TIMEOUT_S)
        weights.close()
        gateway.close(finished=True)
        ledger.close()


def measure(spec: GatewaySpec, ledger: Ledger, store: Store | None, warm_up_s: float, window_s: float) -> float:
    """Acknowledged segments a second."""
    ended, segment = threading.Event(), make_segment()

    def act(client: ActorClient) -> None:
        while not ended.is_set():
            client.send(segment, timeout_s=TIMEOUT_S)

    with ExitStack() as opened:
        gateway = opened.enter_context(serving(spec, ledger, store))
        clients = [opened.enter_context(ActorClient(gateway.address, TOKEN, f"a{n}")) for n in range(NUM_ACTORS)]
        actors = [threading.Thread(target=act, args=(client,)) for client in clients]
        for each in actors:
            each.start()
        time.sleep(warm_up_s)
        before, began_s = sum(each.acknowledged["accepted"] for each in clients), time.perf_counter()
        time.sleep(window_s)
        after, taken_s = sum(each.acknowledged["accepted"] for each in clients), time.perf_counter() - began_s
        ended.set()
        for each in actors:
            each.join(TIMEOUT_S)
    return (after - before) / taken_s


def measure_side(side: str, folder: Path, number: int, warm_up_s: float, window_s: float) -> float:
    ledger = Ledger(None if side == "memory" else folder / f"{side}-{number}.sqlite")
    places = {
        "folder": folder / str(number),
        "bucket": f"s3://{BUCKET}/{number}",
        "bucket, wide": f"s3://{BUCKET}/w{number}",
    }
    store = open_store(places[side]) if side in places else None
    return measure(WIDE if side == "bucket, wide" else GatewaySpec(), ledger, store, warm_up_s, window_s)


def main() -> None:
    chosen = options(__doc__, runs=5)
    warm_up_s, window_s = (1.0, 2.0) if chosen.quick else (2.0, 6.0)
    os.environ.update(ENVIRONMENT)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with scratch() as folder, Child([OUR_PYTHON, "-m", "benchmarks.ours.bucket", BUCKET], folder) as server:
        os.environ["AWS_ENDPOINT_URL"] = server.answer(TIMEOUT_S)["url"]
        for number in range(chosen.runs):
            for side in SIDES:
                found[side].append(measure_side(side, folder, number, warm_up_s, window_s))
                print(f"run {number + 1}, {side}: {found[side][-1]:,.0f} segments/s", flush=True)
    names = {
        "memory": "a ledger in memory",
        "folder": "durable: store, a folder",
        "bucket": "durable: store, S3",
        "bucket, wide": "durable: store, S3, max_credits: 32",
    }
    rows = [
        compare(
            f"segments of 10 KB that a gateway acknowledges ({name})",
            "segments/s",
            "higher",
            found[side],
            found["disk"],
            "durable: disk",
            note="four actors and a learner in the same process; moto's S3 server on the same cores",
        )
        for side, name in names.items()
    ]
    write("gateway_durable", rows, chosen.results)


if __name__ == "__main__":
    main()
