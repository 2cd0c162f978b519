"""A trained network in the registry: what is written down with it, and building it where no file of the Task's is."""

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import shoal
import shoal.runs
from registered import arrays_of, tensors
from shoal.errors import ConfigError
from shoal.loaded.__main__ import main as loaded_main
from shoal.registry import ModelFactory, Registry, Signature
from shoal.runs import Run, Status
from shoal.runs.output_files import OutputReader
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import RegisteredModel
from shoal.train.export.model_entry import build, make_factory, make_model_name
from shoal.train.launch import champion_score
from shoal.train.launch.local import fit_locally
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import find_task
from shoal.weights import WeightSnapshot, tensor_files
from shoal.weights.tensor_files import list_files, open_tensors
from train_task import Points, Toy

TASK = Path(__file__).parents[1] / "train_task.py"


def spec_of(**changes: Any) -> TrainSpec:
    base = {"task": f"{TASK}:Toy", "batch_size": 32, "threads": 1, "stop": {"epochs": 1}, "args": {"hidden": 4}}
    return TrainSpec.parse({**base, **changes})


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    """A run of a Task of which the file is gone by now."""
    copy = tmp_path / "mine.py"
    copy.write_text(TASK.read_text())
    outcome = fit_locally(spec_of(task=f"{copy}:Toy"))
    copy.unlink()
    del sys.modules["shoal_task_mine"]
    return shoal.runs.load(outcome.run_id)


def test_the_end_of_a_run_is_in_its_record_and_in_the_registry(trained: Run) -> None:
    assert trained.status is Status.FINISHED
    events = trained.last_events()
    (row,) = trained.models().to_dict("records")
    version = Registry().get("toy@champion")
    manifest = version.manifest
    assert (row["name"], row["version"]) == (version.name, version.version) == ("toy", 1)
    assert (manifest.run_id, manifest.weights_version) == (trained.id, events["trained"]["kept"])
    assert manifest.metrics == events["trained"]["metrics"]
    assert sorted(manifest.metrics) == ["accuracy", "loss"]
    assert manifest.data == events["data"]
    assert sorted(manifest.data) == ["train", "validation"]
    assert [(each.name, each.datatype, each.shape) for each in manifest.signature.inputs] == [
        ("input", "FP32", [-1, 8])
    ]
    model = manifest.model.build()  # without the Task's file
    assert isinstance(model, torch.nn.Module)
    model.load_state_dict(safetensors.torch.load_file(trained.folder / "model.safetensors"))
    assert type(model) is type(Toy(hidden=4).model())


def test_a_network_of_several_files_is_registered_served_and_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 64)
    outcome = fit_locally(spec_of())
    version = Registry().get("toy")
    assert len(version.manifest.parts) > 1
    assert outcome.weights is not None
    expected = dict(open_tensors(list_files(outcome.weights)))
    package = RegisteredModel("toy", Registry().location).load_package(1)
    model = Predictor(package.factory, package.signature, ModelOptions()).load(package.snapshot)
    assert model.predict_batch([{"input": np.zeros((1, 8), np.float32)}])[0]
    again = fit_locally(spec_of(init="toy@1", name="again", optimizer={"learning_rate": 1e-12}))
    assert again.weights is not None
    for name, tensor in open_tensors(list_files(again.weights)).items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("later", ["raise SystemExit('edited meanwhile')\n", None], ids=["edited", "removed"])
