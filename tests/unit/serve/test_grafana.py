"""The dashboard asks for what the endpoint says: its metrics, their kinds, and labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.serve.messages.replica_report import ModelReport, ReplicaReport
from shoal.serve.protocol.prometheus import METRICS, render
from shoal.serve.replica.model_statistics import ModelStatistics
from unit.serve.test_prometheus import report, worked

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
