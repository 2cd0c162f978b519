"""`shoal plan` for a model that this process does not hold: every plan is counted, none is run."""

import json
from pathlib import Path

import pytest
import torch

from shoal.cost import fake_tensors
from shoal.errors import ConfigError
from shoal.libs.planning import planner
from shoal.libs.planning.hardware import HardwareSpec
from shoal.libs.planning.large_planner import LargePlanner
from shoal.libs.planning.predict import fake_step
from shoal.parallel import ParallelDims
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.task import make_task
from typed import said

TASK = """
import torch
from torch import nn
from shoal.data import Data
from shoal.models.decoder import Decoder
from shoal.train import Task

class Text(Task):
    def model(self):
        return Decoder(64, 8, 16, 8, heads=2)
    def data(self):
        tokens = torch.zeros(64, 8, dtype=torch.int64)
        return Data(torch.utils.data.TensorDataset(tokens, tokens))
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())
"""
HARDWARE = ["hosts=2", "devices=2", "network=10Gbit", "device_bandwidth=100GB", "device_flops=1TFLOP"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fake_tensors, "MAX_REAL_BYTES", 1000)
    path = tmp_path / "text_task.py"
    path.write_text(TASK)
    return path


PLANS = ("one device", "fsdp=4", "fsdp=2 x tensor=2", "ddp=2 x pipeline=2, 4 micro-batches", "DiLoCo, every 50 steps")


def test_plans_are_counted_and_what_does_not_fit_has_its_number(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_step, "NUM_BLOCKS", (1, 2))
    enumerate_all = planner.enumerate_candidates
    monkeypatch.setattr(
        planner, "enumerate_candidates", lambda *words: [each for each in enumerate_all(*words) if each.name in PLANS]
    )
    words = [f"{file}:Text", *HARDWARE, "device=cpu", "batch_size=32", "device_memory=300kB", "--json"]
    plans = {each["plan"]: each for each in json.loads(said("plan", *words))["plans"]}
    assert not any(each["is_run"] for each in plans.values() if each["is_applicable"])
    assert "does not fit: needs" in plans["one device"]["reason"]
    assert "can be run here" in plans["DiLoCo, every 50 steps"]["reason"]
    sharded = plans["fsdp=4"]
    assert sharded["memory_bytes"] < plans["one device"]["memory_bytes"]
    assert sharded["compute_s"] == pytest.approx(plans["one device"]["compute_s"] / 4, rel=0.01)
    assert plans["fsdp=2 x tensor=2"]["is_applicable"]
    assert plans["ddp=2 x pipeline=2, 4 micro-batches"]["bubble_s"] > 0


@pytest.mark.soak
def test_derived_plans_are_near_those_that_are_read(file: Path) -> None:
    spec = spec_from_overrides([f"task={file}:Text", "device=cpu", "batch_size=32"])
    made = planner._choose_planner(make_task(spec.task, {}), spec, HardwareSpec().override(HARDWARE), lambda line: None)
    assert isinstance(made, LargePlanner)
    plan = ParallelDims(data=4, replicate=2, shard=True)
    derived, read = made._read_steps(spec, plan, 8).at(8), made.fake.read_step(spec.parallel, plan, 8)
    assert derived.memory_peak == pytest.approx(read.memory_peak, rel=0.05)
    assert derived.values["memory_optimizer"] == pytest.approx(read.values["memory_optimizer"], rel=0.01)


def test_links_that_nothing_measures_must_be_given(file: Path) -> None:
    spec = spec_from_overrides([f"task={file}:Text", "device=cpu", "batch_size=32"])
    with pytest.raises(ConfigError, match="device_bandwidth=300GB"):
        planner.rank_plans(make_task(spec.task, {}), spec, HardwareSpec(devices=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
@pytest.mark.parametrize(("missing", "example"), [("device_flops", "400TFLOP"), ("device_memory", "80GB")])
def test_what_a_gpu_that_is_not_here_has_must_be_given(file: Path, missing: str, example: str) -> None:
    spec = spec_from_overrides([f"task={file}:Text", "device=cuda", "batch_size=32"])
    given = [each for each in (*HARDWARE, "device_memory=80GB") if not each.startswith(missing)]
    with pytest.raises(ConfigError, match=f"{missing}={example}"):
        planner.rank_plans(make_task(spec.task, {}), spec, HardwareSpec().override(given))