def test_what_is_registered_is_the_source_that_was_trained(
    later: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, text = tmp_path / "edited.py", TASK.read_text()
    copy.write_text(text)
    monkeypatch.delitem(sys.modules, "shoal_task_edited", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder of a task is added
    train = Trainer.run

    def edited_meanwhile(trainer: Trainer) -> TrainResult:
        outcome = train(trainer)
        copy.unlink() if later is None else copy.write_text(later)
        return outcome

    monkeypatch.setattr(Trainer, "run", edited_meanwhile)
    fit_locally(spec_of(task=f"{copy}:Toy", name="edited"))
    assert Registry().get("edited@champion").manifest.model.kwargs["source"] == text
    if later is not None:  # this process still trains what it has loaded
        assert make_factory(spec_of(task=f"{copy}:Toy")).kwargs["source"] == text


def test_a_run_trains_and_registers_the_modules_of_its_file_as_they_are_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shoal_task_reader", raising=False)
    monkeypatch.setitem(sys.modules, "train_task", sys.modules["train_task"])  # which is loaded again, too
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "reader.py"
    file.write_text("from widths import WIDTH\nfrom train_task import Toy\nclass Reader(Toy): SEEN = WIDTH\n")
    for width in (4, 16):  # other lengths: bytecode is known by the second and the length
        (tmp_path / "widths.py").write_text(f"WIDTH = {width}\n")
        fit_locally(spec_of(task=f"{file}:Reader", name="reader"), renews=True)
        assert width == find_task(f"{file}:Reader").SEEN  # type: ignore[attr-defined]
        code = Registry().get("reader").manifest.model.code
        assert code.files["widths.py"] == f"WIDTH = {width}\n"
    file.unlink()
    (tmp_path / "widths.py").write_text("raise SystemExit('edited')\n")
    package = RegisteredModel("reader", Registry().location).load_package(1)
    Predictor(package.factory, package.signature, ModelOptions()).load(package.snapshot)


def test_what_was_trained_is_registered_though_its_code_needs_a_file_that_is_not_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vocabulary").write_text("a b")
    reads = "from pathlib import Path\nPath(__file__).with_name('voc' + 'abulary').read_text()\n"
    (tmp_path / "mine.py").write_text(f"{TASK.read_text()}\n{reads}")
    fit_locally(spec_of(task=f"{tmp_path}/mine.py:Toy"))
    assert Registry().get("toy@1").manifest.metrics
    assert "cannot be loaded as it is" in caplog.text


def test_a_resumed_run_without_its_words_is_told_where_they_are() -> None:
    with pytest.raises(ConfigError, match=r"task = '': .*spec_from_overrides\(\['resume=") as refused:
        fit_locally(TrainSpec.parse({"resume": fit_locally(spec_of()).run_id, "stop": {"epochs": 2}}))
    assert refused.value.field == "task"


def test_a_registered_source_runs_as_the_file_did() -> None:
    """Not with what the module that runs it has switched on: annotations stay what they are."""
    source = "import train_task\nclass Mine(train_task.Toy):\n    wide: int\n"
    source += "    def model(self): return super().model() if self.__annotations__['wide'] is int else None\n"
    assert isinstance(build("mine.py:Mine", {}, source, "Mine"), torch.nn.Module)


def test_a_task_of_an_installed_module_is_built_by_its_name() -> None:
    factory = make_factory(spec_of(task="train_task:Toy"))
    assert factory.kwargs == {"task": "train_task:Toy", "args": {"hidden": 4}}
    assert isinstance(factory.build(), torch.nn.Sequential)


PREPARED = """
import numpy as np
from train_task import Toy


class Prepared(Toy):
    def __init__(self, scale=2.0):
        super().__init__(hidden=4)
        self.scale = scale
        if scale == 1.0:
            self.preprocess = None

    def preprocess(self, arrays):
        return {name: array * np.float32(self.scale) for name, array in arrays.items()}

    def postprocess(self, arrays):
        return {"output": -arrays["output"]}
"""


def test_what_a_task_does_to_its_inputs_is_done_by_whoever_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "prepared.py").write_text(PREPARED)
    factory = make_factory(spec_of(task=f"{tmp_path}/prepared.py:Prepared", args={"scale": 4.0}))
    (tmp_path / "prepared.py").unlink()
    del sys.modules["shoal_task_prepared"]
    signature = Signature(inputs=tensors(input=[-1, 8]), outputs=tensors(output=[-1, 3]))
    network = Toy(hidden=4).model().eval()
    rows = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)

    def answer(served: ModelFactory, **options: object) -> np.ndarray:
        predictor = Predictor(served, signature, ModelOptions.parse(options))
        state = arrays_of(network)
        return predictor.load(WeightSnapshot.of(1, state)).predict_batch([{"input": rows}])[0]["output"]

    def raw(inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(inputs)).numpy()

    np.testing.assert_allclose(answer(factory), -raw(4 * rows), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(answer(factory, preprocess="", postprocess=""), raw(rows), rtol=1e-4, atol=1e-5)
    other = f"{__name__}:_halved"
    np.testing.assert_allclose(answer(factory, preprocess=other), -raw(rows / 2), rtol=1e-4, atol=1e-5)
    without = factory.model_copy(update={"kwargs": factory.kwargs | {"args": {"scale": 1.0}}, "preprocess": ""})
    np.testing.assert_allclose(answer(without), -raw(rows), rtol=1e-4, atol=1e-5)


def _halved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array / 2 for name, array in arrays.items()}


