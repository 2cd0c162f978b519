"""`shoal optimise`: what is tried, measured after its last step, chosen and registered; and every wrong option."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import shoal.runs
from registered import tensors
from shoal.errors import ConfigError, MissingExtra, RegistryError
from shoal.libs.optimise import measure, search
from shoal.libs.optimise.entry import build_network
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.train.export.model_entry import make_factory
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.weights import WeightSnapshot, tensor_files
from shoal.weights.tensor_files import make_weight_file, write_tensors
from typed import said, typed

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shoal.data import Data
from shoal.train import Task, TrainSpec


def points(count, seed):
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Largest(Task):
    """Which of three numbers is the largest."""

    def __init__(self, *, width: int = 256) -> None:
        self.width = width

    def model(self):
        layers = nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(self.width, 3))

    def data(self):
        return Data(points(1024, 0), validation=points(300, 1))

    def preprocess(self, arrays):
        return {name: each / 10 for name, each in arrays.items()}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean(), "margin": outputs.amax(-1).mean()}


class Spread(Largest):
    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean() * len(outputs) / 300}


class Uncounted(Largest):
    """With an operation whose arithmetic nothing knows."""

    def model(self):
        return nn.Sequential(super().model(), Rank())


class Rank(nn.Module):
    def forward(self, x):
        return x + torch.linalg.svdvals(x).sum()


class Unmeasured(Largest):
    def data(self):
        return Data(points(64, 0))


class Twice(Largest):
    def inputs(self, batch):
        return (torch.cat([batch[0], batch[0]], 1),)


class Pair(Largest):
    def inputs(self, batch):
        return (batch[0], batch[0])


class Lossless(Largest):
    loss = Task.loss

    def train_step(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class OtherLabels(Largest):
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1][:-1])


class Student(nn.Module):
    def __init__(self, hidden: int = 32, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, inputs):
        return self.layers(inputs)


def spec():
    return TrainSpec.parse({"task": __file__, "batch_size": 64, "optimizer": {"learning_rate": 3e-3},
                            "stop": {"steps": 60}, "threads": 1})
'''
REFERENCE = "largest.py:Largest"
SIGNATURE = Signature(
    inputs=tensors(input=[-1, 16]),
    outputs=tensors(output=[-1, 3]),
)


def exact_network(width: int = 256, ruin: bool = False) -> nn.Sequential:
    """Copies the three numbers, shifted above zero, through all layers; the rest is noise that nothing reads.

    ruin: a unit that is always 0 has weights that take the full range of each row in int8
    """
    torch.manual_seed(0)
    first = nn.Linear(16, width)
    second = nn.Linear(width, width)
    last = nn.Linear(width, 3)
    with torch.no_grad():
        for layer in (first, second, last):
            layer.weight[:3] = 0
            layer.weight[range(3), range(3)] = 1
            layer.bias[:3] = 0
        first.bias[:3] = 5
        if ruin:
            first.weight[9], first.bias[9] = 0, -1
            second.weight[:, 9] = 1e6
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def register(network: nn.Module, factory: ModelFactory | None = None, name: str = "largest") -> ModelVersion:
    payload = safetensors.torch.save(network.state_dict())
    made = factory or make_factory(TrainSpec(task=REFERENCE))
    return Registry().register(name, WeightSnapshot.from_payload(1, payload), model=made, signature=SIGNATURE)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "largest.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "NUM_ROUNDS", 5)
    monkeypatch.setattr(measure, "SLICE_S", 0.002)


def optimise(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said("optimise", *arguments, "--json"))
    return found


def answer(version: ModelVersion, inputs: np.ndarray) -> np.ndarray:
    """As an endpoint answers, with its hooks."""
    predictor = Predictor(version.manifest.model, version.manifest.signature, ModelOptions())
    (found,) = predictor.load(version.snapshot()).predict_batch([{"input": inputs}])
    assert isinstance(found, dict)
    return found["output"]


INPUTS = np.random.default_rng(0).standard_normal((8, 16), np.float32)


def test_a_student_is_trained_converted_measured_and_registered(tmp_path: Path) -> None:
    teacher = register(exact_network())
    found = optimise("largest", "--student", "width=32", "--max-drop", "20%", "--by", "size", "--out", str(tmp_path))
    by_steps = {", ".join(each["steps"]): each for each in found["models"]}
    assert by_steps.keys() >= {"", "int8", "bf16", "onnx", "onnx-int8", "distil width=32", "distil width=32, onnx-int8"}
    assert found["rejected"] == [{"steps": "distil width=32, int8", "problem": found["rejected"][0]["problem"]}]
    assert by_steps[""]["metrics"]["accuracy"] == 1.0
    assert by_steps["distil width=32"]["flops"] == 2 * (16 * 32 + 32 * 32 + 32 * 3)
    (chosen,) = [each for each in found["models"] if each["chosen"]]
    assert chosen["steps"][0] == "distil width=32"
    assert chosen["metrics"]["accuracy"] >= found["limit"] == pytest.approx(0.8)
    small = Registry().get("largest@small")
    assert small.ref == found["registered"] == "largest@2"
    assert Registry().get("largest@champion").ref == teacher.ref  # endpoints that follow it are not changed
    assert small.manifest.lineage["parent"] == "largest@1"
    assert small.manifest.lineage["steps"] == ", ".join(chosen["steps"])
    assert small.manifest.lineage["measured"]["size_bytes"] == small.manifest.size_bytes == chosen["size_bytes"]
    assert small.manifest.run_id == chosen["run"] == shoal.runs.load("latest").id
    assert answer(small, INPUTS * 10).argmax(1).tolist() == INPUTS[:, :3].argmax(1).tolist()  # its hook divides
    pictures = [path.suffix for path in tmp_path.glob("optimise-largest-1-*")]
    assert sorted(pictures) == [".json", ".png"]


@pytest.mark.parametrize(("step", "share"), [("int8", 0.35), ("bf16", 0.6), ("onnx-int8", 0.4)])
def test_a_converted_model_answers_at_an_endpoint_as_its_parent(step: str, share: float) -> None:
    teacher = register(exact_network())
    found = optimise("largest", "--student", "none", "--try", step, "--by", "size", "--max-drop", "5%")
    small = Registry().get(found["registered"])
    assert small.manifest.size_bytes < share * teacher.manifest.size_bytes
    np.testing.assert_allclose(answer(small, INPUTS), answer(teacher, INPUTS), atol=0.1)
    assert "parent, largest@1" in str(typed("optimise largest@small").exception)


@pytest.mark.soak
def test_a_teacher_and_a_student_may_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = register(exact_network())
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 1 << 10)
    state = exact_network().state_dict()
    types = {name: (each.dtype, each.shape) for name, each in state.items()}
    file = make_weight_file(1, write_tensors(tmp_path / "run/model.safetensors", types, state.items()))
    parts = Registry().register("parts", file, model=one.manifest.model, signature=SIGNATURE)
    assert len(parts.manifest.parts) > 1
    found = optimise("parts", "--student", "width=32", "--try", "int8", "--max-drop", "90%", "--by", "size")
    assert [each["steps"] for each in found["models"]] == [[], ["distil width=32"], ["int8"]]
    assert found["models"][0]["metrics"]["accuracy"] == 1.0
    assert found["models"][0]["size_bytes"] == one.manifest.size_bytes
    assert answer(Registry().get(found["registered"]), INPUTS).shape == (8, 3)


def test_a_model_that_a_step_ruins_is_not_chosen() -> None:
    register(exact_network(ruin=True))
    found = optimise("largest", "--student", "none", "--try", "int8", "--by", "size")
    before, after = (each["metrics"]["accuracy"] for each in found["models"])
    assert (before, found["registered"]) == (1.0, None)
    assert after < 0.6
    assert found["models"][1]["verdict"]["status"] == "beyond"
    shown = typed("optimise largest --student none --try int8 --by size").stdout
    assert "largest@1 stays" in shown
    assert "300 rows decide, with a confidence of 0.95" in shown
    assert len(Registry().list("largest")) == 1


def test_too_few_rows_decide_nothing_and_their_number_is_said() -> None:
    register(exact_network())
    asked = ["largest", "--student", "none", "--try", "bf16", "--by", "size", "--max-drop", "0.1%"]
    shown = typed("optimise", *asked).stdout
    assert "undecided: " in shown
    assert "rows more are needed" in shown
    assert "largest@1 stays" in shown
    found = optimise(*asked, "--confidence", "0.5")
    assert found["registered"] == "largest@2"
    verdict = {"drop": 0.0, "low": 0.0, "high": 0.0, "status": "within", "num_rows": 300, "more_rows": None}
    assert found["models"][1]["verdict"] == verdict


def test_a_metric_that_is_no_mean_over_rows_is_judged_by_its_value() -> None:
    register(exact_network())
    shown = typed(
        "optimise", "largest", "--data", "largest.py:Spread", "--student", "none", "--try", "bf16", "--by", "size"
    ).stdout
    assert "accuracy is no mean over rows" in shown
    assert "largest@2" in shown


@pytest.mark.soak
def test_a_student_of_another_class_is_registered_with_its_text(tmp_path: Path) -> None:
    register(exact_network())
    asked = ["largest", "--data", REFERENCE, "--student", "largest.py:Student,hidden=48", "--try", "none"]
    found = optimise(*asked, "--max-drop", "90%", "--by", "size", "--name", "tiny")
    small = Registry().get("tiny@small")
    assert small.ref == found["registered"]
    (tmp_path / "largest.py").unlink()
    network = build_network(small.manifest.model, small.snapshot().payload)
    np.testing.assert_allclose(answer(small, INPUTS), network(torch.from_numpy(INPUTS / 10)), rtol=1e-4)  # its hook


def test_the_default_student_has_half_the_width_and_its_run_can_be_resumed() -> None:
    register(exact_network())
    found = optimise("largest", "--try", "none", "--max-drop", "0%", "stop.steps=2")
    assert [each["steps"] for each in found["models"]] == [[], ["distil width=128"]]
    run_id = found["models"][1]["run"]
    found = optimise(
        "largest", "--data", REFERENCE, "--student", "width=128", "--try", "none", f"resume={run_id}", "stop.steps=4"
    )
    assert found["models"][1]["run"] == run_id
    assert shoal.runs.load(run_id).latest()["train/step"] == 4


def test_nothing_is_registered_of_an_interrupted_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    register(exact_network())
    stopped = TrainResult("", "interrupted", "", 1, 1, 0.0)
    monkeypatch.setattr(search, "fit_locally", lambda *_, **__: stopped)
    done = typed("optimise largest --student width=32")
    assert done.exit_code == 130
    assert len(Registry().list("largest")) == 1


OWN = {"workers": "2", "init": "largest", "name": "tiny", "task": "lenet", "stop.target": "accuracy>=0.9"}


@pytest.mark.parametrize(
    ("arguments", "field", "problem"),
    [
        (["--max-drop", "much"], "--max-drop", "is no drop"),
        (["--max-drop", "100%"], "--max-drop", "allows any model"),
        (["--batch", "1"], "--batch", "is no batch"),
        (["--batch", "400"], "data", "300"),
        (["--temperature", "0"], "--temperature", "above 0"),
        (["--confidence", "95"], "--confidence", "0.5 to below 1"),
        (["--weight", "1.5"], "--weight", "at most 1"),
        (["--alias", "Small!"], "--alias", "is not a name"),
        (["--name", "no/name"], "--name", "is not a name"),
        (["--name", "LARGEST"], "--name", "capitals alone"),
        (["--try", "int4"], "--try", "is no step"),
        (["--student", "none", "--student", "width=32"], "--student", "with others"),
        (["--student", "width"], "--student", "name a class"),
        (["--student", "height=32"], "--student", "refused them"),
        (["--student", "width=-1"], "--student", "cannot be built"),
        (["--student", "absent.py:Student"], "--student", "no such file"),
        (["--student", "largest.py:Missing"], "--student", "no 'Missing'"),
        (["--student", "largest.py:Student,outputs=4"], "--student", "the teacher output [2, 3]"),
        (["--student", "largest.py:points,count=4,seed=0"], "--student", "gives a TensorDataset"),
        (["--metric", "f1"], "--metric", "is not evaluated"),
        (["--metric", "margin"], "--metric", "whether more is better"),
        (["--data", "absent.py:Task"], "task", "no file"),
        (["--data", "largest.py:Unmeasured"], "--data", "no validation data"),
        (["--data", "largest.py:Twice"], "--data", "does not take the Task's inputs [2, 32]"),
        (["--data", "largest.py:Pair"], "--data", "takes input"),
        (["--data", "largest.py:OtherLabels"], "--data", "does not measure the outputs"),
        (["--data", "largest.py:Lossless"], "--data", "has no loss"),
        (["--student", "width=8", "--student", "width=16", "resume=r"], "resume", "one student's run"),
        (["stop.steps=null"], "stop", "nothing says when to end"),
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate", "greater than 0"),
        (["--out", "largest.py"], "--out", "takes no files"),
        *(([f"{name}={value}"], name, "is not for a student's training") for name, value in OWN.items()),
    ],
)  # fmt: skip
def test_a_wrong_option_is_rejected_before_anything_is_trained(arguments: list[str], field: str, problem: str) -> None:
    register(exact_network())
    done = typed("optimise largest", *arguments)
    assert isinstance(done.exception, ConfigError), done.output
    assert done.exception.field == field
    assert problem in str(done.exception)
    assert not shoal.runs.list_runs()


def test_what_cannot_be_counted_is_not_compared_by_flops() -> None:
    network = nn.Sequential(exact_network(), nn.Identity())
    register(network, make_factory(TrainSpec(task="largest.py:Uncounted")))
    error = typed("optimise largest --student none --try none --by flops").exception
    assert isinstance(error, ConfigError)
    assert (error.field, error.value) == ("--by", "flops")
    assert "arithmetic is unknown" in error.problem


def test_a_library_for_the_picture_is_missed_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    register(exact_network())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert isinstance(typed("optimise largest").exception, MissingExtra)
    assert not shoal.runs.list_runs()


def test_a_model_that_cannot_be_made_smaller_is_rejected() -> None:
    with pytest.raises(RegistryError, match="largest"):
        raise typed("optimise largest").exception or AssertionError
    module = ModelFactory(factory="shoal.models.lenet:LeNet")
    register(exact_network(), module, name="handmade")
    done = typed("optimise handmade")
    assert "--data" in str(done.exception)
    assert "was not registered by a Task" in str(done.exception)
    Registry().register(
        "graph", WeightSnapshot.from_payload(1, b"graph"), model=ModelFactory(format="onnx"), signature=SIGNATURE
    )
    assert "register the module that it was exported from" in str(typed("optimise graph").exception)
