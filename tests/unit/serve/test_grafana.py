"""The boards ask for what endpoints say and what runs record, and work in any installation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport
from shoal.serve.protocol.prometheus import METRICS, render
from shoal.serve.replica.model_statistics import ModelStatistics
from unit.serve.test_metrics import report, worked

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana" / "shoal-serving.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
LABELS_OF_EVERY_SERIES = {"le", "replica"}


def family(series: str) -> str:
    stem = re.sub(r"_(bucket|sum|count)$", "", series)
    return stem if stem in METRICS and METRICS[stem].kind == "histogram" else series


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:nv|shoal)_\w+", expression))


def labels() -> dict[str, set[str]]:
    """The labels of each family, as a scrape of an endpoint has them."""
    found: dict[str, set[str]] = {}
    for line in render([report(worked())]).decode().splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(family(name), set()).update(re.findall(r'(\w+)="', rest))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_is_exported_and_asks_for_rates_of_all_but_gauges(expression: str) -> None:
    assert names(expression)
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)
    for name in names(expression):
        assert family(name) in METRICS, name
        is_rate = re.search(rf"(rate|increase)\({name}[{{\[]", expression) is not None
        assert is_rate == (METRICS[family(name)].kind != "gauge"), expression
        has = labels()[family(name)]
        selectors = re.findall(rf"\b{name}\{{([^}}]*)\}}", expression)
        used = {label for selector in selectors for label in re.findall(r"(\w+)[=!]", selector)}
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        assert used <= has, (name, used - has)
        assert grouped <= has | LABELS_OF_EVERY_SERIES, (name, grouped - has)


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {
                label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_what_is_to_be_seen_is_shown() -> None:
    shown = {family(name) for expression in EXPRESSIONS for name in names(expression)}
    hidden = set(METRICS) - shown
    assert {name for name in hidden if name.startswith("shoal_")} == set()
    assert {panel["type"] for panel in PANELS} >= {"heatmap", "timeseries", "stat"}


def test_variables_are_those_of_the_dashboard() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert names(variables["model"]["definition"]) <= set(METRICS)
    used = set(re.findall(r"\$(\w+)", " ".join(EXPRESSIONS)))
    assert used <= {"model", "__rate_interval"}


def test_a_model_without_counts_has_a_line_to_choose_it_by() -> None:
    models = {"m": ModelReport(counts=None), "n": ModelReport(counts=ModelStatistics("n").snapshot())}
    assert b'shoal_queued_rows{model="m",replica="a"} 0' in render([ReplicaReport("a", models=models)])


ROOT = Path(__file__).parents[3]
BOARDS = {
    name: json.loads((ROOT / "docs" / "grafana" / f"shoal-{name}.json").read_text())
    for name in ("training", "gateways", "learners", "sweeps", "serving")
}
KINDS = {"training": "training", "gateways": "loop", "learners": "loop", "sweeps": "sweep"}
# With a user's own part: `validation/loss` where a Task has validation data.
OF_TASKS = {"validation_loss"}


def list_panels(board: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[board]["panels"] if panel["type"] != "row"]


def list_recorded() -> set[str]:
    """All words of the package that may be names of metrics, as gauges name them."""
    sources = "\n".join(path.read_text() for path in Path(shoal.__file__).parent.rglob("*.py"))
    return {name.replace("/", "_") for name in re.findall(r'"([a-z_]+(?:/[a-z_0-9]+)*)"', sources)}


@pytest.mark.parametrize("board", KINDS)
def test_expressions_name_metrics_that_are_recorded(board: str) -> None:
    recorded = list_recorded() | OF_TASKS
    for panel in list_panels(board):
        for target in panel["targets"]:
            [(kind, metric)] = re.findall(r"ray_shoal_([a-z]+)_([a-z_0-9]+)\{run=~\"\$run\"\}", target["expr"])
            assert kind == KINDS[board]
            assert metric in recorded, metric
            [kept] = re.findall(r"by \(([a-z, ]+)\)", target["expr"])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == set(kept.split(", "))


@pytest.mark.parametrize("board", BOARDS)
def test_a_board_works_in_any_grafana(board: str) -> None:
    content = BOARDS[board]
    assert content["uid"] == f"shoal-{board}"
    assert "id" not in content
    variables = {variable["name"] for variable in content["templating"]["list"]}
    assert variables == {"datasource", "run" if board in KINDS else "model"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in list_panels(board))
    ids = [panel["id"] for panel in content["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in content["panels"]
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
