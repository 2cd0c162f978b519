"""Our endpoint as a process that a benchmark starts: `deploy()` on an embedded cluster of its own.

    python -m benchmarks.serving.ours WORKLOAD SETTINGS

SETTINGS is JSON for the endpoint's spec. Says its URL once it is up; `{"do": "publish"}` publishes the next version and
says it with its time (time.monotonic). Ends when its input closes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.talk import commands, say
from shoal.cluster.embedded_cluster import start_cluster

NAME = "model"


def main(workload: str, settings: dict[str, Any]) -> None:
    with ExitStack() as closing:
        cluster = closing.enter_context(start_cluster())
        os.environ.update(cluster.environment)  # before anything imports Ray
        serve_until_told(workload, settings, closing)


def serve_until_told(workload: str, settings: dict[str, Any], closing: ExitStack) -> None:
    """Deploy, publish the first weights, obey."""
    import ray

    from benchmarks.serving.workloads import WORKLOADS
    from shoal.cluster.job_main import connect
    from shoal.registry import ModelFactory, Signature, TensorSignature
    from shoal.rl.learner import model_arrays
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import EndpointModel, LiveModel
    from shoal.weights import WeightSnapshot
    from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, start_weight_store

    connect()
    closing.callback(ray.shutdown)
    store = start_weight_store("benchmark")
    publisher = RayWeightPublisher(store)
    closing.callback(publisher.close)
    load = WORKLOADS[workload]
    tensors = model_arrays(load.module())
    publisher.publish(WeightSnapshot.of(1, tensors))
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype=load.datatype, shape=[-1, *load.shape])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, *load.out])],
    )
    factory = ModelFactory(factory=f"{load.module.__module__}:{load.module.__name__}")
    options = {"max_batch_size": load.max_batch, **settings.pop("model", {})}
    spec = EndpointSpec.parse({"name": NAME, "model": options, **settings})
    model = EndpointModel(NAME, LiveModel(factory, signature, RayWeightSource(store)))
    endpoint = deploy(spec, [model])
    closing.callback(endpoint.close)
    say(url=f"{endpoint.url}/v2/models/{NAME}/infer", grpc=endpoint.grpc, model=NAME)
    version = 1
    for _ in commands():
        version += 1
        if "number" in tensors:
            tensors["number"] = tensors["number"] * 0 + version
        published_s = time.monotonic()  # before the weights are serialised: that is part of the way
        publisher.publish(WeightSnapshot.of(version, tensors))
        say(version=version, published_s=published_s)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
