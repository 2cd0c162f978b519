"""The boards of runs ask for gauges of metrics that runs record; and every board works in any installation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import shoal

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
