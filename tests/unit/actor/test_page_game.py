"""The game of the page for beginners is one, and says whether an episode has succeeded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.actor.agent_streams import find_success
from shoal.actor.environment import check_step, make_environment, reset_environment

PAGE = Path(__file__).parents[3] / "docs" / "getting-started.md"


def test_it_can_be_played_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```python file=grid.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "grid_of_page.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    game = make_environment("grid_of_page:Grid-v0")
    _, info = reset_environment(game, "Grid-v0")
    check_step(game, "Grid-v0", info)
    game.reset(seed=1)
    steps = [game.step(0) for _ in range(30)]
    assert {find_success(info) for *_, info in steps} == {False}
    assert [truncated for _, _, _, truncated, _ in steps] == [False] * 29 + [True]
