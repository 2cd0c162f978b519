"""docs/extending.md: what a user adds, each in one file outside the tree."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from test_spaces_loop import actor
from torch import Tensor

import shoal.runs
from blocks import read_files
from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN
from shoal.data.loader import Loader
from shoal.errors import ConfigError
from shoal.extend.contracts import AlgorithmContract
from shoal.registry import ModelFactory, Registry, Signature
from shoal.rl.algorithm_config import find_algorithm_config_type
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.train.launch.local import fit_locally
from shoal.train.loop.components import BatchStream
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from shoal.weights import WeightSnapshot
from typed import typed

FILES = read_files("extending.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_an_algorithm_of_a_file_learns(folder: Path) -> None:
    words = ["algorithm=reinforce.py:ReinforceConfig", "algorithm.learning_rate=0.02"]
    sizes = ["learner.batch_steps=64", "learner.max_batch_steps=64", "learner.take_timeout_s=0.1"]
    spec = RLSpec(hidden=(16,)).override([*words, *sizes])
    again = RLSpec.from_record(spec.to_record())
    assert again == spec
    assert again.algorithm.name == "reinforce.py:ReinforceConfig"
    experience = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(spec.hidden))
    with LocalLoop(spec, experience, folder / "run", TOKEN, target_return=7.0) as loop:
        actors = [actor(loop, index) for index in range(2)]
        assert loop.wait_until_solved(timeout_s=600) > 0
    for thread in actors:
        thread.join(60)
    assert loop.learner.counts["consumed"] > 0


def test_an_algorithm_of_a_file_keeps_the_contract(folder: Path) -> None:
    class TestReinforce(AlgorithmContract):
        config = find_algorithm_config_type("reinforce.py:ReinforceConfig")(name="reinforce.py:ReinforceConfig")

    contract = TestReinforce()
    contract.test_a_step_changes_the_weights_and_has_finite_metrics()
    contract.test_a_batch_without_a_finite_loss_changes_no_weights()
    contract.test_a_restored_algorithm_takes_the_same_step()


def test_a_kind_of_run_of_a_file_has_a_record_and_a_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit_curve.py", "degree=4"])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runpy.run_path("fit_curve.py", run_name="__main__")
    run = shoal.runs.load("latest")
    assert (run.kind, run.status) == ("curve", shoal.runs.Status.FINISHED)
    assert "fit/error" in (run.folder / "report.html").read_text()
    shown = typed("runs", run.id)
    assert shown.exit_code == 0, shown.output
    monkeypatch.setattr(sys, "argv", ["fit_curve.py", "degree=60"])
    with pytest.raises(SystemExit):
        runpy.run_path("fit_curve.py", run_name="__main__")
    assert "use points=61 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("reinforced", "is none of impala, ppo, grpo, rloo, reinforce_pp, dqn, sac, r2d2"),
        ("nothing.py:Config", "there is no file nothing.py"),
        ("reinforce.py:Nothing", "cannot be loaded .*Nothing"),
        ("reinforce.py:Reinforce", "is no subclass of shoal.extend.AlgorithmConfig"),
        ("no_such_module:Config", "No module named 'no_such_module'"),
    ],
)
def test_a_word_that_names_no_algorithm_is_refused(folder: Path, word: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)algorithm.*{problem}"):
        RLSpec().override([f"algorithm={word}"])


LINE = """
import shoal
import torch


class Line(shoal.Task):
    def model(self):
        return torch.nn.Linear(3, 1)

    def data(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        return shoal.Data(train=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)))

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()
"""
RATE = 0.05
NUM_STEPS = 10
EVERY = 4


def train_pair_alone(dataset: torch.utils.data.Dataset[Any], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient descent by hand for each worker; their mean after every EVERY steps. Returns those of worker 0."""
    shares = [BatchStream(Loader(dataset, batch_size=16, share=(index, 2), seed=0)) for index in range(2)]
    pair = [(weight.double(), bias.double()) for _ in shares]
    for step in range(1, NUM_STEPS + 1):
        for index, share in enumerate(shares):
            (x, y), (weight, bias) = share.next(), pair[index]
            error = 2 * (x.double() @ weight.T + bias - y) / len(x)
            pair[index] = weight - RATE * error.T @ x.double(), bias - RATE * error.sum(0)
        if step % EVERY == 0:
            pair = 2 * [((pair[0][0] + pair[1][0]) / 2, (pair[0][1] + pair[1][1]) / 2)]
    return pair[0]


def test_a_synchronizer_of_a_file_trains_two_workers_as_by_hand(folder: Path) -> None:
    (folder / "line.py").write_text(LINE)
    words = [f"task={folder / 'line.py'}:Line", f"stop.steps={NUM_STEPS}", "workers=2", "batch_size=16", "threads=1"]
    words += ["optimizer.name=sgd", "optimizer.momentum=0", f"optimizer.learning_rate={RATE}"]
    spec = TrainSpec().override([*words, "sync.kind=gossip.py:GossipConfig", f"sync.every={EVERY}"])
    assert TrainSpec.from_record(spec.to_record()) == spec
    assert spec.has_replicas
    outcome = fit_locally(spec, registers=False)
    assert (outcome.steps, outcome.reason) == (NUM_STEPS, "steps")
    assert outcome.weights is not None
    task = make_task(spec.task, {})
    torch.manual_seed(spec.seed)
    network = task.model()
    weight, bias = train_pair_alone(task.data().train, network.weight.detach(), network.bias.detach())
    found = safetensors.torch.load_file(outcome.weights)
    torch.testing.assert_close(found, {"weight": weight.float(), "bias": bias.float()}, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["weight"], network.weight)


