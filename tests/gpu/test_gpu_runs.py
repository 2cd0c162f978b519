"""Runs on a CUDA device: optimizers, the loss scale, resuming, memory, and copies that nothing waits for."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tasks import CLOSE, FEATURES, Net, assert_same_weights, load_weights, make_spec, require_cuda, train
from torch.utils.data import TensorDataset

from shoal import checkpoint
from shoal.checkpoint import Checkpointer
from shoal.cost.step_profiler import profile_step
from shoal.data import Loader, LoaderSpec
from shoal.errors import OutOfMemory
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.random_state import get_random_state, preserve_rng, set_random_state
from shoal.testing.run import MemoryLog

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
NUM_BATCHES = 200
SIZE = 32
WIDTH = 4096


@pytest.fixture
def no_tf32() -> Any:
    """cuDNN's convolutions round inputs to ten bits unless they are told otherwise."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


FEATURES_OF_A_RUN: dict[str, dict[str, Any]] = {
    "channels_last": {"args": {"kind": "lenet"}, "parallel": {"channels_last": True}},
    "selective": {"selective_backprop": {"beta": 1.0}},
    "workers": {"loader": {"workers": 2}},
    "unpinned": {"loader": {"pin": False}},
    "average": {"average": 0.9, "clip_norm": 0.5},
    "one_cycle": {"schedule": {"name": "one_cycle"}, "args": {"kind": "norm"}},
    "compiled": {"parallel": {"compile": True}, "args": {"kind": "wide"}},
}


@pytest.mark.parametrize("name", FEATURES_OF_A_RUN)
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_feature_of_a_run_does_what_it_does_on_the_cpu(name: str, device: str, tmp_path: Path) -> None:
    spec = make_spec(**{"optimizer": {"name": "sgd", "learning_rate": 0.05}, **FEATURES_OF_A_RUN[name]})
    found = train(tmp_path / "device", spec, device)
    expected = train(tmp_path / "cpu", spec.override(["loader.workers=0", "parallel.compile=false"]), "cpu")
    assert_same_weights(found, expected, rtol=1e-3, atol=1e-4 if name == "compiled" else 1e-5)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_fused_optimizer_of_the_spec_takes_the_cpus_step(name: str, device: str, tmp_path: Path) -> None:
    fields = {"name": name, "learning_rate": 0.01, "weight_decay": 0.1}
    spec = make_spec(optimizer=fields, stop={"steps": 1}, evaluate={"every_steps": 1})
    plain = spec.override(["optimizer.fused=false"])
    found, expected = train(tmp_path / "device", spec, device), train(tmp_path / "cpu", plain, "cpu")
    # Adam's first step is lr * g / (|g| + 1e-8): a rounding of g changes it only where |g| is about 1e-8.
    assert_same_weights(found, expected, **CLOSE)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "AdamW"]
)
def test_torchs_optimizers_take_the_cpus_step_and_resume(name: str, device: str, tmp_path: Path) -> None:
    """Of the Task's own, some of which have their state's numbers on the device and some on the CPU."""
    spec = make_spec(args={"optimizer": name}, optimizer={}, stop={"steps": 2}, evaluate={"every_steps": 100})
    log = MemoryLog()
    train(tmp_path / "device", spec, device)
    train(tmp_path / "device", spec.override(["stop.steps=4"]), device, log)
    assert ("restored", 2) in [(kind, details.get("step")) for kind, details in log.events]
    expected = train(tmp_path / "cpu", spec.override(["stop.steps=4"]), "cpu")
    found = train(tmp_path / "device", spec.override(["stop.steps=4"]), device)
    # Rprop takes only the sign of a gradient: one that rounding turns around moves its weight by the rate, 0.01.
    tolerance = {"rtol": 0.0, "atol": 0.03} if name == "Rprop" else CLOSE
    assert_same_weights(found, expected, **tolerance)


def test_the_loss_scale_of_fp16_falls_on_overflow_and_is_in_the_state(device: str) -> None:
    spec = ParallelSpec.parse({"precision": "fp16"})
    world, task = World.single(require_cuda(device).type), Net("wide")
    torch.manual_seed(0)
    batch = tuple(each[:32].to(world.device) for each in task.data().train.tensors)  # type: ignore[union-attr]
    model = parallelize(task.model(), task, spec, spec.resolve_dims(1), world, batch)
    model.load_loss_scale_state({"value": 2.0**40, "good_steps": 7})  # overflows float16 at once
    model.train_step(batch, 0)
    norm = model.clip_gradients(math.inf)
    state = model.loss_scale_state()
    assert torch.isfinite(norm)
    assert 1.0 <= state["value"] < 2.0**40, state
    scaled = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    plain = parallelize(task.model(), task, ParallelSpec(), spec.resolve_dims(1), world, batch)
    plain.load_model_state(model.model_state())
    plain.train_step(batch, 0)
    for name, each in plain.named_parameters():
        assert each.grad is not None
        error = (scaled[name] - each.grad).norm() / each.grad.norm()
        assert error < 0.02, (name, float(error))  # float16 has 11 bits; unscaled would be off by 2^k


