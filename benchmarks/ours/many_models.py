"""Our endpoint of many models as a process that a benchmark starts.

python -m benchmarks.ours.many_models NUM_MODELS NUM_FIT FOLDER

Two replicas with memory for half of NUM_FIT each. Says its URL; ends when its input closes.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.serving.many_network import NUM_FEATURES, load, name_of
from benchmarks.talk import commands, say
from shoal.cluster.embedded_cluster import start_cluster

NUM_REPLICAS = 2


def main(num_models: int, num_fit: int, folder: Path) -> None:
    with ExitStack() as closing:
        cluster = closing.enter_context(start_cluster())
        os.environ.update(cluster.environment)  # before anything imports Ray
        import ray

        from shoal.cluster.job_main import connect
        from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
        from shoal.rl.learner import model_arrays
        from shoal.serve.on_ray.deployment import deploy
        from shoal.serve.spec.endpoint import EndpointSpec
        from shoal.serve.spec.model_source import model_from_ref
        from shoal.weights import WeightSnapshot

        connect()
        closing.callback(ray.shutdown)
        x = TensorSignature(name="x", datatype="FP32", shape=[-1, NUM_FEATURES])
        y = TensorSignature(name="y", datatype="FP32", shape=[-1, 1])
        factory = ModelFactory(factory="benchmarks.serving.many_network:Wide")
        size_bytes = 0
        for number in range(num_models):
            snapshot = WeightSnapshot.of(1, model_arrays(load(folder, name_of(number))))
            signature = Signature(inputs=[x], outputs=[y])
            made = Registry().register(name_of(number), snapshot, model=factory, signature=signature)
            size_bytes = max(size_bytes, made.manifest.size_bytes)
        spec = EndpointSpec.parse(
            {
                "name": "many",
                "num_replicas": NUM_REPLICAS,
                "num_cpus": 0.1,
                "memory": size_bytes * num_fit // NUM_REPLICAS,
                "model": {"max_batch_size": 8},
            }
        )
        endpoint = deploy(spec, [model_from_ref(name_of(number)) for number in range(num_models)])
        closing.callback(endpoint.close)
        say(url=endpoint.url)
        for _ in commands():
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
