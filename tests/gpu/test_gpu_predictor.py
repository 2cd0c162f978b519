"""Models that are served from a CUDA device, or from a share of its memory: answers as on the CPU, of one version each,
and memory that returns."""

# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from captures import count_captures
from gpu_tasks import require_cuda
from served_models import (
    MAX_ROWS,
    PERCEPTRON,
    TOLERANCES,
    answer,
    compute_expected,
    make_module,
    make_predictor,
    make_rows,
    make_signature,
    make_times,
    make_times_version,
    make_version,
    needs_compiler,
    needs_cuda,
)
from torch import Tensor, nn

from refusals import refused
from registered import arrays_of
from shoal.device_memory import limit_device_memory
from shoal.errors import WeightsError
from shoal.libs.optimise.steps import Model, convert_model
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.formats import torch_forward
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # torch 2.11 loads a program with it
]

COMPILED = [needs_compiler, pytest.mark.filterwarnings("ignore")]  # of compilers: advice, and their own deprecations
WAYS: list[Any] = [
    ("module", {}),
    ("module", {"cuda_graphs": True}),
    ("torchscript", {}),
    ("torch_export", {}),
    pytest.param(("module", {"compile": True}), marks=COMPILED),
    pytest.param(("module", {"compile": True, "cuda_graphs": True}), marks=COMPILED),
    pytest.param(("torch_export", {"compile": True}), marks=COMPILED),
]
MIB = 1 << 20


def name_way(way: tuple[str, dict[str, Any]]) -> str:
    return "-".join((way[0], *way[1]))


@pytest.fixture(params=WAYS, ids=name_way)
def way(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """A format, and the options of a predictor on the device."""
    kind, options = request.param
    if options.get("cuda_graphs"):
        count_captures(monkeypatch, device)
        return kind, options
    return kind, {**options, "device": device}


@pytest.mark.parametrize("name", ["perceptron", "lenet"])
def test_every_format_answers_as_on_the_cpu(name: str, way: tuple[str, dict[str, Any]]) -> None:
    kind, options = way
    subject = make_predictor(name, kind, **options)
    versions = {version: subject.load(make_version(name, version, kind)) for version in (1, 2)}
    for version, model in versions.items():
        module = make_module(name, version)
        for num_rows in range(1, MAX_ROWS + 1):
            rows = make_rows(name, num_rows)
            expected = compute_expected(module, rows)
            message = f"version {version}, {num_rows} rows"
            np.testing.assert_allclose(answer(model, rows), expected, **TOLERANCES[name], err_msg=message)
        requests = [make_rows(name, num_rows, seed=1) for num_rows in (1, 3, 2)]
        for found, rows in zip(model.predict_batch([{"x": rows} for rows in requests]), requests, strict=True):
            np.testing.assert_allclose(found["y"], compute_expected(module, rows), **TOLERANCES[name])


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}], ids=["eager", "graphs"])
def test_bf16_is_near_fp32(options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options or {"device": device}
    count_captures(monkeypatch, device)
    for name in ("perceptron", "lenet"):
        model = make_predictor(name, precision="bf16", **options).load(make_version(name, 1))
        for num_rows in (1, 3, 8):
            rows = make_rows(name, num_rows)
            found, expected = answer(model, rows), compute_expected(make_module(name), rows)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05, err_msg=f"{name}, {num_rows} rows")
            assert not np.array_equal(found, expected.astype(np.float32)), "it was computed in float32"


def test_a_version_that_was_registered_in_bf16_computes_so(device: str) -> None:
    """As `shoal optimise` registers it: its own module says where autocast applies."""
    teacher = make_version("perceptron", 1)
    model = convert_model(Model((), PERCEPTRON, teacher.payload), "bf16", PERCEPTRON, make_signature([6], [3]), ())
    options = ModelOptions.parse({"device": device, "max_batch_size": 4})
    subject = Predictor(model.factory, make_signature([6], [3]), options)
    found = answer(subject.load(WeightSnapshot.from_payload(1, model.payload)), make_rows("perceptron", 3))
    expected = compute_expected(make_module("perceptron"), make_rows("perceptron", 3))
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)
    assert not np.array_equal(found, expected.astype(np.float32)), "it was computed in float32"


@needs_cuda
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_version_that_was_registered_in_int8_is_for_the_cpu(device: str) -> None:
    wide = PERCEPTRON.model_copy(update={"kwargs": {**PERCEPTRON.kwargs, "hidden": [256, 256]}})
    network = wide.build()
    assert isinstance(network, nn.Module)
    payload, signature = safetensors.torch.save(network.state_dict()), make_signature([6], [3])
    model = convert_model(Model((), wide, payload), "int8", wide, signature, ())
    subject = Predictor(model.factory, signature, ModelOptions.parse({"device": device, "max_batch_size": 4}))
    snapshot = WeightSnapshot.from_payload(1, model.payload)
    if device == "auto":
        assert answer(subject.load(snapshot), make_rows("perceptron", 3)).shape == (3, 3)
    else:
        with pytest.raises(WeightsError, match="set device: cpu, or auto"):
            subject.load(snapshot)


