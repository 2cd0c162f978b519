"""CUDA graphs among other work on one device: several models, captures while others answer, and bounded memory."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from captures import count_captures
from served_models import (
    MAX_ROWS,
    TOLERANCES,
    answer,
    compute_expected,
    make_module,
    make_predictor,
    make_rows,
    make_signature,
    make_version,
    needs_cuda,
)
from torch import Tensor, nn

from shoal.registry import ModelFactory
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_every_version_is_captured_before_traffic(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = count_captures(monkeypatch, device)
    subject = make_predictor("perceptron", cuda_graphs=True, max_batch_size=6)
    models = [subject.load(make_version("perceptron", version)) for version in (1, 2)]
    assert captures == [1, 2, 4, 8] * 2
    for num_rows in range(1, 7):
        for model in models:
            rows = make_rows("perceptron", num_rows)
            expected = compute_expected(make_module("perceptron", model.version), rows)
            np.testing.assert_allclose(answer(model, rows), expected, **TOLERANCES["perceptron"])
    assert captures == [1, 2, 4, 8] * 2


def test_models_answer_while_others_are_captured_and_loaded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models with graphs answer from four threads, a third one without; meanwhile two threads load others, with
    captures, and one allocates and frees memory of the device."""
    count_captures(monkeypatch, device)
    names = ("perceptron", "lenet", "perceptron")
    ways = [{"cuda_graphs": True}, {"cuda_graphs": True}, {"device": device}]
    answering = [
        (make_predictor(name, **way).load(make_version(name, 1)), name) for name, way in zip(names, ways, strict=True)
    ]
    ended, barrier = threading.Event(), threading.Barrier(8)

    def ask(index: int) -> int:
        model, name = answering[index % 3]
        cases = [make_rows(name, num_rows, index) for num_rows in range(1, MAX_ROWS + 1)]
        pairs = [(rows, compute_expected(make_module(name), rows)) for rows in cases]
        barrier.wait(60.0)
        count = 0
        while not ended.is_set() or not count:
            for rows, expected in pairs:
                message = f"{name} {index}, call {count}"
                np.testing.assert_allclose(answer(model, rows), expected, **TOLERANCES[name], err_msg=message)
                count += 1
        return count

    def load(name: str) -> None:
        barrier.wait(60.0)
        for version in range(2, 6):
            model = make_predictor(name, cuda_graphs=True).load(make_version(name, version))
            rows = make_rows(name, 5)
            expected = compute_expected(make_module(name, version), rows)
            np.testing.assert_allclose(answer(model, rows), expected, **TOLERANCES[name], err_msg=f"new {version}")

    def allocate() -> None:
        barrier.wait(60.0)
        count = 0
        while not ended.is_set():
            count += 1
            tensor = torch.full((count % 64 + 1, 1 << 16), float(count), device=device)
            assert float(tensor.sum()) == float(count) * tensor.numel()

    with ThreadPoolExecutor(8) as pool:
        others = [*[pool.submit(ask, index) for index in range(5)], pool.submit(allocate)]
        loads = [pool.submit(load, name) for name in ("perceptron", "lenet")]
        try:
            for each in loads:
                each.result(120.0)
        finally:
            ended.set()
        for each in others:
            each.result(60.0)


def test_weights_of_one_thread_are_replayed_by_another(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = count_captures(monkeypatch, device)
    subject = make_predictor("perceptron", cuda_graphs=True)
    with ThreadPoolExecutor(1) as loading, ThreadPoolExecutor(1) as answering:
        for version in range(1, 30):
            model = loading.submit(subject.load, make_version("perceptron", version)).result(60.0)
            rows = make_rows("perceptron", 1 + version % MAX_ROWS)
            found = answering.submit(answer, model, rows).result(60.0)
            expected = compute_expected(make_module("perceptron", version), rows)
            np.testing.assert_allclose(found, expected, **TOLERANCES["perceptron"], err_msg=f"version {version}")
    assert len(captures) <= 2 * 4, captures


class Wide(nn.Module):
    """16 MiB of intermediate results a row, and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.expand(len(x), 1 << 22) * self.weight
        return (wide * 2).mean(1, keepdim=True)


@needs_cuda
def test_the_graphs_of_all_sizes_and_versions_share_their_memory() -> None:
    largest = 2 * 16 * MAX_ROWS * MIB  # two intermediate results at once
    factory = ModelFactory(factory=f"{__name__}:Wide")
    options = ModelOptions.parse({"cuda_graphs": True, "max_batch_size": MAX_ROWS})

    def measure_reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = measure_reserved()
    subject = Predictor(factory, make_signature([1], [1]), options)
    state = {"weight": np.ones(1, np.float32)}
    models = [subject.load(WeightSnapshot.of(1, state))]
    with_one = measure_reserved()
    assert with_one - before < 2.5 * largest, f"{(with_one - before) / MIB:.0f} MiB for graphs of 1 to {MAX_ROWS} rows"
    models += [subject.load(WeightSnapshot.of(version, state)) for version in (2, 3, 4)]
    with_four = measure_reserved()
    assert with_four - with_one < 64 * MIB, f"{(with_four - with_one) / MIB:.0f} MiB for three more versions"
    for model in models:
        assert answer(model, np.full((3, 1), 2.0, np.float32)).tolist() == [[4.0]] * 3
    del model, models, subject
    left = measure_reserved() - before
    assert left < 96 * MIB, f"{left / MIB:.0f} MiB are left when the model is gone"


UNCAPTURABLE = """
import numpy as np
from served_models import *

class Synchronising(nn.Module):
    def forward(self, x):
        return x * float(x.sum())  # reads a number of the device

other = make_predictor("perceptron", cuda_graphs=True).load(make_version("perceptron", 1))
options = ModelOptions.parse({"cuda_graphs": True, "max_batch_size": 4})
subject = Predictor(ModelFactory(factory="__main__:Synchronising"), make_signature([2], [2]), options)
for _ in range(2):
    try:
        subject.load(WeightSnapshot.of(1, {}))
    except Exception as error:
        print("refused:", type(error).__name__, str(error).splitlines()[0])
rows = make_rows("perceptron", 3)
expected = compute_expected(make_module("perceptron"), rows)
np.testing.assert_allclose(answer(other, rows), expected, **TOLERANCES["perceptron"])
print("the other model goes on")
again = make_predictor("perceptron", cuda_graphs=True).load(make_version("perceptron", 1))
np.testing.assert_allclose(answer(again, rows), expected, **TOLERANCES["perceptron"])
print("another model is captured")
print("random:", torch.rand(1, device="cuda").numel())
"""


@needs_cuda
def test_a_model_that_cannot_be_captured_is_refused_and_others_go_on() -> None:
    """In a process of its own, which it may break."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", UNCAPTURABLE], env=environment, capture_output=True, text=True, timeout=60.0, check=False
    )
    said = done.stdout + done.stderr[-4000:]
    assert done.returncode == 0, said
    assert "another model is captured\nrandom: 1\n" in done.stdout, said
    assert done.stdout.count("refused: ConfigError cuda_graphs = True: the model cannot be captured: ") == 2, said
