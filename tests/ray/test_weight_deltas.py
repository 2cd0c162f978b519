"""Weights in bf16 between the workers of a run: changes travel, and all of the weights where they would not lead on."""

from dataclasses import replace

import numpy as np

from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.weights import WeightSnapshot
from waiting import wait_for

WAIT_S = 60.0


def make_version(version: int) -> WeightSnapshot:
    words = np.arange(50_000, dtype="<u2")
    words[: 10 * version] += 1
    return WeightSnapshot.of(version, {"w": words.view("V2")})


def test_changes_reach_the_sources_of_a_run(cluster: EmbeddedCluster) -> None:
    import ray

    from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, start_weight_store

    store = start_weight_store("deltas")
    publisher, source, late = RayWeightPublisher(store), RayWeightSource(store), RayWeightSource(store)

    def publish(version: int) -> WeightSnapshot:
        snapshot = make_version(version)
        publisher.publish(snapshot)
        wait_for(lambda: publisher.forwarded_version == version, WAIT_S, f"version {version} at the store")
        return snapshot

    def read(reader: RayWeightSource, than: int) -> WeightSnapshot:
        return wait_for(lambda: reader.wait_newer(than, 1.0), WAIT_S, f"a version after {than}")

    def ask(held: WeightSnapshot) -> object:
        return ray.get(store.wait_newer.remote(held.version, 0.0, False, held.sha256))

    try:
        first = publish(1)
        assert read(source, 0) == read(late, 0) == first
        second, third = publish(2), publish(3)
        assert [len(ask(held)) for held in (first, second)] == [2, 1]  # type: ignore[arg-type]
        assert read(source, 1) == third

        # A payload that is not what its hash says: of another version, or damaged.
        late._held = replace(first, payload=b"\1" + first.payload[1:])
        assert read(late, 1) == third

        ray.kill(store, no_restart=False)  # the publisher does not know yet that the store has nothing
        fourth = publish(4)
        assert read(source, 3) == fourth
        fifth = publish(5)
        assert read(source, 4) == fifth
    finally:
        publisher.close()
        ray.kill(store)
