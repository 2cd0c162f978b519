"""A perceptron's answers by the Predictor on the GPU, plain and as CUDA graphs: beside the CPU and beside bare torch.

The latency of a batch from arrays to arrays; two models at once on one GPU; large outputs on their way to the host; and
an endpoint's replica, with its batcher and its HTTP server, in this process and without Ray, under 64 connections of a
driver in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from benchmarks.children import scratch
from benchmarks.gpu.turns import Setting, Turn, take_turns
from benchmarks.local_controller import LocalController
from benchmarks.model import request_body
from benchmarks.result import Row, compare
from benchmarks.serving.drive import Outcome, Target, closed, http_request
from shoal.models.perceptron import Perceptron
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.rl.learner import model_arrays
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.state import Deployment
from shoal.serve.http import fast_path
from shoal.serve.model.formats.torch_forward import PINNED_BYTES, copy_to_host
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import LiveModel
from shoal.weights import WeightSnapshot, WeightStore

NUM_FEATURES, NUM_OUTPUTS, WIDTH = 64, 10, 1024
BATCHES = (1, 8, 64)
CONNECTIONS = 64
FULL_ROUNDS = 10  # of a section that is not quick
START_S = 3.0  # until a replica and the driver are there
NAME = "perceptron"
SIGNATURE = Signature(
    inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, NUM_FEATURES])],
    outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, NUM_OUTPUTS])],
)


class Served:
    """The model, its weights, and how it is computed: options by the names of the sides."""

    def __init__(self, setting: Setting) -> None:
        self.kwargs = {
            "num_features": NUM_FEATURES,
            "num_outputs": NUM_OUTPUTS,
            "hidden": [setting.choose(WIDTH, 16)] * 3,
        }
        self.factory = ModelFactory(factory="shoal.models.perceptron:Perceptron", kwargs=self.kwargs)
        torch.manual_seed(0)
        self.module = Perceptron(**self.kwargs).eval()  # type: ignore[arg-type]
        self.snapshot = WeightSnapshot.of(1, model_arrays(self.module))
        self.num_threads = 1 if setting.is_tiny else min(8, len(os.sched_getaffinity(0)))
        self.options: dict[str, dict[str, Any]] = {"CPU": {"device": "cpu"}}
        if not setting.is_tiny:
            self.options = {"GPU": {"device": "cuda"}, "GPU, graphs": {"cuda_graphs": True}, **self.options}

    def load(self, side: str) -> LoadedModel:
        options = ModelOptions.parse({"max_batch_size": 64, **self.options[side]})
        return Predictor(self.factory, SIGNATURE, options, self.num_threads).load(self.snapshot)


def make_bare(module: torch.nn.Module, device: torch.device, x: np.ndarray) -> Turn:
    """What one writes: the array to the device, the module, an array again."""
    module = module.to(device)

    def run() -> np.ndarray:
        with torch.inference_mode():
            answer: np.ndarray = module(torch.from_numpy(x).to(device)).cpu().numpy()
        return answer

    return run


def make_turn(model: LoadedModel, x: np.ndarray) -> Turn:
    return lambda: model.predict_batch([{"x": x}])


def measure_latency(served: Served, setting: Setting) -> Iterator[Row]:
    models = {side: served.load(side) for side in served.options}
    for size in BATCHES:
        x = np.random.default_rng(0).standard_normal((size, NUM_FEATURES), np.float32)
        sides = {side: make_turn(model, x) for side, model in models.items()}
        sides["bare torch"] = make_bare(served.module, setting.device, x)
        found = take_turns(sides, setting, setting.choose(100, 2))
        for side in list(models)[:-1] or ["CPU"]:
            for peer in ("bare torch", "CPU"):
                if peer != side:
                    name = f"latency of {size} rows, {side}"
                    yield compare(name, "ms", "lower", found[side], found[peer], peer)


def measure_two(served: Served, setting: Setting) -> Iterator[Row]:
    """Two models, each with a thread of its own, beside one model that answers as many batches."""
    x = np.random.default_rng(0).standard_normal((8, NUM_FEATURES), np.float32)
    times = setting.choose(200, 2)

    def answer(model: LoadedModel, number: int) -> None:
        for _ in range(number):
            model.predict_batch([{"x": x}])

    for side in list(served.options)[:-1] or ["CPU"]:
        pair = [served.load(side) for _ in range(2)]

        def at_once(pair: list[LoadedModel] = pair) -> None:
            threads = [threading.Thread(target=answer, args=(model, times)) for model in pair]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def alone(model: LoadedModel = pair[0]) -> None:
            answer(model, 2 * times)

        found = take_turns({"ours": at_once, "peer": alone}, setting)
        rates = [[1e3 * 2 * times / ms for ms in found[name]] for name in ("ours", "peer")]
        yield compare(f"two models at once, batches of 8, {side}", "batches/s", "higher", *rates, "one model")


def measure_outputs(setting: Setting) -> Iterator[Row]:
    """Outputs on their way to the host: as a forward copies them, beside a plain copy into new memory."""
    if setting.is_tiny:
        return
    for size_bytes in (PINNED_BYTES, 16 * PINNED_BYTES):
        output = torch.rand(size_bytes // 4, device=setting.device)
        sides: dict[str, Turn] = {"ours": lambda y=output: copy_to_host([y]), "peer": lambda y=output: y.cpu()}
        found = take_turns(sides, setting, 20)
        name = f"an output of {size_bytes >> 20} MiB, pinned"
        yield compare(name, "ms", "lower", found["ours"], found["peer"], "a plain copy")


async def drive_replica(served: Served, options: dict[str, Any], seconds: float, folder: Path) -> tuple[Outcome, str]:
    """What became of the requests, and a note."""
    spec = EndpointSpec.parse({"name": "endpoint", "model": {"max_batch_size": 64, **options}})
    store = WeightStore()
    store.publish(served.snapshot)
    deployment = Deployment(NAME, options=spec.options(NAME).model_dump(mode="json"))
    controller = LocalController(EndpointController("endpoint", [deployment], lease_s=600.0))
    replica = EndpointReplica("r1", spec, {NAME: LiveModel(served.factory, SIGNATURE, store)}, controller)
    is_direct = fast_path.install_application(replica.app)
    server = uvicorn.Server(uvicorn.Config(replica.app, log_level="error", lifespan="off", ws="none"))
    with closing(store), socket.create_server(("127.0.0.1", 0)) as listener:
        await replica.start(60.0)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/{NAME}/infer"
        target = Target(url, [http_request(url, request_body(NUM_FEATURES))])
        outcome = await asyncio.to_thread(closed, folder, target, CONNECTIONS, seconds)
        counts = replica.manager.get_model(NAME).batcher_counts()
        server.should_exit = True
        await serving
        await replica.close()
    failures = f", failures {outcome.failures}" if outcome.failures else ""
    server_name = "" if is_direct else ", through plain uvicorn"
    rows = counts.rows / max(1, counts.batches)
    return outcome, f"p99 {outcome.ms(99):.1f} ms, {rows:.1f} rows in a batch{server_name}{failures}"


def measure_endpoint(served: Served, setting: Setting) -> Iterator[Row]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    notes = {}
    rounds = 1 if setting.rounds < FULL_ROUNDS else 3
    each_s = max(0.0, setting.ends_s - time.monotonic()) / (rounds * len(served.options))
    seconds = min(3.0, max(1.0, each_s - START_S))
    for number in range(rounds):
        for side in list(served.options)[:: -1 if number % 2 else 1]:
            with scratch() as folder:
                outcome, notes[side] = asyncio.run(drive_replica(served, served.options[side], seconds, folder))
            rates, latencies = found.setdefault(side, ([], []))
            rates.append(outcome.per_s)
            latencies.append(outcome.ms(50))
    for side in list(found)[:-1] or ["CPU"]:
        what = f"endpoint without Ray, {CONNECTIONS} connections, {side}"
        note = f"{notes[side]}; CPU: {notes['CPU']}"
        yield compare(f"{what}, throughput", "requests/s", "higher", found[side][0], found["CPU"][0], "CPU", note=note)
        yield compare(f"{what}, p50", "ms", "lower", found[side][1], found["CPU"][1], "CPU")


def measure(setting: Setting) -> Iterator[Row]:
    served = Served(setting)
    torch.set_num_threads(served.num_threads)
    yield from measure_latency(served, setting.until(0.3))
    yield from measure_two(served, setting.until(0.3))
    yield from measure_outputs(setting.until(0.1))
    yield from measure_endpoint(served, setting)
