"""Our endpoint: `deploy()` on an embedded cluster of its own, with weights that can be published at will.

    python -m benchmarks.ours.endpoint '[64, 256, 10]'

Says its URL once it answers; `{"do": "publish"}` publishes the next version and says it with its time (Unix). Ends
when its input closes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack

from benchmarks.model import mlp
from benchmarks.talk import commands, say
from shoal.cluster.embedded import start

NAME = "mlp"


def main(sizes: list[int]) -> None:
    with ExitStack() as closing:
        cluster = closing.enter_context(start())
        os.environ.update(cluster.environment)  # before anything imports Ray
        serve_until_told(sizes, closing)


def serve_until_told(sizes: list[int], closing: ExitStack) -> None:
    """Deploy, publish the first weights, obey."""
    import ray

    from shoal.cluster.driver import connect
    from shoal.registry import ModelFactory, Signature, TensorSignature
    from shoal.rl.learner import model_arrays
    from shoal.serve.endpoint import EndpointSpec
    from shoal.serve.ray_serve import deploy
    from shoal.weights import WeightSnapshot
    from shoal.weights.ray_weights import RayWeightPublisher, RayWeightSource, start_weight_store

    connect()
    closing.callback(ray.shutdown)
    store = start_weight_store("benchmark")
    publisher = RayWeightPublisher(store)
    closing.callback(publisher.close)
    tensors = model_arrays(mlp(sizes))
    publisher.publish(WeightSnapshot.of(1, tensors))
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, sizes[0]])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, sizes[-1]])],
    )
    factory = ModelFactory(factory="benchmarks.model:mlp", kwargs={"sizes": sizes})
    endpoint = deploy(EndpointSpec(name=NAME), factory, signature, RayWeightSource(store))
    closing.callback(endpoint.close)
    say(url=f"{endpoint.url}/v2/models/{NAME}/infer")
    version = 1
    for _ in commands():
        version += 1
        published_at = time.time()  # before the weights are serialised: that is part of the way
        publisher.publish(WeightSnapshot.of(version, tensors))
        say(version=version, published_at=published_at)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
