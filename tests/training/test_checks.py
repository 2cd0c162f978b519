"""What is found wrong with a training run before any worker starts: field, value and remedy of each."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.errors import ConfigError, DataError, OutOfMemory, PlanError
from shoal.train.launch.validate import ValidatedRun, validate_run
from shoal.train.spec import StopSpec, TrainSpec
from train_task import Toy

HERE = "given_to_check"


class NoData(Toy):
    def data(self) -> Data:
        return [1, 2, 3]  # type: ignore[return-value]


class NoModel(Toy):
    def model(self) -> nn.Module:
        return lambda x: x  # type: ignore[return-value]


class NoLoss(Toy):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[2], reduction="none")


class LossOfOne(Toy):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs, batch).reshape(1)


class NoMetrics(Toy):
    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return None  # type: ignore[return-value]


class OneTensor(Toy):
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return batch[0]  # type: ignore[no-any-return]


class PlainNumber(Toy):
    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": 0.5}  # type: ignore[dict-item]


class Locked(Toy):
    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.lock = threading.Lock()


class Wrapped:
    """A dataset that cannot be handed to another process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return torch.zeros(8), index, 0


class Empty(Toy):
    def data(self) -> Data:
        return Data(TensorDataset(torch.zeros(0, 8), torch.zeros(0), torch.zeros(0)))


class NothingToValidate(Toy):
    def data(self) -> Data:
        return Data(super().data().train, Empty().data().train)


class Shortened(Wrapped):
    """It says that it has more than there is."""

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        if index >= 200:
            raise IndexError("past the end")
        return super().__getitem__(index)


class Short(Toy):
    def data(self) -> Data:
        return Data(Shortened())


class Huge(Toy):
    def model(self) -> nn.Module:
        return nn.Linear(8, 10**12)


class Wordless(Toy):
    def model(self) -> nn.Module:
        raise MemoryError


class NoValidation(Toy):
    def data(self) -> Data:
        return Data(super().data().train)


class Missing(Toy):
    def data(self) -> Data:
        return Data(Path("nowhere/features.bin").read_bytes())


class OnlyItems(Toy):
    def data(self) -> Data:
        return Data(object())


class OtherLoss(Toy):
    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": outputs.mean()}


class Own(Toy):
    def __init__(self, name: str = "AdamW") -> None:
        super().__init__()
        self.name = name

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(parameters, lr=0.01)  # type: ignore[no-any-return]


