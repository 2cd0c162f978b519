"""docs/extending.md: an algorithm and a format of the user's own, each in one file outside the tree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from test_local_loop import actor

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN
from shoal.cli import cli
from shoal.errors import ConfigError
from shoal.registry import ModelFactory, Registry, Signature
from shoal.registry.model_format import FORMATS, ModelFormat
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.train.launch.local import fit_locally
from shoal.train.spec import TrainSpec
from shoal.weights import WeightSnapshot

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FILES = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))


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


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("reinforced", "is none of impala, ppo, dqn, sac, r2d2"),
        ("nothing.py:Config", "there is no file nothing.py"),
        ("reinforce.py:Nothing", "cannot be loaded .*Nothing"),
        ("reinforce.py:Reinforce", "is no subclass of shoal.extend.AlgorithmConfig"),
        ("no_such_module:Config", "No module named 'no_such_module'"),
    ],
)
def test_a_word_that_names_no_algorithm_is_refused(folder: Path, word: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)algorithm.*{problem}"):
        RLSpec().override([f"algorithm={word}"])


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


def test_a_format_of_a_module_is_served_and_its_registry_read_without_it(folder: Path) -> None:
    weight, bias = np.arange(6.0).reshape(3, 2), np.array([1.0, -1.0])
    np.savez(folder / "model.npz", weight=weight, bias=bias)
    told = CliRunner().invoke(cli, ["models", "add", "model.npz", "--format", "numpy_linear:FORMAT"])
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
    shown = CliRunner().invoke(cli, ["models", "show", "model@1"])
    assert "numpy_linear:FORMAT" in shown.output, (shown.output, shown.exception)
    with pytest.raises(ConfigError, match=r"format = 'numpy_linear:FORMAT': .*No module named"):
        Predictor(found.manifest.model, found.manifest.signature, ModelOptions())


def test_a_registry_is_read_where_the_package_of_a_format_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format_of_package = ModelFormat("linear", "numpy_linear:Template")
    with monkeypatch.context() as installed:
        installed.setitem(FORMATS, "linear", format_of_package)  # type: ignore[arg-type]  # as an entry point would
        snapshot, signature = WeightSnapshot.from_payload(1, b"numbers"), Signature(inputs=[], outputs=[])
        Registry().register("package", snapshot, model=ModelFactory(format="linear"), signature=signature)
    assert Registry().get("package@1").snapshot().payload == b"numbers"
    with pytest.raises(ConfigError, match="format = 'linear': 'linear' is none of module, torch_export"):
        Registry().register("package", snapshot, model=ModelFactory(format="linear"), signature=signature)


def test_a_format_that_nobody_has_is_refused(folder: Path) -> None:
    (folder / "model.npz").touch()
    for word in ("numpy_linear", "numpy_linear:Template"):
        refused = CliRunner().invoke(cli, ["models", "add", "model.npz", "--format", word]).exception
        assert isinstance(refused, ConfigError)
        assert refused.field == "format"
