"""What reserves GPUs from Ray, as a user starts it: training, a sweep, an endpoint, an actor-learner run.

Needs Ray; everything else in this folder runs without. All tests share one cluster of `shoal up`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

TASK = """
import torch, shoal
from torch import nn
from torch.utils.data import TensorDataset


class Line(shoal.Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))

    def data(self):
        inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
        rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return shoal.Data(train=rows, validation=rows)

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()
"""

SEEN = """
import json, sys
from shoal.cluster.attach import find_cluster
from shoal.cluster.job_main import join_cluster


def see():
    import os, torch
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()

with join_cluster(find_cluster()):
    import ray

    print(json.dumps({str(share): ray.get(ray.remote(num_gpus=float(share))(see).remote()) for share in sys.argv[1:]}))
"""

ENDPOINT = """
import json, sys
import numpy as np, shoal

rows = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
fields = {"num_gpus": float(sys.argv[2]), "model": {"device": sys.argv[1]}}
with shoal.serve("line", **fields) as endpoint, endpoint.client() as client:
    answers = [client.infer("line", rows) for _ in range(20)]
    print(json.dumps([each["output"].ravel().tolist() for each in answers]))
"""


class Home:
    """A cluster of `shoal up`, and the folder in which a user works."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {"SHOAL_HOME": str(folder / "home")}

    def run(self, *words: str, timeout_s: float = 200.0) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def shoal(self, line: str) -> str:
        return self.run("-m", "shoal", *line.split())

    def script(self, text: str, *words: str) -> str:
        return self.run("-c", text, *words).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("gpu"))
    (made.folder / "line_task.py").write_text(TASK)
    made.shoal("up")
    try:
        yield made
    finally:
        made.shoal("down")


def test_workers_see_the_gpus_that_they_asked_for(home: Home, device: str) -> None:
    shares = ("1", "0.5", "0") if device == "cuda" else ("0",)
    seen = json.loads(home.script(SEEN, *shares))
    assert {share: count for share, (_, count) in seen.items()} == {share: int(share != "0") for share in shares}, seen


def test_a_worker_trains_on_its_gpu_and_the_endpoint_answers_as_the_cpu(home: Home, device: str) -> None:
    said = home.shoal(f"run train task=line_task.py:Line device={device} stop.epochs=20 name=line")
    assert "registered line@1" in said
    share = "0.5" if device == "cuda" else "0"
    here, there = (json.loads(home.script(ENDPOINT, *words)) for words in (("cpu", "0"), (device, share)))
    for one, other in zip(here, there, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_an_actor_learner_run_learns_on_a_gpu(home: Home, device: str) -> None:
    assert "solved" in home.shoal(f"run actor_learner --actors 2 target_return=60 learner.device={device}")


def test_trials_share_a_gpu(home: Home, device: str) -> None:
    share = 0.5 if device == "cuda" else 0
    space = "optimizer.learning_rate=log(1e-3,1e-1)"
    said = home.shoal(
        f"sweep line_task.py:Line {space} device={device} stop.steps=20 --trials 3 --gpus-per-trial {share}"
    )
    assert "registered" in said, said


def test_a_population_trains_on_the_drivers_device(home: Home, device: str) -> None:
    words = "members=4 rounds=1 steps_per_round=20 metric=loss direction=min"
    said = home.shoal(f"run population task=line_task.py:Line device={device} {words}")
    assert "registered" in said, said
