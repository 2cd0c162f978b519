"""The tutorial of tables: its Python runs, its trainings train, and its row gets an answer."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal.runs
from shoal.registry import Registry
from shoal.train.__main__ import main

PAGE = (Path(__file__).parents[3] / "docs" / "tutorials" / "table.md").read_text()
SHORT = [
    "stop.epochs=5",
    "optimizer.learning_rate=0.005",
    "network.members=4",
    "stop.convergence=null",
    "threads=1",
    "trees=false",
]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        Path(name).write_text(text)
    exec(compile(Path("make_customers.py").read_text(), "make_customers.py", "exec"), {})
    yield
    sys.modules.pop("shoal_task_churn", None)


def words_after(beginning: str) -> list[str]:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(beginning))
    return shlex.split(line.removeprefix(beginning))


def test_the_run_of_the_page_answers_the_row_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=table", *words_after("shoal run table "), *SHORT]) == 0, capsys.readouterr().err
    version = Registry().get("churn@champion")
    model = version.manifest.model
    row = json.loads(words_after("curl -s ")[-1])
    assert list(row) == [each.name for each in version.manifest.signature.inputs]  # type: ignore[union-attr]
    arrays = {
        "age": np.array([float(row["age"])]),
        "plan": np.array([row["plan"].encode()], object),
        "since": np.array([row["since"]], "datetime64[s]").astype(float),
        "balance": np.array([np.nan]),
        "newsletter": np.array([float(row["newsletter"])]),
    }
    network = model.build()
    assert isinstance(network, torch.nn.Module)
    network.load_state_dict({name: torch.from_numpy(each) for name, each in version.snapshot().tensors().items()})
    preprocess, postprocess = model.make_hook("preprocess"), model.make_hook("postprocess")
    assert preprocess is not None
    assert postprocess is not None
    with torch.no_grad():
        scores = network.eval()(*(torch.from_numpy(each) for each in preprocess(arrays).values()))
    assert postprocess({"output": scores.numpy()})["churned"][0] == "yes"


def test_the_network_of_ones_own_trains(capsys: pytest.CaptureFixture[str]) -> None:
    words = [each for each in words_after("python -m shoal.train ") if not each.startswith("stop.")]
    assert main([*words, "stop.steps=3", "threads=1"]) == 0, capsys.readouterr().err
    args = Registry().get("churn@champion").manifest.model.kwargs["args"]
    assert [each["name"] for each in args["encoders"]["columns"]] == ["plan", "since", "balance", "newsletter"]
