"""The tutorial of tables: its Python runs, its trainings train, and its row gets an answer."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.runs
from serving.replica_set import ask, serving_one
from shoal.registry import Registry
from shoal.train.__main__ import main

PAGE = (Path(__file__).parents[3] / "docs" / "tutorials" / "table.md").read_text()
SHORT = ["stop.epochs=5", "optimizer.learning_rate=0.005", "network.members=4", "stop.convergence=null"]
SHORT += ["threads=1", "trees=false"]


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


async def test_the_run_of_the_page_answers_the_row_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=table", *words_after("shoal run table "), *SHORT]) == 0, capsys.readouterr().err
    row = json.loads(words_after("curl -s ")[-1])
    async with serving_one("churn") as (_, replica):
        answer = await ask(replica, "POST", "/v2/models/churn/rows", row)
        assert (answer.status, answer.body["churned"]) == (200, "yes")
        assert sorted(answer.body["probability"]) == ["no", "yes"]
        gaps = await ask(replica, "POST", "/v2/models/churn/rows", [dict.fromkeys(row), row])
        assert [each["churned"] for each in gaps.body][1] == "yes"
        for field, value in {"plan": "gold", "since": "soon", "age": "old", "newsletter": 3}.items():
            wrong = await ask(replica, "POST", "/v2/models/churn/rows", {**row, field: value})
            assert (wrong.status, wrong.body["field"]) == (422, field)


def test_the_network_of_ones_own_trains(capsys: pytest.CaptureFixture[str]) -> None:
    words = [each for each in words_after("python -m shoal.train ") if not each.startswith("stop.")]
    assert main([*words, "stop.steps=3", "threads=1"]) == 0, capsys.readouterr().err
    args = Registry().get("churn@champion").manifest.model.kwargs["args"]
    assert [each["name"] for each in args["encoders"]["columns"]] == ["plan", "since", "balance", "newsletter"]