class Unsplittable(Toy):
    """Three outputs, which no two ranks can share."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 3))


class Double(Toy):
    def model(self) -> nn.Module:
        return super().model().double()

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0].double(),)


class Unsendable(Toy):
    def data(self) -> Data:
        return Data(Wrapped())


def spec_of(task: str = "Toy", **changes: Any) -> TrainSpec:
    base = {"task": f"{HERE}:{task}", "batch_size": 32, "stop": {"epochs": 1}}
    return TrainSpec.parse({**base, **changes})


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(HERE)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, HERE, module)


def refused(spec: TrainSpec, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """What `check` raises, which names all that a user needs."""
    with pytest.raises(ConfigError) as raised:
        validate_run(spec)
    assert type(raised.value) is kind
    assert raised.value.remedy
    assert repr(raised.value.value) in str(raised.value)
    return raised.value


def test_what_is_good_is_known_before_it_starts() -> None:
    num_parameters = sum(parameter.numel() for parameter in Toy().model().parameters())
    state = torch.get_rng_state()
    found: ValidatedRun = validate_run(
        spec_of(workers=2, parallel="ddp", stop={"epochs": 3, "target": "accuracy>=0.9"})
    )
    assert (found.steps_per_epoch, found.num_parameters) == (8, num_parameters)
    assert [(each.name, each.datatype, each.shape) for each in found.signature.inputs] == [("input", "FP32", [-1, 8])]
    assert [(each.name, each.datatype, each.shape) for each in found.signature.outputs] == [("output", "FP32", [-1, 3])]
    assert sorted(found.fingerprint) == ["train", "validation"]
    assert found == validate_run(spec_of())  # the fingerprint is of the data, not of the time
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"),
    [
        ({"workers": 3, "parallel": {"data": 2}}, "workers", 3, "use workers=2"),
        ({"workers": 4, "parallel": {"tensor": 3}}, "workers", 4, "use a multiple of 3, or other degrees"),
        ({"workers": 2, "parallel": "single"}, "workers", 2, "use workers=1"),
        ({"workers": 3, "parallel": "ddp"}, "batch_size", 32, "use 30 or 33"),
        ({"parallel": {"accumulate": 5}}, "batch_size", 32, "use 30 or 35"),
        ({"workers": 2, "parallel": "pipeline", "batch_size": 6}, "batch_size", 6, "use 4 or 8"),
    ],
)
def test_a_plan_that_does_not_fit(changes: dict[str, Any], field: str, value: object, remedy: str) -> None:
    error = refused(spec_of(**changes), PlanError)
    assert (error.field, error.value, error.remedy) == (field, value, remedy)


@pytest.mark.parametrize("parallel", ["fsdp", "tensor"])
@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_an_optimizer_that_needs_whole_parameters(name: str, parallel: str) -> None:
    error = refused(spec_of("Own", args={"name": name}, workers=2, parallel=parallel), PlanError)
    assert error.field == "parallel"
    assert f"{name} needs whole ones" in error.problem
    assert error.remedy == "use parallel=ddp, or another optimizer, as AdamW"
    for fitting in ({"args": {"name": name}, "parallel": "ddp"}, {"args": {"name": "AdamW"}, "parallel": parallel}):
        validate_run(spec_of("Own", workers=2, **fitting))


@pytest.mark.parametrize(
    ("task", "sync", "field", "problem"),
    [
        ("Toy", {"servers": 100_000}, "sync.servers", "more than the model has elements"),
        ("Double", {}, "sync.kind", "float64"),
        ("Toy", {"kind": "diloco", "fragments": 20}, "sync.fragments", "more than the model has parameters"),
    ],
)
def test_what_servers_cannot_divide(task: str, sync: dict[str, Any], field: str, problem: str) -> None:
    error = refused(spec_of(task, sync={"kind": "parameter_server", **sync}, workers=2))
    assert error.field == field
    assert problem in error.problem


def test_a_layer_that_cannot_be_split_is_named() -> None:
    error = refused(spec_of("Unsplittable", workers=2, parallel="tensor"), PlanError)
    assert "0" in str(error)  # the name of the layer
    assert "tensor" in error.field


def test_a_task_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from shoal.train import Task\nclass Mine(Task): pass\nclass Other(Task): pass\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "lenet.py").touch()
    for word, problem, remedy in [
        ("nowhere.py:Mine", "there is no file nowhere.py", str(tmp_path)),
        ("mine.py:Mien", "mine.py has no Task 'Mien'", "did you mean 'Mine'?"),
        ("mine.py", "mine.py has 2 Tasks", "name one of Mine, Other: mine.py:Mine"),
        ("broken.py:Any", "broken.py does not load: ModuleNotFoundError", ""),
        ("lenett", "cannot be found", "did you mean 'lenet'?"),
        ("", "is missing", "give task=my_task.py:MyTask"),
        ("mine.py:Mine", "Mine has no method 'model' of its own", "write model"),
    ]:
        stop = {} if word == "mine.py:Mine" else {"stop": StopSpec()}  # which is said after the Task
        with pytest.raises(ConfigError) as raised:
            validate_run(spec_of().model_copy(update={"task": word, **stop}))
        assert (raised.value.field, raised.value.value) == ("task", word)
        assert problem in raised.value.problem
        assert remedy in raised.value.remedy


def test_arguments_that_a_task_does_not_take() -> None:
    error = refused(spec_of(args={"hiden": 4}))
    assert (error.field, error.value, error.remedy) == ("args.hiden", 4, "did you mean 'hidden'?")


@pytest.mark.parametrize(
    ("task", "problem", "remedy"),
    [
        ("NoData", "NoData.data gave a list", "return shoal.data.Data(train=...)"),
        ("NoModel", "NoModel.model gave a function", "return a torch.nn.Module"),
        (
            "NoLoss",
            "NoLoss.loss = 'a tensor [2]': is not a scalar",
            "return a scalar tensor, the mean over the samples",
        ),
        (
            "LossOfOne",
            "LossOfOne.loss = 'a tensor [1]': is not a scalar",
            "return a scalar tensor, the mean over the samples",
        ),
        (
            "OtherLoss",
            "OtherLoss.metrics has a 'loss', which would take the place of the loss itself",
            "give it another",
        ),
        ("NoMetrics", "NoMetrics.metrics gave a NoneType", "return a dict of scalar tensors by name"),
        ("OneTensor", "OneTensor.inputs gave a Tensor", "return a tuple of the model's arguments"),
        ("PlainNumber", "PlainNumber.metrics: 'accuracy' = 'a float': is not a scalar", "return a scalar tensor"),
    ],
)
def test_a_task_that_gives_something_else(task: str, problem: str, remedy: str) -> None:
    error = refused(spec_of(task))
    assert problem in str(error)
    assert error.remedy.startswith(remedy)


def test_what_cannot_be_sent_to_workers() -> None:
    error = refused(spec_of("Locked", workers=2, parallel="ddp"))
    assert "cannot be sent to workers: TypeError: cannot pickle '_thread.lock'" in error.problem
    validate_run(spec_of("Locked"))  # alone it need not travel
    error = refused(spec_of("Unsendable", loader={"workers": 2}))
    assert (error.field, error.value) == ("loader.workers", 2)


def test_data_that_is_not_there() -> None:
    assert "No such file" in refused(spec_of("Missing"), DataError).problem
    error = refused(spec_of("Empty"), DataError)
    assert (error.field, error.problem) == ("data.train", "is empty")
    error = refused(spec_of("NothingToValidate"), DataError)
    assert (error.field, error.remedy) == ("data.validation", "give it samples, or leave it out")
    assert "cannot be read (in samples 202): IndexError: past the end" in refused(spec_of("Short"), DataError).problem
    error = refused(spec_of(batch_size=300), DataError)
    assert "256 samples, not one whole batch of 300" in error.problem
    assert "neither a map-style nor an iterable" in refused(spec_of("OnlyItems")).problem


def test_an_end_that_cannot_come() -> None:
    assert refused(spec_of(stop={})).field == "stop"
    error = refused(spec_of(stop={"epochs": 1, "target": "acuracy>=0.9"}))
    assert (error.field, error.value, error.remedy) == ("stop.target.metric", "acuracy", "there is loss, accuracy")
    error = refused(spec_of("NoValidation", stop={"epochs": 1, "target": "accuracy>=0.9"}))
    assert (error.field, error.remedy) == ("stop.target.metric", "give Data(validation=...)")
    error = refused(spec_of("NoValidation", stop={"convergence": {"metric": "loss"}}))
    assert (error.field, error.value) == ("stop.convergence.metric", "loss")


@pytest.mark.parametrize("task", ["Toy", "Unsendable"])
def test_a_name_that_the_registry_refuses_is_refused_before_anything_else(task: str) -> None:
    error = refused(spec_of(task, workers=2, parallel="ddp", name="N" * 129))
    assert (error.field, error.value) == ("name", "n" * 129)
    assert "128" in error.remedy


def test_a_back_end_that_this_torch_has_not() -> None:
    error = refused(spec_of(parallel={"backend": "cpu:gloo,cuda:nobody", "data": 2}, workers=2), PlanError)
    assert (error.field, error.value) == ("parallel.backend", "cpu:gloo,cuda:nobody")
    assert (error.problem, error.remedy) == ("is not in this torch", "use gloo, or leave it out")
    validate_run(spec_of(parallel={"backend": "cpu:gloo", "data": 2}, workers=2))


@pytest.mark.parametrize("task", ["Huge", "Wordless"])
def test_a_model_that_no_memory_holds(task: str) -> None:
    with pytest.raises(OutOfMemory, match=task + r"\.model needs more memory than there is \(.+\)\. Make it smaller"):
        validate_run(spec_of(task))