@pytest.mark.parametrize(
    ("kind", "precision"), [("dropout", "fp32"), ("functional", "fp32"), ("wide", "bf16"), ("wide", "fp16")]
)
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, precision: str, device: str, tmp_path: Path) -> None:
    """To the bit, but for lower precisions."""
    if precision == "fp16":
        require_cuda(device)
    fields: dict[str, Any] = {"args": {"kind": kind}, "average": 0.9, "parallel": {"precision": precision}}
    spec = make_spec(**fields, checkpoint={"every_steps": 3, "asynchronous": True})
    expected = train(tmp_path / "through", spec, device)
    train(tmp_path / "twice", spec.override(["stop.steps=3"]), device)
    found = train(tmp_path / "twice", spec, device)
    tolerance = 0.0 if precision == "fp32" else 1e-2
    assert_same_weights(found, expected, rtol=tolerance, atol=tolerance)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(device: str, tmp_path: Path) -> None:
    spec = make_spec(optimizer={"name": "adam", "learning_rate": 0.01})
    train(tmp_path / "a", spec.override(["stop.steps=3"]), device)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    there = train(tmp_path / "a", spec, device)
    here = train(tmp_path / "b", spec, "cpu")
    assert_same_weights(here, there, **CLOSE)


def test_the_random_state_of_the_device_is_saved_restored_and_preserved(device: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.rand(5, device=device)
    state = get_random_state()
    checkpoint.save(tmp_path, 1, {"random": state})
    expected = torch.rand(8, device=device)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    set_random_state(loaded.state["random"])
    torch.testing.assert_close(torch.rand(8, device=device), expected, rtol=0, atol=0)
    set_random_state(state)
    with preserve_rng(11):
        torch.rand(100, device=device)
    torch.testing.assert_close(torch.rand(8, device=device), expected, rtol=0, atol=0)


class Huge(Net):
    """Its loss needs 64 MiB and a share of what the device has for each sample."""

    def __init__(self, sample_bytes: int) -> None:
        super().__init__("mlp", 256)
        self.sample_bytes = sample_bytes

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        big = torch.zeros(len(outputs), self.sample_bytes // 4, device=outputs.device)
        return super().loss(outputs + (big * outputs.sum()).sum(1, keepdim=True), batch)


def test_out_of_memory_is_explained_by_a_size_that_fits(device: str, tmp_path: Path) -> None:
    """Three tensors of `sample_bytes` a sample are alive at once, at most: 32 samples do not fit, and 4 do."""
    from shoal.train.loop.trainer import Trainer

    require_cuda(device)
    _, total = torch.cuda.mem_get_info()
    spec = make_spec(check_loss=False)
    with pytest.raises(
        OutOfMemory, match=r"step 1: the memory is too small for 32 samples.* would have fitted"
    ) as error:
        Trainer(
            spec, Huge(total // 20), World.single(require_cuda(device).type), tmp_path, run_id="r", journal=MemoryLog()
        ).run()
    fitting = int(str(error.value).split("; ")[1].split(" ")[0])
    assert fitting in (4, 8), str(error.value)  # 2 and 3 copies of a twentieth each; the failed step's own are gone


def test_flops_and_peak_memory_are_those_of_torch(device: str) -> None:
    world = World.single(require_cuda(device).type)
    width = 1024
    size = 512
    torch.manual_seed(0)
    task = Net("wide", width=width)
    batch = (torch.randn(size, FEATURES, device=world.device), torch.zeros(size, dtype=torch.long, device=world.device))
    spec = ParallelSpec()
    model = parallelize(task.model(), task, spec, spec.resolve_dims(1), world, batch)
    optimizer = torch.optim.Adam([each for _, each in model.named_parameters()], fused=True)
    for step in range(2):
        model.train_step(batch, step)
        optimizer.step()
    with profile_step(model, optimizer) as profile:
        model.train_step(batch, 2)
        optimizer.step()
    found = profile.values
    # Forward, and backward by weights and (but for the first layer) by inputs: 2 operations each.
    layers = [FEATURES * width, width * width, width * 3]
    expected = 2 * size * (3 * sum(layers) - layers[0])
    assert found["flops_rank"] == pytest.approx(expected, rel=0.05), found
    parameters = [each for _, each in model.named_parameters()]
    for each in parameters:
        each.grad = None
    states = [each for state in optimizer.state.values() for each in state.values()]
    resident = sum(each.nbytes for each in [*parameters, *states, *batch])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # with cuBLAS's workspace, which is no tensor of the run
    model.train_step(batch, 3)
    optimizer.step()
    torch.cuda.synchronize()
    peak = resident + torch.cuda.max_memory_allocated() - before
    assert found["memory_peak"] == pytest.approx(peak, rel=0.05), (found, peak)


def test_the_cost_of_a_run_is_reported(device: str, tmp_path: Path) -> None:
    log = MemoryLog()
    train(tmp_path, make_spec(stop={"steps": 14}, evaluate={"every_steps": 14}), device, log)
    measured = [details for kind, details in log.events if "cost" in kind or "measured" in kind]
    assert measured, [kind for kind, _ in log.events]
    assert load_weights(train(tmp_path, make_spec(stop={"steps": 14}), device))


def test_a_cpu_metric_counts_outputs_of_the_gpu(device: str, tmp_path: Path) -> None:
    class Counted:
        hits = 0

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            assert outputs.device.type == targets.device.type == "cpu"
            self.hits += int((outputs.argmax(-1) == targets).sum())

        def merge_state(self, incoming_state: Any) -> None:
            self.hits += incoming_state.hits

        def compute(self) -> float:
            return self.hits / 50

        def reset(self) -> None:
            self.hits = 0

    class Measured(Net):
        def stateful_metrics(self) -> Any:
            return {"hit_rate": Counted()}

    from shoal.train.loop.trainer import Trainer

    result = Trainer(make_spec(), Measured(), World.single(device), tmp_path, run_id="r", journal=MemoryLog()).run()
    assert result.metrics["hit_rate"] == pytest.approx(result.metrics["accuracy"])


@pytest.mark.parametrize("pin", [True, False])
def test_what_arrives_is_what_was_loaded_while_the_device_computes(device: str, pin: bool) -> None:
    """Each batch is freed as soon as its check is queued: its memory may not be written before the check has run."""
    num_rows = NUM_BATCHES * SIZE
    numbers = torch.arange(num_rows)
    rows = TensorDataset(numbers[:, None].expand(-1, WIDTH).float().contiguous(), numbers)
    num_wrong = torch.zeros((), dtype=torch.int64, device=device)
    busy = torch.ones(1024 if device == "cuda" else 16, 1024 if device == "cuda" else 16, device=device)
    seen = []
    with Loader(rows, batch_size=SIZE, spec=LoaderSpec(pin=pin), device=device) as loader:
        for values, own in loader:
            assert values.device.type == own.device.type == device
            busy = busy @ busy / busy.shape[0]
            num_wrong += (values != own[:, None]).sum()
            seen.append(own)
            del values
    assert len(seen) == NUM_BATCHES
    assert int(num_wrong) == 0
    assert torch.equal(torch.cat(seen).cpu().sort().values, numbers)


def test_a_saved_state_is_that_of_its_step_though_the_next_overwrites_it_at_once(device: str, tmp_path: Path) -> None:
    """With the tensors that an optimizer leaves on the host among those of the device, and one in another order."""
    state = {
        "weights": torch.zeros(4096, 1024, device=device),
        "turned": torch.zeros(512, 256, device=device).t(),
        "half": torch.zeros(33, device=device, dtype=torch.bfloat16),
        "host": torch.zeros(()),
    }
    steps = range(1, 7)
    with Checkpointer(tmp_path, keep=len(steps)) as checkpointer:
        for step in steps:
            if device == "cuda":
                torch.cuda._sleep(50_000_000)  # the copies are still waiting when `save` returns
            for each in state.values():
                each.fill_(step)
            checkpointer.save(step, state)
            if device == "cuda":  # on the host the copy is over by now
                for each in state.values():
                    each.fill_(-1)
    with Checkpointer(tmp_path, keep=len(steps)) as checkpointer:
        for step in steps:
            checkpointer.load(checkpointer.find(step), state)
            for name, each in state.items():
                assert bool((each == step).all()), (step, name, each.float().min(), each.float().max())


def test_the_buffer_of_a_save_is_pinned(device: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"weights": torch.zeros(8, device=require_cuda(device))})
        assert checkpointer._staging is not None
        assert checkpointer._staging._buffer.is_pinned()