def test_bf16_tensors_go_in_and_out_as_bits(device: str) -> None:
    factory = ModelFactory(factory=f"{__name__}:Doubled")
    options = ModelOptions.parse({"device": device, "max_batch_size": 4})
    model = Predictor(factory, make_signature([2], [2], "BF16"), options).load(WeightSnapshot.of(1, {}))
    bits = torch.tensor([[1.0, -0.5], [3.0, 2.5]], dtype=torch.bfloat16).view(torch.uint16).numpy()
    found = torch.from_numpy(answer(model, bits)).view(torch.bfloat16)
    assert found.tolist() == [[2.0, -1.0], [6.0, 5.0]]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class MaskedSum(nn.Module):
    """[B, T] to the sum of each row, whatever it is padded with."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x == -1, 0, x).sum(1)


def test_padded_requests_share_a_batch(device: str) -> None:
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, -1])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1])],
    )
    options = ModelOptions.parse({"device": device, "ragged": "pad", "pad_value": -1.0, "max_batch_size": 8})
    subject = Predictor(ModelFactory(factory=f"{__name__}:MaskedSum"), signature, options)
    model = subject.load(WeightSnapshot.of(1, {}))
    requests = [np.full((rows, width), width, np.float32) for rows, width in ((1, 3), (2, 17), (3, 1))]
    found = [each["y"].tolist() for each in model.predict_batch([{"x": each} for each in requests])]
    assert found == [[9.0], [289.0] * 2, [1.0] * 3]


def test_answers_of_eight_threads_are_never_mixed(way: tuple[str, dict[str, Any]]) -> None:
    kind, options = way
    if "compile" in options and kind != "module":
        pytest.skip("as a module's")
    model = make_predictor("perceptron", kind, **options).load(make_version("perceptron", 1, kind))
    module, barrier = make_module("perceptron"), threading.Barrier(8)
    cases = [
        [(rows, compute_expected(module, rows)) for rows in (make_rows("perceptron", 1 + seed % 8, seed),)]
        for seed in range(8)
    ]

    def ask(seed: int) -> None:
        barrier.wait(30.0)
        for count in range(60):
            for rows, expected in cases[seed]:
                message = f"thread {seed}, call {count}"
                np.testing.assert_allclose(answer(model, rows), expected, **TOLERANCES["perceptron"], err_msg=message)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}], ids=["eager", "graphs"])
def test_a_batch_is_of_one_version_while_versions_follow_each_other(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded in one thread, used in others, released by whichever lets go of it last."""
    size, captures = 1 << 16, count_captures(monkeypatch, device)
    subject = make_times(size, **(options or {"device": device}))
    present = [subject.load(make_times_version(1, size))]
    ended = threading.Event()

    def ask(seed: int) -> set[int]:
        seen, rows = set(), np.ones((1 + seed, size), np.float32)
        while not ended.is_set():
            model = present[0]
            found = answer(model, rows)
            assert found.min() == found.max() == model.version, (found.min(), found.max(), model.version)
            seen.add(model.version)
        return seen

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, seed) for seed in range(4)]
        try:
            for version in range(2, 52):
                present[0] = subject.load(make_times_version(version, size))
        finally:
            ended.set()
        seen = set().union(*[each.result(60.0) for each in asked])
    assert len(seen) > 1, "no version was used while another was loaded"
    assert len(captures) <= 4 * 8, f"{len(captures)} captures: slots are not used again"  # 4 sizes, 8 slots


class OnCpu(nn.Module):
    """Makes a tensor on the CPU in its forward: it has no other device."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype)[None]


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@needs_cuda
@pytest.mark.parametrize(("name", "size", "expected"), [("OnCpu", 3, "cpu"), ("Large", 2048, "cuda")])
def test_auto_takes_the_fastest_that_answers(
    name: str, size: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    factory = ModelFactory(factory=f"{__name__}:{name}")
    subject = Predictor(factory, make_signature([size], [size]), ModelOptions.parse({"max_batch_size": 256}))
    module = {"OnCpu": OnCpu, "Large": Large}[name]()
    state = arrays_of(module)
    model = subject.load(WeightSnapshot.of(1, state))
    said = [each for each in caplog.messages if each.startswith("device: ")]
    assert len(said) == 1, caplog.text
    assert said[0].startswith(f"device: {expected} is the fastest: "), said
    assert list(subject._templates) == [expected]
    rows = np.random.default_rng(0).random((5, size), np.float32)
    expectation = compute_expected(module, rows) if name == "Large" else rows + np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(answer(model, rows), expectation, rtol=1e-3, atol=1e-4)


def test_auto_is_the_cpu_where_a_worker_has_reserved_no_gpu() -> None:
    """Ray hides the devices of such a worker."""
    code = "from served_models import make_predictor; print(*make_predictor('perceptron')._templates)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.stdout == "cpu\n", done.stderr


def measure_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@needs_cuda
@pytest.mark.parametrize("kind", ["module", "torchscript", "torch_export"])
def test_the_memory_of_a_released_version_returns(kind: str) -> None:
    make_predictor("lenet", kind, device="cuda").load(make_version("lenet", 1, kind))  # libraries' own memory
    before = measure_allocated()
    subject = make_predictor("lenet", kind, device="cuda")
    models = [subject.load(make_version("lenet", version, kind)) for version in range(1, 9)]
    with_all = measure_allocated()
    assert with_all - before > 8 * 200_000, "eight versions of 61,706 float32 each are on the device"
    del models[:]
    del subject
    assert measure_allocated() - before < MIB, (before, with_all)


LOST = """
import numpy as np
from served_models import *
from shoal.errors import InferenceError
from shoal.serve.model.device import device_lost

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x):
        return self.table(x)