SIGNS = """
from typing import ClassVar

from shoal.extend import AllReduce, SyncConfig


class SignConfig(SyncConfig):
    synchronizer: ClassVar[str] = "signs:Sign"
    has_replicas: ClassVar[bool] = False
    admits_parallel: ClassVar[bool] = True
    has_every_step: ClassVar[bool] = True


class Sign(AllReduce):
    def combine_gradients(self):
        for _, each in self.model.named_parameters():
            each.grad.sign_()
"""


def test_ranks_that_take_every_step_together_may_change_its_gradients(folder: Path) -> None:
    (folder / "line.py").write_text(LINE)
    (folder / "signs.py").write_text(SIGNS)
    words = [f"task={folder / 'line.py'}:Line", "stop.steps=1", "batch_size=16", "threads=1", "optimizer.name=sgd"]
    words += ["parallel=ddp", f"optimizer.learning_rate={RATE}", "sync.kind=signs.py:SignConfig"]
    outcome = fit_locally(TrainSpec().override(words), registers=False)
    sys.modules.pop("signs")
    assert outcome.weights is not None
    torch.manual_seed(0)
    before = make_task(f"{folder / 'line.py'}:Line", {}).model().weight.detach()
    after = safetensors.torch.load_file(outcome.weights)["weight"]
    torch.testing.assert_close((after - before).abs(), torch.full((1, 3), RATE), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sync.kind=nothing.py:Config", "sync.every=2"], "there is no file nothing.py"),
        (["sync.kind=gossip.py:Gossip"], "is no subclass of shoal.extend.SyncConfig"),
        (
            ["sync.kind=gossip.py:GossipConfig", "sync.staleness=2"],
            r"sync\.staleness = 2: no such field.*GossipConfig has none",
        ),
        (["sync.kind=gossip.py:GossipConfig", "sync.evry=2"], "did you mean 'sync.every'"),
        (["sync.kind=gossip.py:GossipConfig", "parallel=fsdp", "workers=2"], "leave out `parallel`"),
    ],
)
def test_what_is_no_synchronizer_or_does_not_go_with_it_is_rejected(
    folder: Path, words: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrainSpec().override(words)


def test_a_source_of_a_file_trains_a_task_and_goes_on_where_it_was(folder: Path) -> None:
    (folder / "lines").write_text("".join(f"{each / 100} {each / 50}\n" for each in range(400)))
    words = ["task=line_source.py:Doubling", "batch_size=8", "checkpoint.every_steps=10", "threads=1"]
    spec = TrainSpec().override([*words, "optimizer.learning_rate=0.05"])
    first = fit_locally(spec.override(["stop.steps=20"]), registers=False, predicts=False)
    assert first.steps == 20
    position = int((folder / "lines.position").read_text())
    assert (folder / "lines").read_bytes()[:position].count(b"\n") == 160, "the messages of twenty steps"
    second = fit_locally(spec.override([f"resume={first.run_id}", "stop.steps=30"]), registers=False, predicts=False)
    assert second.steps == 30
    position = int((folder / "lines.position").read_text())
    assert (folder / "lines").read_bytes()[:position].count(b"\n") == 240


def test_a_format_of_a_module_travels_with_the_version_that_it_opens(folder: Path) -> None:
    weight, bias = np.arange(6.0).reshape(3, 2), np.array([1.0, -1.0])
    np.savez(folder / "model.npz", weight=weight, bias=bias)
    told = typed("models add model.npz --format numpy_linear:FORMAT")
    assert "model@champion is model@1 now." in told.output, (told.output, told.exception)
    found = Registry().get("model@champion")
    model = Predictor(found.manifest.model, found.manifest.signature, ModelOptions()).load(found.snapshot())
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    (answer,) = model.predict_batch([{"x": x}])
    np.testing.assert_allclose(answer["y"], x @ weight + bias)
    with pytest.raises(ConfigError, match=r"compile = True: is not for models of format numpy_linear:FORMAT"):
        Predictor(found.manifest.model, found.manifest.signature, ModelOptions(compile=True))

    os.remove(folder / "numpy_linear.py")
    sys.modules.pop("numpy_linear")
    shown = typed("models show model@1")
    assert "numpy_linear:FORMAT" in shown.output, (shown.output, shown.exception)
    model = Predictor(found.manifest.model, found.manifest.signature, ModelOptions()).load(found.snapshot())
    np.testing.assert_allclose(model.predict_batch([{"x": x}])[0]["y"], x @ weight + bias)
    without = found.manifest.model.model_copy(update={"code": None})
    with pytest.raises(ConfigError, match=r"format = 'numpy_linear:FORMAT': .*No module named"):
        Predictor(without, found.manifest.signature, ModelOptions())


def test_a_registry_is_read_where_the_package_of_a_format_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as installed:
        installed.setattr("shoal.plugins.find.collect_extensions", lambda group: {"linear": "numpy_linear:FORMAT"})
        snapshot, signature = WeightSnapshot.from_payload(1, b"numbers"), Signature(inputs=[], outputs=[])
        Registry().register("package", snapshot, model=ModelFactory(format="linear"), signature=signature)
    assert Registry().get("package@1").snapshot().payload == b"numbers"
    with pytest.raises(ConfigError, match="format = 'linear': 'linear' is none of module, "):
        Registry().register("package", snapshot, model=ModelFactory(format="linear"), signature=signature)


def test_a_format_that_nobody_has_is_refused(folder: Path) -> None:
    (folder / "model.npz").touch()
    for word in ("numpy_linear", "numpy_linear:Template"):
        refused = typed("models add model.npz --format", word).exception
        assert isinstance(refused, ConfigError)
        assert refused.field == "format"