def test_what_a_task_makes_of_its_outputs_is_what_is_registered_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = PREPARED.replace('{"output": -arrays["output"]}', '{"best": arrays["output"].argmax(-1).astype(str)}')
    (tmp_path / "named.py").write_text(text)
    fit_locally(spec_of(task=f"{tmp_path}/named.py:Prepared", name="named", args={}))
    package = RegisteredModel("named", Registry().location).load_package(1)
    assert [(each.name, each.datatype, each.shape) for each in package.signature.outputs] == [("best", "BYTES", [-1])]
    model = Predictor(package.factory, package.signature, ModelOptions()).load(package.snapshot)
    (answer,) = model.predict_batch([{"input": np.ones((2, 8), np.float32)}])
    assert set(answer["best"]) <= {b"0", b"1", b"2"}


def test_a_task_without_code_for_its_endpoint_has_none() -> None:
    factory = make_factory(spec_of(task="train_task:Toy"))
    assert (factory.preprocess, factory.postprocess) == ("", "")


def test_a_source_that_does_not_run_here_says_what_is_missing() -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match="No module named 'of_theirs'") as raised:
        build("mine.py:Mine", {}, "import of_theirs\n", "Mine")
    assert "must be installed here" in raised.value.remedy
    assert set(sys.modules) == before  # the next attempt runs it again


def test_an_error_in_a_registered_source_shows_its_lines() -> None:
    source = "from shoal.train import Task\n\n\nclass Mine(Task):\n    def model(self):\n        return 1 / 0  # here\n"
    with pytest.raises(ZeroDivisionError) as raised:
        build("mine.py:Mine", {}, source, "Mine")
    assert str(raised.traceback[-1].path) == "<mine.py:Mine, as registered>"
    assert "here" in str(raised.traceback[-1].statement)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"task": "lenet"}, "lenet"),
        ({"task": "mine.py:MyTask"}, "mytask"),
        ({"task": "/a/b/My Task.py"}, "my-task"),
        ({"task": "lenet", "name": "fashion"}, "fashion"),
        ({"task": "package.module:Mine"}, "mine"),
        ({"task": "package.module"}, "module"),
        ({"task": "lenet", "name": "Größe²"}, "gr--e"),
        ({"task": "table", "name": "{data}", "args": {"data": "s3://b/My Customers.csv.gz"}}, "my-customers"),
        ({"task": "jobs/table.py", "name": "{data}", "args": {"data": ""}}, "table"),
    ],
)
def test_the_name_of_a_model(spec: dict[str, Any], name: str) -> None:
    assert make_model_name(TrainSpec.parse(spec)) == name


def test_a_run_that_is_worse_than_the_champion_says_so() -> None:
    spec = spec_of().override(["optimizer.learning_rate=0.05", "stop.epochs=3"])
    good = fit_locally(spec, say=print)
    assert (good.model, good.decision) == ("toy@1", "champion is 1, the first")
    bad = fit_locally(spec.override(["optimizer.learning_rate=1e-9"]))
    loss, better = (f"{each.metrics['loss']:.3g}" for each in (bad, good))
    assert bad.registration == f"registered toy@2; champion stays 1: loss {better} < {loss}"
    logs = OutputReader(shoal.runs.load(bad.run_id).folder).read_new_lines(is_over=True)
    assert logs[-1] == ("driver", bad.registration)
    assert shoal.runs.load(bad.run_id).last_events()["registered"] == {"model": "toy@2", "decision": bad.decision}
    assert fit_locally(spec.override(["aliases=[champion]"])).decision == ""
    assert Registry().get("toy@champion").version == 3


MONTHLY = """
from pathlib import Path
from shoal.data import Data
from train_task import Points, Toy

class Monthly(Toy):
    def __init__(self, month, scale=1, **args):
        super().__init__(**args)
        self.month, self.scale = int(Path(month).read_text()), scale

    def data(self):
        return Data(train=Points(self.count, 1), validation=Points(50, self.month))

    def inputs(self, batch):
        return (self.scale * batch[0],)
"""