ids = TensorSignature(name="x", datatype="INT64", shape=[-1])
signature = Signature(inputs=[ids], outputs=make_signature([1], [2]).outputs)
options = ModelOptions.parse({"device": "cuda", "max_batch_size": 4})
subject = Predictor(ModelFactory(factory="__main__:Embedded"), signature, options)
model = subject.load(WeightSnapshot.of(1, {"table.weight": np.ones((4, 2), np.float32)}))
print(answer(model, np.array([3])).tolist(), device_lost.is_set())
try:
    answer(model, np.array([1 << 40]))
except InferenceError as error:
    print(error.status, device_lost.is_set())
"""


@needs_cuda
def test_a_failed_assertion_in_a_kernel_ends_the_use_of_a_device() -> None:
    """In a process of its own, which it breaks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", LOST], env=environment, capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.stdout == "[[1.0, 1.0]] False\n503 True\n", done.stdout + done.stderr[-4000:]


# -- a share of the device's memory: what fits into it, and errors beyond it


@pytest.fixture
def limit(device: str) -> Iterator[Callable[[int], int]]:
    """Limits this process to about so many bytes, in addition to those that it has; returns them."""
    require_cuda(device)

    def set_limit(size_bytes: int) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        limit_device_memory((torch.cuda.memory_reserved() + size_bytes) / total)
        return size_bytes

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def test_a_share_of_a_device_is_a_share_of_its_memory(limit: Callable[[int], int]) -> None:
    limit(256 * MIB)
    assert torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").numel() == 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")


def test_a_version_beyond_the_share_is_rejected_and_the_former_one_answers(limit: Callable[[int], int]) -> None:
    limit(96 * MIB)
    size = 32 * MIB // 4
    subject = make_times(size, device="cuda", max_batch_size=1)
    first = subject.load(make_times_version(1, size))
    large = 256 * MIB // 4
    with pytest.raises(WeightsError, match=r"too small for version 2, whose weights are 256\.0 MiB .*a share of 0\.0"):
        make_times(large, device="cuda", max_batch_size=1).load(make_times_version(2, large))
    assert answer(first, np.full((1, size), 3, np.float32))[0, -1] == 3


class Wide(nn.Module):
    """32 MiB of intermediate results a row."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.expand(len(x), 8 * MIB) * 2).mean(1, keepdim=True)


def test_a_batch_beyond_the_share_is_an_error_and_a_smaller_one_is_answered(limit: Callable[[int], int]) -> None:
    limit(160 * MIB)
    options = ModelOptions.parse({"device": "cuda", "max_batch_size": MAX_ROWS, "warm_up": False})
    factory = ModelFactory(factory=f"{__name__}:Wide")
    model = Predictor(factory, make_signature([1], [1]), options).load(WeightSnapshot.of(1, {}))
    for _ in range(3):
        with refused(500, "too small for 8 rows"):
            answer(model, np.ones((8, 1), np.float32))
        assert answer(model, np.ones((1, 1), np.float32)).tolist() == [[2.0]]


@pytest.mark.parametrize("graphs", [False, True])
def test_large_outputs_are_in_pinned_memory_that_no_later_batch_overwrites(
    graphs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_cuda(device)
    count_captures(monkeypatch, device)
    waits: list[int] = []
    wait = torch_forward._wait_for_copies
    monkeypatch.setattr(torch_forward, "_wait_for_copies", lambda: (waits.append(1), wait()))
    size = 2 * torch_forward.PINNED_BYTES // 4
    subject = make_times(size, **({"cuda_graphs": True} if graphs else {"device": device}), max_batch_size=2)
    models = [subject.load(make_times_version(version, size)) for version in (1, 2, 3)]
    waits.clear()
    found = [answer(model, np.full((2, size), 5, np.float32)) for _ in range(4) for model in models]
    assert len(waits) == 12
    for index, array in enumerate(found):
        assert (array == 5 * (1 + index % 3)).all()
        assert torch.from_numpy(array).is_pinned()