def test_the_champion_is_measured_on_the_rows_of_the_next_month(tmp_path: Path) -> None:
    file = tmp_path / "monthly.py"
    file.write_text(MONTHLY)
    months = [tmp_path / f"month{number}" for number in range(7)]
    for number, month in enumerate(months):
        month.write_text(str(number))
    spec = spec_of(task=f"{file}:Monthly", name="monthly").override([f"args.month={months[2]}", "stop.epochs=3"])
    spec = spec.override(["optimizer.learning_rate=0.05"])
    assert fit_locally(spec).decision == "champion is 1, the first"
    rows = list(Points(50, 3))
    inputs, classes = torch.stack([each[0] for each in rows]), torch.stack([each[2] for each in rows])
    network = shoal.load("monthly@1").model
    with torch.no_grad():
        theirs = float(torch.nn.functional.cross_entropy(network(inputs), classes))
    worse = fit_locally(spec.override([f"args.month={months[3]}", "optimizer.learning_rate=1e-9"]))
    shown = f"loss {theirs:.3g} < {worse.metrics['loss']:.3g} on the validation data of 2"
    assert worse.decision == f"champion stays 1: {shown}"
    better = fit_locally(spec.override([f"args.month={months[4]}", "stop.epochs=9"]))
    assert better.decision.startswith("champion is 3 now: loss ")
    assert better.decision.endswith(" on the validation data of 3")
    for scale in (
        1,
        100,
    ):  # arguments that the champion was not trained with; this one is its default, which none knows
        other = fit_locally(spec.override([f"args.month={months[6]}", f"args.scale={scale}"]))
        assert other.decision.startswith("champion stays 3: loss ")
        assert " is of other data than " in other.decision
    file.write_text(f"{MONTHLY}\n# which may prepare its inputs otherwise\n")
    edited = fit_locally(spec.override([f"args.month={months[5]}", "stop.epochs=9"]))
    assert edited.decision.startswith("champion stays 3: loss ")
    assert edited.decision.endswith("; `shoal models promote monthly@6` makes it the champion")


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGTERM, 60.0), (0, -1.0)], ids=["stopped", "late"])
def test_measuring_the_champion_ends_on_a_signal_and_in_time(
    number: int, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, months = tmp_path / "monthly.py", [tmp_path / "june", tmp_path / "july"]
    file.write_text(MONTHLY)
    for seed, month in enumerate(months):
        month.write_text(str(seed))
    spec = spec_of(task=f"{file}:Monthly", name="monthly")
    fit_locally(spec.override([f"args.month={months[0]}"]))
    make_loader = champion_score.make_loader

    def interrupt(*words: Any, **options: Any) -> Any:
        if number:
            signal.raise_signal(number)
        return make_loader(*words, **options)

    monkeypatch.setattr(champion_score, "make_loader", interrupt)
    monkeypatch.setattr(champion_score, "LIMIT_S", limit_s)
    outcome = fit_locally(spec.override([f"args.month={months[1]}"]))
    assert "monthly@champion is not measured on this data: it was stopped, or has taken" in caplog.text
    assert outcome.decision.startswith("champion stays 1: loss ")
    assert (outcome.model, outcome.signal) == ("monthly@2", number)


def test_a_version_whose_code_is_not_all_stored_is_told_at_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports a module by a name that no import statement has, from a folder that no endpoint knows."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "blocks_of_mine.py").write_text("WIDTH = 4\n")
    text = TASK.read_text().replace(
        "class Toy", "import importlib\nimportlib.import_module('blocks_' + 'of_mine')\n\n\nclass Toy"
    )
    (tmp_path / "told.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "hidden"))
    monkeypatch.setenv("SHOAL_VERIFY", "1")
    said: list[str] = []
    outcome = fit_locally(spec_of(task=f"{tmp_path}/told.py:Toy"), say=said.append)
    details = shoal.runs.load(outcome.run_id).last_events()["unservable"]
    assert details["model"] == outcome.model == "toy@1"
    assert "No module named 'blocks_of_mine'" in details["error"]
    assert any("toy@1 is registered, but an endpoint could not load it" in line for line in said)


def test_a_version_whose_code_is_stored_passes(trained: Run) -> None:
    assert loaded_main("toy@1") == 0
